#include "log_store/home_writer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "log_store/sector_runs.h"

namespace holdfast {

// Nobody else gives addresses, so that they are looked for while others look, too.
void HomeWriter::settle(std::uint32_t table, std::vector<HomeVersion>& versions) {
  constexpr std::size_t ahead = 16;
  struct New {
    std::vector<std::uint64_t> rows;
    std::vector<std::size_t> versions;
  };
  const std::span<Home> homes = homes_.of(table);
  std::vector<New> of_homes(homes.size());
  for (std::size_t i = versions.size(); i-- > 0;) {
    HomeVersion& version = versions[i];
    version.home = static_cast<std::uint32_t>(homes_.home_of(table, version.row));
    const Home& home = homes[version.home];
    version.address = version.row - home.first;
    if (!home.addresses) continue;
    if (i >= ahead && versions[i - ahead].row >= home.first && versions[i - ahead].row < home.end) {
      home.addresses->prefetch(versions[i - ahead].row - home.first);
    }
    if (const auto found = home.addresses->find(version.address)) {
      version.address = *found;
    } else {
      of_homes[version.home].rows.push_back(version.address);
      of_homes[version.home].versions.push_back(i);
    }
  }
  for (std::size_t number = 0; number < of_homes.size(); ++number) {
    const New& added = of_homes[number];
    if (added.rows.empty()) continue;
    std::uint64_t address = homes[number].addresses->add(added.rows, finders_);
    for (const std::size_t i : added.versions) versions[i].address = address++;
    io_.counters.change([&](LogStoreCounters& counters) {
      counters.placed_rows += added.rows.size();
      counters.placed_bytes += added.rows.size() * tables_[table].layout.image_bytes();
    });
  }
  std::ranges::sort(versions, {}, [](const HomeVersion& version) { return std::pair(version.home, version.address); });
}

// What lies beside the versions in the blocks that are written. Behind its last address a home has nothing.
void HomeWriter::read_beside(std::uint32_t table, const SectorRuns& runs) {
  std::vector<BlockRead> reads;
  std::uint64_t bytes = 0;
  for (auto home = homes_.of(table).begin(); const BlockRead& read : runs.reads()) {
    while (home->file.get() != read.file) ++home;
    const std::uint64_t end = tables_[table].layout.bytes_for(home->end_of_images);
    if (home->addresses && read.offset >= end) {
      std::memset(read.dst, 0, read.bytes);
      continue;
    }
    reads.push_back(read);
    bytes += read.bytes;
  }
  io_.queue.read_many(reads);
  io_.counters.change([&](LogStoreCounters& counters) {
    counters.home_bytes_read += bytes;
    counters.home_read_requests += reads.size();
  });
}

HomeWriter::Written HomeWriter::write(std::uint32_t table, std::span<const HomeVersion> versions,
                                      const std::byte* images, const SectorBuffer& buffer, const PartSize& most) {
  Written written{};
  latch_.latching([&] { written = write_some(table, versions, images, buffer, most); });
  return written;
}

// By whole blocks of the file system: single sectors in holes cost it six times the CPU, and the medium rewrites a block
// either way. A block between some that are written and the next is written back as it was read.
HomeWriter::Written HomeWriter::write_some(std::uint32_t table, std::span<const HomeVersion> versions,
                                           const std::byte* version_images, const SectorBuffer& buffer,
                                           const PartSize& most) {
  const RowLayout& layout = tables_[table].layout;
  const std::span<Home> homes = homes_.of(table);
  // No other row is in what is written: it need not be read.
  const bool alone = layout.unit_rows() == 1 && layout.unit_bytes() % io_.unit_bytes == 0;
  RunShape shape{.unit_bytes = io_.unit_bytes, .most_bytes = most.bytes, .most_writes = most.requests};
  if (!alone) {
    shape.read_gap_bytes = read_gap_bytes;
    shape.write_gap_bytes = write_gap_bytes;
    shape.least_before_write_gap = least_before_write_gap;
    shape.unit_bytes = format::block_bytes;
  }
  SectorRuns runs(buffer, shape);
  std::vector<std::byte*> images;
  std::vector<std::uint64_t> numbers;
  std::pair<std::uint32_t, std::uint64_t> changed{0, 0};  // of a home, the sectors up to there are counted
  std::uint64_t changed_sectors = 0;
  for (const HomeVersion& version : versions) {
    Home& home = homes[version.home];
    const std::uint64_t offset = layout.offset_of(version.address);
    std::byte* image = runs.place(*home.file, offset, layout.image_bytes());
    if (image == nullptr) break;
    home.is_written = true;
    images.push_back(image);
    if (homes_.bits() != nullptr) numbers.push_back(home.number_of(version.row));
    if (changed.first != version.home) changed = {version.home, 0};
    const std::uint64_t end = (offset + layout.image_bytes() - 1) / format::sector_bytes + 1;
    changed_sectors += end - std::max(changed.second, offset / format::sector_bytes);
    changed.second = end;
  }
  add_bits(numbers);
  if (!alone) read_beside(table, runs);
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (alone) std::memset(images[i], 0, layout.unit_bytes());
    std::memcpy(images[i], version_images + versions[i].image, layout.image_bytes());
  }
  io_.queue.write_many(runs.writes());
  for (const HomeVersion& version : versions.first(images.size())) {
    std::uint64_t& end = homes[version.home].end_of_images;
    end = std::max(end, version.address + 1);
  }
  io_.counters.change([&](LogStoreCounters& counters) {
    counters.home_bytes_written += runs.written_bytes();
    counters.home_write_requests += runs.writes().size();
    counters.home_sectors_changed += changed_sectors;
  });
  return {images.size(), runs.writes().size()};
}

// Rows that are going to be written home, by their numbers.
void HomeWriter::add_bits(std::span<const std::uint64_t> numbers) {
  if (homes_.bits() == nullptr) return;
  const std::lock_guard lock(finders_);
  for (const std::uint64_t number : numbers) homes_.bits()->add(number);
}

void HomeWriter::sync_written(std::uint32_t table) {
  latch_.latching([&] {
    for (Home& home : homes_.of(table)) {
      if (std::exchange(home.is_written, false)) home.file->sync();
    }
  });
}

void HomeWriter::sync_rows() {
  latch_.latching([&] {
    latch_.require_unfailed();
    make_rows_durable();
  });
}

// Returns how many there are, where that is known.
std::optional<std::uint64_t> HomeWriter::make_rows_durable() {
  std::optional<std::uint64_t> num_rows;
  if (homes_.bits() != nullptr) {
    homes_.bits()->sync();
    num_rows = homes_.bits()->count();
  }
  for (std::uint32_t table = 0; table < tables_.size(); ++table) {
    for (const Home& home : homes_.of(table)) {
      if (!home.addresses) continue;
      home.addresses->sync();
      num_rows = num_rows.value_or(0) + home.addresses->count();
    }
  }
  if (num_rows) log_.set_home_rows(num_rows);
  return num_rows;
}

void HomeWriter::begin_import(std::uint32_t table, std::span<const HomeVersion> versions) {
  if (homes_.bits() == nullptr) return;
  log_.set_home_rows(std::nullopt);
  if (log_.home_rows()) log_.checkpoint();
  std::vector<std::uint64_t> numbers;
  for (const HomeVersion& version : versions) {
    numbers.push_back(homes_.of(table)[homes_.home_of(table, version.row)].number_of(version.row));
  }
  add_bits(numbers);
}

void HomeWriter::note_import(std::uint32_t table, std::span<const HomeVersion> versions) {
  for (const HomeVersion& version : versions) homes_.of(table)[version.home].is_importing = true;
}

// What a merge wrote it has synced; where it was given up, that may be gigabytes.
void HomeWriter::sync_imports() {
  latch_.latching([&] {
    for (std::uint32_t table = 0; table < tables_.size(); ++table) {
      for (Home& home : homes_.of(table)) {
        if (!home.is_importing) continue;
        home.file->sync();
        home.is_importing = false;
      }
    }
    if (const auto num_rows = make_rows_durable(); num_rows && log_.home_rows() != num_rows) log_.checkpoint();
  });
}

}  // namespace holdfast

// Home as it is written: by merges, and by imports, whose way home begins here.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "log_store/log_store.h"
#include "log_store/sector_runs.h"

namespace holdfast {
namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of blocks, written at once
constexpr std::size_t images_bytes = std::size_t{32} << 20;  // that are made at a time,
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // and by one thread
constexpr std::size_t most_writes = 8 * BlockQueue::depth;

}  // namespace

void LogStore::import_rows(std::uint32_t number, std::span<const std::uint64_t> rows,
                           std::span<const std::byte> weights, std::span<const float> state) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const Table& table = tables_.at(number);
  const bool are_there = std::ranges::all_of(rows, [&](std::uint64_t row) { return table.has(row); });
  if (!are_there || weights.size() != rows.size() * table.layout.weight_bytes() ||
      (!state.empty() && state.size() != rows.size() * table.what.spec.state_floats)) {
    throw Error(ErrorKind::config, "imported rows do not fit table '" + table.what.name + "'");
  }
  if (!log_.live().empty()) {
    throw Error(ErrorKind::step, log_.file().name() + ": rows are imported while the log is empty; merge first");
  }
  latching([&] {
    const std::size_t rows_at_once = std::max<std::size_t>(1, images_bytes / table.layout.image_bytes());
    for (std::size_t done = 0; done < rows.size();) {
      const std::size_t some = std::min(rows.size() - done, rows_at_once);
      import_some(number, {rows.subspan(done, some), weights.data() + done * table.layout.weight_bytes(),
                           state.empty() ? nullptr : state.data() + done * table.what.spec.state_floats});
      done += some;
    }
  });
}

// Rows that home may have are written over.
void LogStore::import_some(std::uint32_t number, const Imported& imported) {
  const Table& table = tables_[number];
  std::vector<std::size_t> fresh;
  std::vector<std::size_t> known;
  for (std::size_t i = 0; i < imported.rows.size(); ++i) {
    const Home& home = table.homes[table.home_of(imported.rows[i])];
    (home.address_of(imported.rows[i], home_bits_.get()) ? known : fresh).push_back(i);
  }
  import_over(number, imported, std::move(known));
  import_fresh(number, imported, fresh);
}

// Nothing has a version of these: what a crash leaves of them is of rows that have no address yet.
void LogStore::import_fresh(std::uint32_t number, const Imported& imported, std::span<const std::size_t> which) {
  if (which.empty()) return;
  Table& table = tables_[number];
  note_imported(table, imported, which);
  const RowLayout& layout = table.layout;
  const std::vector<float> zeros(table.what.spec.state_floats);
  std::vector<std::byte> images(which.size() * layout.image_bytes());
  const std::size_t chunk_rows = std::max<std::size_t>(1, chunk_bytes / layout.image_bytes());
  parallel_for((which.size() + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    for (std::size_t k = chunk * chunk_rows; k < std::min(which.size(), (chunk + 1) * chunk_rows); ++k) {
      const std::size_t i = which[k];
      const float* of_row = imported.state == nullptr ? zeros.data() : imported.state + i * zeros.size();
      write_image(layout, number, imported.rows[i], imported.weights + i * layout.weight_bytes(), of_row,
                  images.data() + k * layout.image_bytes());
    }
  });
  std::vector<Version> versions;
  versions.reserve(which.size());
  for (std::size_t k = which.size(); k-- > 0;) versions.push_back({imported.rows[which[k]], k * layout.image_bytes()});
  settle_addresses(table, versions);  // which begins with the last of them
  for (const Version& version : versions) table.homes[version.home].is_importing = true;
  const SpareBuffers::Borrowed buffer = spare_.borrow(buffer_bytes);
  for (std::size_t done = 0; done < versions.size();) {
    const auto some = std::span(versions).subspan(done);
    done += write_home(table, some, images.data(), buffer.buffer(), {buffer_bytes, most_writes}).versions;
  }
}

// Torn at home they would be lost. So they are records of the newest step, which merges take home like any other.
void LogStore::import_over(std::uint32_t number, const Imported& imported, std::vector<std::size_t> which) {
  const RowLayout& layout = tables_[number].layout;
  const std::size_t state_floats = layout.state_bytes() / sizeof(float);
  std::ranges::sort(which, {}, [&](std::size_t i) { return imported.rows[i]; });
  const std::size_t record_rows = std::max<std::size_t>(
      1, (log_.ring_bytes() / 2 - format::block_bytes) / (layout.unit_bytes() + sizeof(std::uint64_t)));
  for (std::size_t done = 0; done < which.size();) {
    const auto some = std::span(which).subspan(done, std::min(which.size() - done, record_rows));
    std::vector<std::uint64_t> rows;
    std::vector<std::byte> weights(some.size() * layout.weight_bytes());
    std::vector<float> state(some.size() * state_floats);
    for (std::size_t k = 0; k < some.size(); ++k) {
      rows.push_back(imported.rows[some[k]]);
      std::memcpy(weights.data() + k * layout.weight_bytes(), imported.weights + some[k] * layout.weight_bytes(),
                  layout.weight_bytes());
      if (imported.state == nullptr) continue;
      std::copy_n(imported.state + some[k] * state_floats, state_floats, state.data() + k * state_floats);
    }
    const TableRows of_table{number, rows.size(), {rows.data(), weights.data(), state.data()}};
    const StepMark mark = log_.last();
    append_record(pack(mark, {&of_table, 1}));
    log_.sync();
    merge_records([&] { return mark.step; }, [](auto...) { return true; }, [] { return false; }, ~std::uint64_t{0});
    done += some.size();
  }
}

std::vector<std::uint64_t> LogStore::home_rows() const {
  std::vector<std::uint64_t> rows;
  const std::lock_guard lock(mutex_);
  for (const Table& table : tables_) {
    rows.push_back(0);
    for (const Home& home : table.homes) rows.back() += home.num_images();
  }
  return rows;
}

// As far as rows are there, where they lie by first touch.
double LogStore::num_home_blocks() const {
  double bytes = 0;
  const std::lock_guard lock(mutex_);
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) bytes += static_cast<double>(table.layout.bytes_for(home.num_images()));
  }
  return std::max(1.0, bytes / format::block_bytes);
}

double LogStore::rows_per_home_block() const {
  double rows = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const Table& table : tables_) {
      // The first that come to a home lie together.
      for (const Home& home : table.homes) rows += static_cast<double>(std::max<std::uint64_t>(1, home.num_images()));
    }
  }
  return rows / num_home_blocks();
}

// No log has these rows: what a crash leaves of them at home is there for whoever looks. So the checkpoint gives the
// bits up before the first of them is written, and takes them back once they are durable. Addresses count when they and
// their images are durable.
void LogStore::note_imported(const Table& table, const Imported& imported, std::span<const std::size_t> which) {
  if (!home_bits_) return;
  log_.set_home_rows(std::nullopt);
  if (log_.home_rows()) log_.checkpoint();
  const std::lock_guard lock(mutex_);
  for (const std::size_t i : which) {
    const std::uint64_t row = imported.rows[i];
    home_bits_->add(table.homes[table.home_of(row)].number_of(row));
  }
}

// What a merge wrote it has synced; where it was given up, that is not relied on, and may be gigabytes.
void LogStore::sync_home() {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  latching([&] {
    for (Table& table : tables_) {
      for (Home& home : table.homes) {
        if (!home.is_importing) continue;
        home.file->sync();
        home.is_importing = false;
      }
    }
    if (const auto home_rows = sync_home_rows(); home_rows && log_.home_rows() != home_rows) log_.checkpoint();
  });
}

// Which rows are home, whose images are durable: the next checkpoint may rest on it. Returns how many, where that is known.
std::optional<std::uint64_t> LogStore::sync_home_rows() {
  std::optional<std::uint64_t> home_rows;
  if (home_bits_) {
    home_bits_->sync();
    home_rows = home_bits_->count();
  }
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) {
      if (!home.addresses) continue;
      home.addresses->sync();
      home_rows = home_rows.value_or(0) + home.addresses->count();
    }
  }
  if (home_rows) log_.set_home_rows(home_rows);
  return home_rows;
}

// The log's sync may be the one that is told what home's lost.
void LogStore::require_log_synced() {
  const std::lock_guard turn(log_sync_mutex_);
  require_unfailed();
}

// Where a merge has written.
void LogStore::sync_merged(Table& table) {
  latching([&] {
    for (Home& home : table.homes) {
      if (std::exchange(home.is_merging, false)) home.file->sync();
    }
  });
}

// Says where at home the versions go, and sorts them by it. Rows without an address get one, those of which the log was
// told last first: rows that are wanted often, as a rule, which so come to lie together. Nobody else gives addresses, so
// that they are looked for while others look, too.
void LogStore::settle_addresses(Table& table, std::vector<Version>& versions) {
  constexpr std::size_t ahead = 16;
  struct New {
    std::vector<std::uint64_t> rows;
    std::vector<std::size_t> versions;
  };
  std::vector<New> of_homes(table.homes.size());
  for (std::size_t i = versions.size(); i-- > 0;) {
    Version& version = versions[i];
    version.home = static_cast<std::uint32_t>(table.home_of(version.row));
    const Home& home = table.homes[version.home];
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
    std::uint64_t address = table.homes[number].addresses->add(added.rows, mutex_);
    for (const std::size_t i : added.versions) versions[i].address = address++;
    const std::lock_guard lock(mutex_);
    counters_.placed_rows += added.rows.size();
    counters_.placed_bytes += added.rows.size() * table.layout.image_bytes();
  }
  std::ranges::sort(versions, {}, [](const Version& version) { return std::pair(version.home, version.address); });
}

// What lies beside the versions in the blocks that are written. Behind its last address a home has nothing.
void LogStore::read_homes(Table& table, const SectorRuns& runs) {
  std::vector<BlockRead> reads;
  std::uint64_t bytes = 0;
  for (auto home = table.homes.begin(); const BlockRead& read : runs.reads()) {
    while (home->file.get() != read.file) ++home;
    const std::uint64_t end = table.layout.bytes_for(home->end_of_images);
    if (home->addresses && read.offset >= end) {
      std::memset(read.dst, 0, read.bytes);
      continue;
    }
    reads.push_back(read);
    bytes += read.bytes;
  }
  queue_.read_many(reads);
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_read += bytes;
  counters_.home_read_requests += reads.size();
}

// Writes as many of the versions, from the first on, as may be written at once. By whole blocks of the file system: single
// sectors in holes cost it six times the CPU, and the medium rewrites a block either way. A block between two that are
// written is written back as it was read.
LogStore::Written LogStore::write_home(Table& table, std::span<const Version> versions, const std::byte* version_images,
                                       const SectorBuffer& buffer, const PartSize& most) {
  const RowLayout& layout = table.layout;
  // No other row is in what is written: it need not be read.
  const bool alone = layout.unit_rows() == 1 && layout.unit_bytes() % unit_bytes_ == 0;
  RunShape shape{.unit_bytes = unit_bytes_, .most_bytes = most.bytes, .most_writes = most.requests};
  if (!alone) {
    shape.read_gap_bytes = read_gap_bytes;
    shape.write_gap_bytes = write_gap_bytes;
    shape.unit_bytes = format::block_bytes;
  }
  SectorRuns runs(buffer, shape);
  std::vector<std::byte*> images;
  std::vector<std::uint64_t> numbers;
  std::pair<std::uint32_t, std::uint64_t> changed{0, 0};  // of a home, the sectors up to there are counted
  std::uint64_t changed_sectors = 0;
  for (const Version& version : versions) {
    Home& home = table.homes[version.home];
    const std::uint64_t offset = layout.offset_of(version.address);
    std::byte* image = runs.place(*home.file, offset, layout.image_bytes());
    if (image == nullptr) break;
    home.is_merging = true;
    images.push_back(image);
    if (home_bits_) numbers.push_back(home.number_of(version.row));
    if (changed.first != version.home) changed = {version.home, 0};
    const std::uint64_t end = (offset + layout.image_bytes() - 1) / format::sector_bytes + 1;
    changed_sectors += end - std::max(changed.second, offset / format::sector_bytes);
    changed.second = end;
  }
  note_home(numbers);
  if (!alone) read_homes(table, runs);
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (alone) std::memset(images[i], 0, layout.unit_bytes());
    std::memcpy(images[i], version_images + versions[i].image, layout.image_bytes());
  }
  queue_.write_many(runs.writes());
  for (const Version& version : versions.first(images.size())) {
    std::uint64_t& end = table.homes[version.home].end_of_images;
    end = std::max(end, version.address + 1);
  }
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_written += runs.written_bytes();
  counters_.home_write_requests += runs.writes().size();
  counters_.home_sectors_changed += changed_sectors;
  return {images.size(), runs.writes().size()};
}

// Rows that are going to be written home, by their numbers.
void LogStore::note_home(std::span<const std::uint64_t> numbers) {
  if (!home_bits_) return;
  const std::lock_guard lock(mutex_);
  for (const std::uint64_t number : numbers) home_bits_->add(number);
}

}  // namespace holdfast

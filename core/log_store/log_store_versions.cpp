// What a merge takes home: the index says of which rows the newest version lies in its records, and where; images come from
// memory, where somebody has them there, and else from the log.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "log_store/log_record.h"
#include "log_store/log_store.h"
#include "log_store/sector_runs.h"

namespace holdfast {
namespace {

constexpr std::size_t row_numbers_bytes = std::size_t{32} << 20;  // of parts, read at once

}  // namespace

using format::RowLogSection;
using log_record::sections_of;

bool LogStore::lies_in(const Stretch& stretch, std::uint64_t location) const {
  const std::uint64_t distance =
      location >= stretch.begin ? location - stretch.begin : location + log_.ring_bytes() - stretch.begin;
  return distance < stretch.bytes;
}

// Shares are of neighbours at home, so that what is written at once lies close; those that have no address yet are
// shared out by number.
std::uint64_t LogStore::share_of(const Table& table, std::uint64_t row, std::uint64_t num_shares) const {
  const Home& home = table.homes[table.home_of(row)];
  std::uint64_t number = row - home.first;
  if (home.addresses) {
    const auto address = home.addresses->find(number);
    if (address && *address < home.addresses_when_begun) {
      const auto rows_per_address =
          static_cast<double>(home.end - home.first) / static_cast<double>(home.addresses_when_begun);
      number = static_cast<std::uint64_t>(static_cast<double>(*address) * rows_per_address);
    }
  }
  const std::uint64_t of_table = home.first_number - table.homes.front().first_number + number;
  return std::min(of_table * num_shares / table.what.owned_rows(), num_shares - 1);
}

// The index's rows of the share. Those whose newest version is in a record that is merged are chosen; where a later one
// stands there is nothing to do; of the others, `undecided`, the index does not say whether one that is merged has them.
void LogStore::choose(std::uint32_t number, const Share& share, const Stretch& merged, const Stretch& standing,
                      std::vector<Located>& chosen, std::vector<Located>& undecided, const Between& between) {
  Table& table = tables_[number];
  const std::size_t decided_before = undecided.size();
  const auto begin = [&] {
    chosen.clear();
    undecided.resize(decided_before);
  };
  visit_index(table, begin, between, [&](std::size_t slot) {
    return table.index.visit(slot, merge_slots_, [&](std::uint64_t row, std::uint64_t location) {
      if (share.of != 1 && share_of(table, row, share.of) != share.number) return;
      if (lies_in(merged, location)) {
        chosen.push_back({row, location});
      } else if (!lies_in(standing, location)) {
        undecided.push_back({row, location});
      }
    });
  });
}

void LogStore::merge_from_memory(CopyFromMemory copy) {
  const std::lock_guard turn(memory_mutex_);
  copy_from_memory_ = std::move(copy);
}

// Of one table's versions those that are in memory; `others` get the rest. What was appended last when it was copied is the
// chosen version if that is what was appended last afterwards.
void LogStore::copy_images(std::uint32_t number, std::span<const Located> chosen, Versions& versions,
                           std::vector<Located>& others) {
  const Table& table = tables_[number];
  const RowLayout& layout = table.layout;
  std::vector<std::uint64_t> rows;
  for (const Located& version : chosen) rows.push_back(version.row);
  std::vector<bool> has;
  std::byte* const first = versions.images.data() + versions.rows.size() * layout.image_bytes();
  {
    const std::lock_guard turn(memory_mutex_);
    if (copy_from_memory_) has = copy_from_memory_(number, rows, first, layout.image_bytes());
  }
  if (has.empty()) {
    others.insert(others.end(), chosen.begin(), chosen.end());
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
      prefetch_ahead(table.index, rows.data(), i, rows.size());
      if (has[i]) has[i] = table.index.find(rows[i]) == chosen[i].location;
    }
  }
  std::byte* next = first;
  for (std::size_t i = 0; i < chosen.size(); ++i) {
    if (!has[i]) {
      others.push_back(chosen[i]);
      continue;
    }
    const std::byte* values = first + i * layout.image_bytes();
    if (next != values) std::memmove(next, values, layout.image_bytes());
    tag_image(layout, number, rows[i], next);
    versions.rows.push_back({rows[i], static_cast<std::uint64_t>(next - versions.images.data())});
    next += layout.image_bytes();
  }
}

// Of one table's versions, by the order of the log, as many images as may be read at once, from the first one on;
// `versions` has room for them. Returns how many requests that took.
std::size_t LogStore::read_images(std::uint32_t number, std::span<const Located> chosen, const SectorBuffer& buffer,
                                  const PartSize& most, Versions& versions) {
  const Table& table = tables_[number];
  const std::size_t image_bytes = table.layout.image_bytes();
  SectorRuns runs(buffer, {.read_gap_bytes = read_gap_bytes,
                           .write_gap_bytes = read_gap_bytes,
                           .unit_bytes = unit_bytes_,
                           .most_bytes = most.bytes,
                           .most_writes = most.requests});
  std::vector<const std::byte*> images;
  for (const Located& version : chosen) {
    const std::byte* image = runs.place(log_.file(), offset_of_location(version.location), image_bytes);
    if (image == nullptr) break;
    images.push_back(image);
  }
  queue_.read_many(runs.reads());
  note_log_reads(runs.reads().size(), runs.read_bytes());
  for (std::size_t i = 0; i < images.size(); ++i) {
    const auto [row, location] = chosen[i];
    if (check_image(table.layout, number, row, images[i]) != ImageState::whole) {
      throw Error(ErrorKind::corrupted, damaged(log_.file().place(offset_of_location(location)), number, row));
    }
    const std::size_t at = versions.rows.size() * image_bytes;
    std::memcpy(versions.images.data() + at, images[i], image_bytes);
    versions.rows.push_back({row, at});
  }
  return runs.reads().size();
}

// By table, those of the newest record first. The row numbers are checked here, and read again when they are wanted.
std::vector<std::vector<LogStore::Part>> LogStore::parts_of(const Records& records, const Between& between) {
  std::vector<std::vector<Part>> parts(tables_.size());
  std::uint64_t bytes = 0;
  for (auto record = records.records.rbegin(); record != records.records.rend(); ++record) {
    between();
    const SpareBuffers::Borrowed data = read_rows(*record);
    for (const RowLogSection& section : sections_of(data.data())) {
      parts[section.table].push_back({record->link.position, section});
    }
    bytes += record->images_offset;
  }
  note_log_reads(records.records.size(), bytes);
  return parts;
}

// Where the parts, the newest one first, have these rows; those that are in none of them have no place in the list.
std::vector<LogStore::Located> LogStore::newest_of(std::span<const Part> parts, std::span<const Located> wanted,
                                                   const Between& between) {
  RowIndex missing;
  for (const Located& version : wanted) missing.insert(version.row, 0);
  std::vector<Located> found;
  for (std::size_t done = 0; done < parts.size() && missing.size() != 0;) {
    between();
    const auto some = some_parts(parts.subspan(done));
    done += some.size();
    std::vector<const std::uint64_t*> numbers;
    const auto data = read_row_numbers(some, numbers);
    for (std::size_t part = 0; part < some.size(); ++part) {
      const std::uint64_t num_rows = some[part].section.num_rows;
      Locations locations = locations_of(some[part].position, some[part].section);
      for (std::uint64_t i = 0; i < num_rows; ++i) {
        prefetch_ahead(missing, numbers[part], i, num_rows);
        const std::uint64_t row = numbers[part][i];
        const std::uint64_t location = locations.next();
        if (!missing.find(row)) continue;
        missing.erase_if_equal(row, 0);
        found.push_back({row, location});
      }
    }
  }
  return found;
}

// As many as there is room for at once; at least one.
std::span<const LogStore::Part> LogStore::some_parts(std::span<const Part> parts) const {
  std::size_t bytes = 0;
  std::size_t count = 0;
  for (const Part& part : parts) {
    bytes += part.section.num_rows * sizeof(std::uint64_t);
    if (bytes > std::min(row_numbers_bytes, merge_bytes_) && count != 0) break;
    ++count;
  }
  return parts.first(count);
}

// The parts' row numbers, which live as long as what is returned.
SpareBuffers::Borrowed LogStore::read_row_numbers(std::span<const Part> parts,
                                                  std::vector<const std::uint64_t*>& numbers) {
  const auto extent_of = [unit = unit_bytes_](const RowLogSection& section) {
    const std::uint64_t begin = section.rows_offset / unit * unit;
    const std::uint64_t end = section.rows_offset + section.num_rows * sizeof(std::uint64_t);
    return std::pair(begin, format::align_up(end, unit) - begin);
  };
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += extent_of(part.section).second;
  SpareBuffers::Borrowed data = spare_.borrow(bytes);
  std::vector<BlockRead> reads;
  std::byte* next = data.data();
  for (const Part& part : parts) {
    const auto [begin, extent_bytes] = extent_of(part.section);
    reads.push_back({&log_.file(), log_.offset_of(part.position) + begin, extent_bytes, next});
    numbers.push_back(reinterpret_cast<const std::uint64_t*>(next + (part.section.rows_offset - begin)));
    next += extent_bytes;
  }
  queue_.read_many(reads);
  note_log_reads(reads.size(), bytes);
  return data;
}

}  // namespace holdfast

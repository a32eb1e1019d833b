// The log store's way home that a merge takes: table by table, and a large table a range of rows at a time, it collects
// the newest versions that the records have, and writes them.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "error.h"
#include "log_record.h"
#include "log_store.h"
#include "sector_runs.h"

namespace holdfast {

using format::RowLogSection;
using log_record::sections_of;

namespace {

// A part of a merge: so much is read, then written. Beside training a thread waits for its turn after each of the two,
// so parts are long.
constexpr std::size_t buffer_bytes = std::size_t{32} << 20;
constexpr std::size_t writes_per_part = 4 * BlockQueue::depth;
// A device reads what is between two blocks while it would turn to another request, which also takes a microsecond of
// CPU. What is written wears it out: there one block goes with its neighbours, no more.
constexpr std::size_t read_gap_bytes = 2 * format::block_bytes;
constexpr std::size_t write_gap_bytes = format::block_bytes;
constexpr std::size_t rows_looked_up_at_once = 4096;  // under the lock of the index, which fetches want

}  // namespace

// Bytes of a record, and the sectors of the log around them.
struct LogStore::Extent {
  std::uint64_t begin;
  std::uint64_t end;

  std::uint64_t first_sector() const { return begin / format::sector_bytes * format::sector_bytes; }
  std::size_t bytes() const { return format::align_up(end, format::sector_bytes) - first_sector(); }
};

// One table's part of a record, and what is read of it.
struct LogStore::Part {
  std::uint64_t position;  // of the record
  RowLogSection section;
  const std::uint64_t* rows = nullptr;
  std::size_t begin = 0;  // rows [begin, end) of the section are in the range that is being merged
  std::size_t end = 0;
  // Of these, the ones whose newest merged version is here.
  struct Chosen {
    std::size_t i;
    std::uint64_t newest;  // as in Version
    const std::byte* image;  // once it is read
  };
  std::vector<Chosen> chosen{};

  std::uint64_t image_offset(const RowLayout& layout, std::size_t i) const {
    return section.images_offset + layout.offset_of(i);
  }
};

std::uint64_t LogStore::merge(const Limit& limit, const AfterPart& after_part) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const Records records = records_between(0, limit());
  if (records.records.empty()) return 0;
  std::uint64_t merged_step = records.last_step();
  Stretch standing;
  const auto standing_now = [&] {
    if (const Records later = records_between(records.last_step(), limit()); !later.records.empty()) {
      merged_step = later.last_step();
      standing = later.stretch;
    }
    return standing;
  };
  const auto parts = parts_of(records);
  wait_for_fetches();
  const SpareBuffers::Borrowed buffer = spare_.borrow(buffer_bytes);
  double all_bytes = 0;
  for (const auto& of_table : parts) all_bytes += static_cast<double>(image_bytes_of(of_table));
  double done_bytes = 0;
  double standing_bytes = 0;
  Versions versions;
  for (std::uint32_t t = 0; t < tables_.size(); ++t) {
    const std::uint64_t num_rows = tables_[t].what.owned_rows();
    const std::uint64_t bytes = image_bytes_of(parts[t]);
    // So many ranges that the versions in one of them, all of them, are not too many to collect; where rows crowd in
    // one range they may be more.
    const std::uint64_t num_ranges = std::min((bytes + merge_bytes_ - 1) / merge_bytes_, num_rows);
    for (std::uint64_t range = 0; range < num_ranges; ++range) {
      const double range_bytes = static_cast<double>(bytes) / static_cast<double>(num_ranges);
      const RowRange rows{tables_[t].owned_row(num_rows * range / num_ranges),
                          tables_[t].owned_row(num_rows * (range + 1) / num_ranges)};
      collect(records.stretch, standing_now, t, parts[t], rows, versions);
      standing_bytes += static_cast<double>(standing.bytes) * range_bytes / all_bytes;
      write_home(tables_[t], versions, buffer.buffer(), [&](std::chrono::nanoseconds busy, double share) {
        after_part(busy, (done_bytes + share * range_bytes) / all_bytes);
      });
      done_bytes += range_bytes;
    }
    latching([&] {
      for (Home& home : tables_[t].homes) {
        if (std::exchange(home.is_merging, false)) home.file->sync();
      }
    });
  }
  latching([&] { log_.checkpoint_without(records.records.size(), merged_step); });
  give_up(records);
  std::uint64_t bytes = 0;
  for (const RowLog::Live& record : records.records) bytes += record.bytes;
  const std::lock_guard lock(mutex_);
  ++counters_.merges;
  counters_.merged_bytes += bytes;
  counters_.standing_bytes += static_cast<std::uint64_t>(standing_bytes);
  return bytes;
}

// Durable ones.
LogStore::Records LogStore::records_between(std::uint64_t after_step, std::uint64_t limit_step) const {
  const std::uint64_t limit = std::min(limit_step, log_.durable_step());
  Records found;
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > limit) break;
    if (record.link.mark.step > after_step) found.records.push_back(record);
  }
  if (!found.records.empty()) {
    const std::uint64_t begin = found.records.front().link.position;
    found.stretch = {begin % log_.ring_bytes(), found.records.back().end() - begin};
  }
  return found;
}

bool LogStore::lies_in(const Stretch& stretch, std::uint64_t location, const Table& table) const {
  const std::uint64_t offset = offset_of_location(location, table) - format::row_log_ring_offset;
  const std::uint64_t distance =
      offset >= stretch.begin ? offset - stretch.begin : offset + log_.ring_bytes() - stretch.begin;
  return distance < stretch.bytes;
}

// By table, those of the newest record first. The row numbers are checked here, and read again when they are wanted.
std::vector<std::vector<LogStore::Part>> LogStore::parts_of(const Records& records) {
  std::vector<std::vector<Part>> parts(tables_.size());
  std::uint64_t bytes = 0;
  for (auto record = records.records.rbegin(); record != records.records.rend(); ++record) {
    const SpareBuffers::Borrowed data = read_rows(*record);
    for (const RowLogSection& section : sections_of(data.data())) {
      parts[section.table].push_back({record->link.position, section});
    }
    bytes += record->images_offset;
  }
  note_log_reads(records.records.size(), bytes);
  return parts;
}

std::uint64_t LogStore::image_bytes_of(std::span<const Part> parts) const {
  std::uint64_t bytes = 0;
  for (const Part& part : parts) bytes += part.section.num_rows * tables_[part.section.table].layout.image_bytes();
  return bytes;
}

void LogStore::collect(const Stretch& merged, const std::function<Stretch()>& standing, std::uint32_t table,
                       std::span<const Part> parts, const RowRange& range, Versions& versions) {
  versions.rows.clear();
  versions.images.clear();
  versions.num_seen = 0;
  const Stretch standing_first = standing();
  RowIndex settled;  // rows that were updated since the limit, and of which a version is taken
  for (std::size_t done = 0; done < parts.size();) {
    std::vector<Part> some = some_parts(table, parts.subspan(done));
    done += some.size();
    const auto row_numbers = read_row_numbers(some, range);
    for (Part& part : some) {
      choose(merged, standing_first, part, settled);
      versions.num_seen += part.end - part.begin;
    }
    const auto images = read_images(some, tables_[table].layout);
    for (const Part& part : some) take_chosen(part, versions);
  }
  // What was on its way to durable when it was seen, stands by now.
  auto& rows = versions.rows;
  const Stretch standing_now = standing();
  std::erase_if(rows, [&](const Version& version) { return lies_in(standing_now, version.newest, tables_[table]); });
  // A row that was updated again after its newest version had been taken may have been taken twice. The sort keeps the
  // order of its versions, which is newest first.
  std::stable_sort(rows.begin(), rows.end(), [](const Version& a, const Version& b) { return a.row < b.row; });
  const auto older =
      std::unique(rows.begin(), rows.end(), [](const Version& a, const Version& b) { return a.row == b.row; });
  rows.erase(older, rows.end());
  const std::lock_guard lock(mutex_);
  counters_.merged_rows += rows.size();
  counters_.superseded_rows += versions.num_seen - rows.size();
}

// As many as there is room for at once; at least one.
std::vector<LogStore::Part> LogStore::some_parts(std::uint32_t table, std::span<const Part> parts) const {
  std::size_t bytes = 0;
  std::vector<Part> some;
  for (const Part& part : parts) {
    bytes += tables_[table].layout.bytes_for(part.section.num_rows);
    if (bytes > std::min(buffer_bytes, merge_bytes_) && !some.empty()) break;
    some.push_back(part);
  }
  return some;
}

// And finds out which of them are in the range. The numbers live as long as what is returned.
SpareBuffers::Borrowed LogStore::read_row_numbers(std::span<Part> parts, const RowRange& range) {
  const auto extent_of = [](const Part& part) {
    const std::uint64_t begin = part.section.rows_offset;
    return Extent{begin, begin + part.section.num_rows * sizeof(std::uint64_t)};
  };
  std::size_t bytes = 0;
  for (const Part& part : parts) bytes += extent_of(part).bytes();
  SpareBuffers::Borrowed data = spare_.borrow(bytes);
  std::vector<BlockRead> reads;
  std::byte* next = data.data();
  for (Part& part : parts) {
    const Extent extent = extent_of(part);
    reads.push_back({&log_.file(), log_.offset_of(part.position) + extent.first_sector(), extent.bytes(), next});
    part.rows = reinterpret_cast<const std::uint64_t*>(next + (extent.begin - extent.first_sector()));
    next += extent.bytes();
  }
  queue_.read_many(reads);
  note_log_reads(reads.size(), bytes);
  for (Part& part : parts) {
    const std::span rows(part.rows, part.section.num_rows);
    part.begin = static_cast<std::size_t>(std::lower_bound(rows.begin(), rows.end(), range.first) - rows.begin());
    part.end = static_cast<std::size_t>(std::lower_bound(rows.begin(), rows.end(), range.end) - rows.begin());
  }
  return data;
}

// The index says of most rows whether a later record has them: it points at this version, or at a later one that is
// merged too, or stands. Of a row whose newest version is neither it does not say; there the first one that is seen is
// the newest.
void LogStore::choose(const Stretch& merged, const Stretch& standing, Part& part, RowIndex& settled) const {
  const Table& table = tables_[part.section.table];
  std::vector<std::uint64_t> newest;
  Locations here = locations_of(part.position, part.section, part.begin);
  for (std::size_t begin = part.begin; begin < part.end; begin += rows_looked_up_at_once) {
    const std::size_t end = std::min(part.end, begin + rows_looked_up_at_once);
    find_newest(table, {part.rows + begin, end - begin}, newest);
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t location = newest[i - begin];
      if (location != here.next()) {
        const std::uint64_t row = part.rows[i];
        if (lies_in(merged, location, table) || lies_in(standing, location, table) || settled.find(row)) continue;
        settled.insert(row, 0);
      }
      part.chosen.push_back({i, location, nullptr});
    }
  }
}

// The chosen ones, by sectors, with what is between two of them where that costs less than a request. They live as long
// as what is returned.
SpareBuffers::Borrowed LogStore::read_images(std::span<Part> parts, const RowLayout& layout) {
  std::size_t bytes = 0;
  for (const Part& part : parts) {
    if (part.chosen.empty()) continue;
    const std::uint64_t end = part.image_offset(layout, part.chosen.back().i) + layout.image_bytes();
    bytes += Extent{part.image_offset(layout, part.chosen.front().i), end}.bytes() + read_gap_bytes;
  }
  SpareBuffers::Borrowed data = spare_.borrow(bytes);
  SectorRuns runs(data.buffer(), {.read_gap_bytes = read_gap_bytes});
  for (Part& part : parts) {
    const std::uint64_t record = log_.offset_of(part.position);
    for (Part::Chosen& chosen : part.chosen) {
      chosen.image = runs.place(log_.file(), record + part.image_offset(layout, chosen.i), layout.image_bytes());
    }
  }
  queue_.read_many(runs.reads());
  note_log_reads(runs.reads().size(), runs.read_bytes());
  return data;
}

void LogStore::take_chosen(const Part& part, Versions& versions) const {
  const RowLayout& layout = tables_[part.section.table].layout;
  for (const Part::Chosen& chosen : part.chosen) {
    const std::uint64_t row = part.rows[chosen.i];
    if (check_image(layout, part.section.table, row, chosen.image) != ImageState::whole) {
      const std::uint64_t offset = part.image_offset(layout, chosen.i);
      throw Error(ErrorKind::corrupted, damaged(log_.place(part.position + offset), part.section.table, row));
    }
    versions.rows.push_back({row, versions.images.size(), chosen.newest});
    versions.images.insert(versions.images.end(), chosen.image, chosen.image + layout.image_bytes());
  }
}

// Where the index has the rows, all of which are in the log.
void LogStore::find_newest(const Table& table, std::span<const std::uint64_t> rows,
                           std::vector<std::uint64_t>& locations) const {
  locations.clear();
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    table.index.prefetch_ahead(rows.data(), i, rows.size());
    locations.push_back(table.index.find(rows[i]).value());
  }
}

void LogStore::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
}

void LogStore::write_home(Table& table, const Versions& versions, const SectorBuffer& buffer,
                          const AfterPart& after_part) {
  for (std::size_t done = 0; done < versions.rows.size();) {
    const auto began = std::chrono::steady_clock::now();
    latching([&] {
      done += write_home_part(table, std::span(versions.rows).subspan(done), versions.images.data(), buffer);
    });
    after_part(std::chrono::steady_clock::now() - began,
               static_cast<double>(done) / static_cast<double>(versions.rows.size()));
  }
}

// Writes as many of the versions, from the first on, as the buffer and the queue hold; returns how many. Small images
// by whole blocks of the file system: single sectors in holes cost it six times the CPU, and the medium rewrites a
// block either way. A block between two that are written is written back as it was read.
std::size_t LogStore::write_home_part(Table& table, std::span<const Version> versions, const std::byte* version_images,
                                      const SectorBuffer& buffer) {
  const RowLayout& layout = table.layout;
  const bool alone = layout.unit_rows() == 1;  // no other row is in its sectors: they need not be read
  const RunShape shape = alone ? RunShape{.most_writes = writes_per_part}
                               : RunShape{.read_gap_bytes = read_gap_bytes,
                                          .write_gap_bytes = write_gap_bytes,
                                          .unit_bytes = format::block_bytes,
                                          .most_writes = writes_per_part};
  SectorRuns runs(buffer, shape);
  std::vector<std::byte*> images;
  Home* home = &table.homes[table.home_of(versions.front().row)];
  std::optional<std::pair<Home*, std::uint64_t>> last_unit;
  std::uint64_t changed_units = 0;
  for (const Version& version : versions) {
    if (version.row >= home->end) home = &table.homes[table.home_of(version.row)];
    const std::uint64_t offset = home->offset_of(layout, version.row);
    std::byte* image = runs.place(*home->file, offset, layout.image_bytes());
    if (image == nullptr) break;
    home->is_merging = true;
    images.push_back(image);
    if (const std::uint64_t unit = offset / layout.unit_bytes(); !last_unit || *last_unit != std::pair(home, unit)) {
      last_unit = {home, unit};
      ++changed_units;
    }
  }
  if (!alone) queue_.read_many(runs.reads());
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (alone) std::memset(images[i], 0, layout.unit_bytes());
    std::memcpy(images[i], version_images + versions[i].image, layout.image_bytes());
  }
  queue_.write_many(runs.writes());
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_read += alone ? 0 : runs.read_bytes();
  counters_.home_bytes_written += runs.written_bytes();
  counters_.home_read_requests += alone ? 0 : runs.reads().size();
  counters_.home_write_requests += runs.writes().size();
  counters_.home_sectors_changed += changed_units * (layout.unit_bytes() / format::sector_bytes);
  return images.size();
}

void LogStore::note_log_reads(std::uint64_t requests, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  counters_.merge_log_requests += requests;
  counters_.merge_log_bytes_read += bytes;
}

// The records' rows are home: the index forgets them, then their space may be used again.
void LogStore::give_up(const Records& records) {
  for (Table& table : tables_) {
    const std::lock_guard lock(mutex_);
    ++index_version_;
    table.index.erase_if([&](std::uint64_t location) { return lies_in(records.stretch, location, table); });
  }
  log_.forget(records.records.size());
}

}  // namespace holdfast

// The log store's ways home: a merge writes the oldest records' rows to the home files, an import those that it is given.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "error.h"
#include "log_record.h"
#include "log_store.h"
#include "parallel.h"
#include "sector_runs.h"

namespace holdfast {

using format::RowLogSection;
using log_record::rows_of;
using log_record::sections_of;

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of sectors, read and written at once
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;  // of images that one thread writes at a time
constexpr std::size_t fewest_records_looked_at = 16;  // of those that a merge keeps, for rows that they supersede
constexpr std::uint64_t rows_looked_up_at_once = 4096;  // under the lock of the index, which fetches want
constexpr int naps_per_part = 3;  // of a merge that is not urgent, each as long as the part took

}  // namespace

std::uint64_t LogStore::merge(std::uint64_t limit_step, std::uint64_t max_bytes,
                              const std::function<bool()>& is_urgent) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const Mergeable records = mergeable(limit_step, max_bytes);
  if (records.taken.empty()) return 0;
  Versions versions;
  const std::uint64_t superseded_rows = take_versions(records, versions);
  wait_for_fetches();
  const RowLog::Live& last = records.kept.empty() ? records.taken.back() : records.kept.back();
  latching([&] {
    write_home(versions, is_urgent);
    log_.checkpoint_without(records.taken.size(), last.link.mark.step);
  });
  give_up(records.taken.size(), versions);
  std::uint64_t bytes = 0;
  for (const RowLog::Live& record : records.taken) bytes += record.bytes;
  const std::lock_guard lock(mutex_);
  counters_.merged_bytes += bytes;
  counters_.superseded_rows += superseded_rows;
  for (const std::vector<Version>& of_table : versions.of_table) counters_.merged_rows += of_table.size();
  return bytes;
}

LogStore::Mergeable LogStore::mergeable(std::uint64_t limit_step, std::uint64_t max_bytes) const {
  const std::uint64_t limit = std::min(limit_step, log_.durable_step());
  Mergeable records;
  std::uint64_t bytes = 0;
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > limit) {
      ++records.num_newer;
      continue;
    }
    const bool is_enough = bytes >= max_bytes && !records.taken.empty();
    (is_enough ? records.kept : records.taken).push_back(record);
    bytes += record.bytes;
  }
  if (!records.taken.empty()) {
    const std::uint64_t begin = records.taken.front().link.position;
    records.begin = begin % log_.ring_bytes();
    records.span = (records.kept.empty() ? records.taken : records.kept).back().end() - begin;
  }
  return records;
}

bool LogStore::lies_in(const Mergeable& records, std::uint64_t location, const Table& table) const {
  const std::uint64_t offset = offset_of_location(location, table) - format::row_log_ring_offset;
  const std::uint64_t distance =
      offset >= records.begin ? offset - records.begin : offset + log_.ring_bytes() - records.begin;
  return distance < records.span;
}

// Newest record first, so that the first version of a row that is taken is the one to move. Returns how many versions are
// superseded.
std::uint64_t LogStore::take_versions(const Mergeable& records, Versions& versions) const {
  versions.of_table.resize(tables_.size());
  std::vector<RowIndex> settled = rows_kept_last(records);
  std::uint64_t superseded_rows = 0;
  for (auto record = records.taken.rbegin(); record != records.taken.rend(); ++record) {
    const SpareBuffers::Borrowed data = spare_.borrow(record->bytes);
    log_.read(*record, record->bytes, data.data());
    check_sections(*record, data.data());
    for (const RowLogSection& section : sections_of(data.data())) {
      superseded_rows += take_section(records, *record, section, data.data(), settled[section.table], versions);
    }
  }
  for (std::vector<Version>& of_table : versions.of_table) {
    std::sort(of_table.begin(), of_table.end(), [](const Version& a, const Version& b) { return a.row < b.row; });
  }
  return superseded_rows;
}

// Of the newest records that are kept. Rows that are updated in nearly every step are in them.
std::vector<RowIndex> LogStore::rows_kept_last(const Mergeable& records) const {
  std::vector<RowIndex> rows_of_table(tables_.size());
  const std::size_t count = std::min(records.kept.size(), records.num_newer + fewest_records_looked_at);
  for (const RowLog::Live& record : std::span(records.kept).last(count)) {
    const SpareBuffers::Borrowed data = read_rows(record);
    for (const RowLogSection& section : sections_of(data.data())) {
      const std::uint64_t* rows = rows_of(data.data(), section);
      for (std::uint64_t i = 0; i < section.num_rows; ++i) {
        rows_of_table[section.table].prefetch_ahead(rows, i, section.num_rows);
        rows_of_table[section.table].insert(rows[i], 0);
      }
    }
  }
  return rows_of_table;
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

// Takes the versions of one section that are to be moved, and settles their rows. The index says of most rows whether a
// later record has them: it points at this version, or at a later one that may be merged. Of a row that has been updated
// since the limit it does not say whether there is one in between. Such a row is moved unless it is settled; if there is
// one, that was for nothing: it stays in the log, and what is home is never read.
std::uint64_t LogStore::take_section(const Mergeable& records, const RowLog::Live& record, const RowLogSection& section,
                                     const std::byte* data, RowIndex& settled, Versions& versions) const {
  const Table& table = tables_[section.table];
  const RowLayout& layout = table.layout;
  const std::uint64_t* rows = rows_of(data, section);
  std::vector<std::uint64_t> newest;
  std::uint64_t superseded_rows = 0;
  for (std::uint64_t begin = 0; begin < section.num_rows; begin += rows_looked_up_at_once) {
    const std::uint64_t end = std::min<std::uint64_t>(section.num_rows, begin + rows_looked_up_at_once);
    find_newest(table, {rows + begin, end - begin}, newest);
    for (std::uint64_t i = begin; i < end; ++i) {
      const std::uint64_t offset = section.images_offset + layout.offset_of(i);
      const std::uint64_t location = location_of(record.link.position, offset, table);
      const std::uint64_t of_newest = newest[i - begin];
      const bool is_newest = of_newest == location;
      if (!is_newest && (lies_in(records, of_newest, table) || settled.find(rows[i]))) {
        ++superseded_rows;
        continue;
      }
      if (check_image(layout, section.table, rows[i], data + offset) != ImageState::whole) {
        throw Error(ErrorKind::corrupted, damaged(log_.place(record.link.position + offset), section.table, rows[i]));
      }
      auto* image = static_cast<std::byte*>(versions.images.allocate(layout.image_bytes(), 1));
      std::memcpy(image, data + offset, layout.image_bytes());
      versions.of_table[section.table].push_back({rows[i], location, image});
      settled.insert(rows[i], 0);
    }
  }
  return superseded_rows;
}

void LogStore::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
}

// Durably.
void LogStore::write_home(const Versions& versions, const std::function<bool()>& is_urgent) {
  const SpareBuffers::Borrowed buffer = spare_.borrow(buffer_bytes);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const std::span<const Version> of_table = versions.of_table[t];
    for (std::size_t done = 0; done < of_table.size();) {
      const auto began = std::chrono::steady_clock::now();
      done += write_home_part(tables_[t], of_table.subspan(done), buffer.buffer());
      if (!is_urgent()) std::this_thread::sleep_for((std::chrono::steady_clock::now() - began) * naps_per_part);
    }
  }
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    if (!versions.of_table[t].empty()) tables_[t].home->sync();
  }
}

// Writes as many of the versions, from the first on, as the buffer and the queue hold; returns how many. Small images by whole
// blocks of the file system: single sectors in holes cost it six times the CPU, and the medium rewrites a block
// either way.
std::size_t LogStore::write_home_part(const Table& table, std::span<const Version> versions,
                                      const SectorBuffer& buffer) {
  const RowLayout& layout = table.layout;
  const bool alone = layout.unit_rows() == 1;  // no other row is in its sectors: they need not be read
  SectorRuns runs(buffer, 0, alone ? format::sector_bytes : format::block_bytes, BlockQueue::depth);
  std::vector<std::byte*> images;
  for (const Version& version : versions) {
    std::byte* image = runs.place(*table.home, layout.offset_of(version.row), layout.image_bytes());
    if (image == nullptr) break;
    images.push_back(image);
  }
  if (!alone) queue_.read_many(runs.reads());
  std::uint64_t changed_units = 0;
  for (std::size_t i = 0; i < images.size(); ++i) {
    if (alone) std::memset(images[i], 0, layout.unit_bytes());
    std::memcpy(images[i], versions[i].image, layout.image_bytes());
    const bool same_unit = i > 0 && versions[i].row / layout.unit_rows() == versions[i - 1].row / layout.unit_rows();
    if (!same_unit) ++changed_units;
  }
  queue_.write_many(runs.writes());
  const std::lock_guard lock(mutex_);
  counters_.home_bytes_read += alone ? 0 : runs.used_bytes();
  counters_.home_bytes_written += runs.used_bytes();
  counters_.home_read_requests += alone ? 0 : runs.reads().size();
  counters_.home_write_requests += runs.reads().size();
  counters_.home_sectors_changed += changed_units * (layout.unit_bytes() / format::sector_bytes);
  return images.size();
}

// The records' rows are home: the index forgets them, then their space may be used again.
void LogStore::give_up(std::size_t num_records, const Versions& versions) {
  const std::lock_guard lock(mutex_);
  ++index_version_;
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    for (const Version& version : versions.of_table[t]) tables_[t].index.erase_if_equal(version.row, version.location);
  }
  log_.forget(num_records);
}

// Import.

void LogStore::import_rows(std::uint32_t table, std::uint64_t first, std::span<const std::byte> weights,
                           std::span<const float> state) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const RowTable& what = tables_.at(table).what;
  const std::size_t count = weights.size() / what.weight_bytes();
  if (weights.size() != count * what.weight_bytes() || first > what.num_rows || count > what.num_rows - first ||
      (!state.empty() && state.size() != count * what.spec.state_floats)) {
    throw Error(ErrorKind::config, "imported rows do not fit table '" + what.name + "'");
  }
  if (!log_.live().empty()) {
    throw Error(ErrorKind::step, log_.file().name() + ": rows are imported while the log is empty; merge first");
  }
  latching([&] {
    const RowLayout& layout = tables_[table].layout;
    const std::size_t unit_rows = layout.unit_rows();
    const std::size_t rows_at_once = unit_rows * std::max<std::size_t>(1, buffer_bytes / layout.unit_bytes());
    for (std::uint64_t row = first; row < first + count;) {
      const std::uint64_t end = std::min(first + count, row / unit_rows * unit_rows + rows_at_once);
      write_rows(table, row, end, weights.data() + (row - first) * layout.weight_bytes(),
                 state.empty() ? nullptr : state.data() + (row - first) * what.spec.state_floats);
      row = end;
    }
  });
}

// Whole units; the first and the last keep the rows that they have besides.
void LogStore::write_rows(std::uint32_t number, std::uint64_t first, std::uint64_t end, const std::byte* weights,
                          const float* state) {
  const Table& table = tables_[number];
  const RowLayout& layout = table.layout;
  const std::size_t unit_rows = layout.unit_rows();
  const std::uint64_t first_unit = first / unit_rows;
  const std::uint64_t begin = first_unit * layout.unit_bytes();
  const std::size_t bytes = layout.bytes_for(end - first_unit * unit_rows);
  const SpareBuffers::Borrowed buffer = spare_.borrow(bytes);
  std::memset(buffer.data(), 0, bytes);
  if (first % unit_rows != 0) queue_.read_range(*table.home, begin, layout.unit_bytes(), buffer.data());
  if (end % unit_rows != 0) {
    const std::size_t last = bytes - layout.unit_bytes();
    queue_.read_range(*table.home, begin + last, layout.unit_bytes(), buffer.data() + last);
  }
  const std::vector<float> zeros(table.what.spec.state_floats);
  const std::size_t chunk_rows = unit_rows * std::max<std::size_t>(1, chunk_bytes / layout.unit_bytes());
  parallel_for((end - first + chunk_rows - 1) / chunk_rows, [&](std::size_t chunk) {
    const std::uint64_t stop = std::min(end, first + (chunk + 1) * chunk_rows);
    for (std::uint64_t row = first + chunk * chunk_rows; row < stop; ++row) {
      const float* of_row = state == nullptr ? zeros.data() : state + (row - first) * table.what.spec.state_floats;
      write_image(layout, number, row, weights + (row - first) * layout.weight_bytes(), of_row,
                  buffer.data() + (layout.offset_of(row) - begin));
    }
  });
  queue_.write_range(*table.home, begin, bytes, buffer.data());
}

void LogStore::sync_home() {
  require_usable();
  latching([&] {
    for (const Table& table : tables_) table.home->sync();
  });
}

}  // namespace holdfast

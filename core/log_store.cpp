#include "log_store.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "checksum.h"
#include "error.h"
#include "parallel.h"

namespace holdfast {

using format::RowLogHeader;
using format::RowLogSection;

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;      // of sectors, read or written at once
constexpr std::size_t longest_run_bytes = std::size_t{1} << 20;
constexpr std::size_t joined_gap_bytes = 7 * format::sector_bytes;  // reading these costs less than one more request
constexpr std::size_t chunk_bytes = std::size_t{64} << 10;      // of images that one thread packs at a time
constexpr unsigned slot_bits = 7;  // of a location: which image of its sector; images take 6 bytes or more
constexpr std::uint64_t largest_ring_bytes = (RowIndex::end_location >> slot_bits) * format::sector_bytes;

// A store that lacks a file is damaged, not absent.
const std::string& existing(const std::string& path) {
  if (!std::filesystem::exists(path))
    throw Error(ErrorKind::corrupted, path + " is missing; the store has lost a file");
  return path;
}

std::string log_path(const std::string& directory) { return directory + "/row-log-0000"; }

std::string home_path(const std::string& directory, std::size_t table) {
  char name[64];
  std::snprintf(name, sizeof(name), "/shard-0000/table-%04zu.home", table);
  return directory + name;
}

std::uint64_t home_bytes(const RowLayout& layout, std::uint64_t num_rows) {
  return format::align_up(layout.bytes_for(num_rows), format::block_bytes);
}

// Parts of a record in memory.
RowLogHeader header_of(const std::byte* record) {
  RowLogHeader header;
  std::memcpy(&header, record, sizeof(header));
  return header;
}
std::span<const RowLogSection> sections_of(const std::byte* record) {
  return {reinterpret_cast<const RowLogSection*>(record + sizeof(RowLogHeader)), header_of(record).num_sections};
}
const std::uint64_t* rows_of(const std::byte* record, const RowLogSection& section) {
  return reinterpret_cast<const std::uint64_t*>(record + section.rows_offset);
}

}  // namespace

// Sectors of files (or units of several), gathered into few long ranges that lie one behind another in a buffer.
class LogStore::Runs {
 public:
  Runs(const SectorBuffer& buffer, std::size_t gap_bytes, std::size_t unit_bytes = format::sector_bytes)
      : buffer_(buffer), gap_bytes_(gap_bytes), unit_bytes_(unit_bytes) {}

  // Where these bytes of `file` are going to lie, or null when the buffer is full. Offsets of a file ascend.
  std::byte* place(const BlockFile& file, std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t begin = offset / unit_bytes_ * unit_bytes_;
    const std::uint64_t end = format::align_up(offset + bytes, unit_bytes_);
    if (!joins(file, begin, end)) {
      if (used_bytes_ + (end - begin) > buffer_.size()) return nullptr;
      runs_.push_back({&file, begin, end - begin, buffer_.data() + used_bytes_});
      used_bytes_ += end - begin;
    }
    BlockRead& run = runs_.back();
    if (const std::uint64_t run_end = run.offset + run.bytes; end > run_end) {
      if (used_bytes_ + (end - run_end) > buffer_.size()) return nullptr;
      run.bytes += end - run_end;
      used_bytes_ += end - run_end;
    }
    return run.dst + (offset - run.offset);
  }

  std::span<const BlockRead> reads() const { return runs_; }
  std::vector<BlockWrite> writes() const {
    std::vector<BlockWrite> writes;
    for (const BlockRead& run : runs_) writes.push_back({run.file, run.offset, run.bytes, run.dst});
    return writes;
  }
  std::size_t used_bytes() const { return used_bytes_; }

 private:
  bool joins(const BlockFile& file, std::uint64_t begin, std::uint64_t end) const {
    if (runs_.empty() || runs_.back().file != &file) return false;
    const std::uint64_t run_end = runs_.back().offset + runs_.back().bytes;
    return end <= run_end || (begin <= run_end + gap_bytes_ && runs_.back().bytes < longest_run_bytes);
  }

  const SectorBuffer& buffer_;
  std::size_t gap_bytes_;
  std::size_t unit_bytes_;
  std::size_t used_bytes_ = 0;
  std::vector<BlockRead> runs_;
};

// While it lives, the extents that a fetch resolved rows into are not used again.
class LogStore::Fetching {
 public:
  Fetching(LogStore& store, std::uint64_t number) : store_(store), number_(number) {}
  ~Fetching() {
    {
      const std::lock_guard lock(store_.mutex_);
      store_.fetches_.erase(number_);
    }
    store_.fetch_done_.notify_all();
  }
  Fetching(const Fetching&) = delete;
  Fetching& operator=(const Fetching&) = delete;

 private:
  LogStore& store_;
  std::uint64_t number_;
};

void LogStore::create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t ring_bytes,
                      Caching caching) {
  if (ring_bytes > largest_ring_bytes) {
    throw Error(ErrorKind::config, directory + ": a row log of " + std::to_string(ring_bytes) + " bytes is too large");
  }
  std::filesystem::create_directories(directory + "/shard-0000");
  for (std::size_t i = 0; i < tables.size(); ++i) {
    BlockFile::create(home_path(directory, i), home_bytes(RowLayout(tables[i].spec), tables[i].num_rows));
  }
  RowLog::create(log_path(directory), ring_bytes, caching);
}

LogStore::LogStore(const std::string& directory, std::vector<RowTable> tables, const LogStoreOptions& options)
    : kernels_(best_kernels()),
      queue_(options.way),
      log_(existing(log_path(directory)), options.caching, options.watcher, queue_) {
  for (std::size_t i = 0; i < tables.size(); ++i) {
    Table table{tables[i], RowLayout(tables[i].spec), nullptr, {}};
    table.home = std::make_unique<BlockFile>(existing(home_path(directory, i)), options.caching, options.watcher);
    const std::uint64_t bytes = home_bytes(table.layout, table.what.num_rows);
    if (table.home->size() != bytes) {
      throw Error(ErrorKind::corrupted, table.home->name() + ": " + std::to_string(table.home->size()) +
                                            " bytes, the table needs " + std::to_string(bytes));
    }
    tables_.push_back(std::move(table));
  }
}

// Recovery.

std::uint64_t LogStore::recover(std::uint64_t epoch, std::uint64_t step_limit) {
  log_.scan();
  log_.check_start(epoch, step_limit);
  rebuild_index(step_limit);
  latching([&] { log_.start(epoch, step_limit); });
  epoch_ = epoch;
  return log_.last().step;
}

void LogStore::roll_back(std::uint64_t step) {
  require_usable();
  log_.check_start(epoch_, step);
  latching([&] {
    rebuild_index(step);
    log_.start(epoch_, step);
  });
}

void LogStore::rebuild_index(std::uint64_t step) {
  {
    const std::lock_guard lock(mutex_);
    for (Table& table : tables_) table.index.clear();
  }
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > step) break;
    const SectorBuffer data = log_.read(record, record.images_offset);
    check_sections(record, data.data());
    const std::lock_guard lock(mutex_);
    index_record(record, data.data());
  }
}

// A record's bytes hold their checksums; this says that they also make sense for the tables.
void LogStore::check_sections(const RowLog::Live& record, const std::byte* data) const {
  const auto bad = [&](const char* what) {
    throw Error(ErrorKind::corrupted, log_.place(record.link.position) + ": " + what);
  };
  const RowLogHeader header = header_of(data);
  const auto sections = sections_of(data);
  std::vector<TableRows> claimed;
  for (const RowLogSection& section : sections) {
    if (section.table >= tables_.size() || (!claimed.empty() && section.table <= claimed.back().table)) {
      bad("sections of tables that do not exist, or out of order");
    }
    if (section.num_rows > tables_[section.table].what.num_rows) bad("a section of more rows than its table has");
    claimed.push_back({section.table, section.num_rows, {}});
  }
  const Shape expected = shape_of(claimed);
  if (expected.header.bytes != header.bytes || expected.header.images_offset != header.images_offset ||
      (!sections.empty() && std::memcmp(expected.sections.data(), sections.data(), sections.size_bytes()) != 0)) {
    bad("a section that does not fit");
  }
  for (const RowLogSection& section : sections) {
    const std::uint64_t* rows = rows_of(data, section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      if (rows[i] >= tables_[section.table].what.num_rows || (i > 0 && rows[i] <= rows[i - 1])) {
        bad("rows that are out of order");
      }
    }
  }
}

// The index says where in the ring an image's sector is, and which of the sector's images it is.

std::uint64_t LogStore::location_of(std::uint64_t position, std::uint64_t image_offset, const Table& table) const {
  const std::uint64_t offset = position % log_.ring_bytes() + image_offset;
  const std::uint64_t slot = offset % format::sector_bytes / table.layout.image_bytes();
  return offset / format::sector_bytes << slot_bits | slot;
}

std::uint64_t LogStore::offset_of_location(std::uint64_t location, const Table& table) const {
  const std::uint64_t slot = location & ((1U << slot_bits) - 1);
  return format::row_log_ring_offset + (location >> slot_bits) * format::sector_bytes +
         slot * table.layout.image_bytes();
}

void LogStore::index_record(const RowLog::Live& record, const std::byte* data) {
  for (const RowLogSection& section : sections_of(data)) {
    Table& table = tables_[section.table];
    const std::uint64_t* rows = rows_of(data, section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      const std::uint64_t image_offset = section.images_offset + table.layout.offset_of(i);
      table.index.insert(rows[i], location_of(record.link.position, image_offset, table));
    }
  }
}

// Fetch.

void LogStore::fetch(std::span<const TableRows> tables) {
  require_recovered();
  std::vector<Item> items;
  const Fetching fetching(*this, resolve(tables, items));
  std::size_t most_bytes = 0;
  for (const Item& item : items) most_bytes += tables_[tables[item.request].table].layout.unit_bytes();
  const SectorBuffer buffer(std::min(buffer_bytes, most_bytes + items.size() * joined_gap_bytes));
  for (std::size_t done = 0; done < items.size();) {
    done += read_items(tables, std::span(items).subspan(done), buffer);
  }
}

std::uint64_t LogStore::resolve(std::span<const TableRows> tables, std::vector<Item>& items) {
  std::vector<Item> in_log;
  std::unique_lock lock(mutex_);
  for (std::uint32_t request = 0; request < tables.size(); ++request) {
    const Table& table = tables_.at(tables[request].table);
    for (std::size_t u = 0; u < tables[request].num_rows; ++u) {
      const std::uint64_t row = tables[request].rows.rows[u];
      if (const auto location = table.index.find(row)) {
        in_log.push_back({offset_of_location(*location, table), request, 1, u});
      } else {
        items.push_back({table.layout.offset_of(row), request, 0, u});
      }
    }
  }
  const std::uint64_t number = ++num_fetches_;
  fetches_[number] = in_log.empty() ? format::no_position : log_.tail();
  lock.unlock();
  std::sort(in_log.begin(), in_log.end(), [](const Item& a, const Item& b) { return a.offset < b.offset; });
  items.insert(items.end(), in_log.begin(), in_log.end());
  return number;
}

const BlockFile& LogStore::file_of(const TableRows& request, const Item& item) const {
  return item.in_log != 0 ? log_.file() : *tables_[request.table].home;
}

// Reads as many of the items, from the first on, as the buffer holds; returns how many.
std::size_t LogStore::read_items(std::span<const TableRows> tables, std::span<const Item> items,
                                 const SectorBuffer& buffer) {
  Runs runs(buffer, joined_gap_bytes);
  std::vector<const std::byte*> images;
  for (const Item& item : items) {
    const TableRows& request = tables[item.request];
    const std::byte* image =
        runs.place(file_of(request, item), item.offset, tables_[request.table].layout.image_bytes());
    if (image == nullptr) break;
    images.push_back(image);
  }
  queue_.read_many(runs.reads());
  for (std::size_t i = 0; i < images.size(); ++i) take_image(tables[items[i].request], items[i], images[i]);
  const std::lock_guard lock(mutex_);
  counters_.fetched_rows += images.size();
  counters_.fetched_bytes += runs.used_bytes();
  return images.size();
}

void LogStore::take_image(const TableRows& request, const Item& item, const std::byte* image) const {
  const Table& table = tables_[request.table];
  const RowLayout& layout = table.layout;
  std::uint64_t& row = request.rows.rows[item.row];
  std::byte* weights = request.rows.weights + item.row * layout.weight_bytes();
  float* state = request.rows.state + item.row * table.what.spec.state_floats;
  const ImageState found = check_image(layout, request.table, row, image);
  if (found == ImageState::damaged || (found == ImageState::untouched && item.in_log != 0)) {
    throw Error(ErrorKind::corrupted, file_of(request, item).place(item.offset) + ": row " + std::to_string(row) +
                                          " of table " + std::to_string(request.table) + " does not hold its checksum");
  }
  if (found == ImageState::whole) {
    std::memcpy(weights, image, layout.weight_bytes());
    if (layout.state_bytes() != 0) std::memcpy(state, image + layout.weight_bytes(), layout.state_bytes());
    return;
  }
  kernels_.initial_row(table.what.spec, row, weights);
  if (layout.state_bytes() != 0) std::memset(state, 0, layout.state_bytes());
  row |= fresh_bit;
}

// Append.

LogStore::Shape LogStore::shape_of(std::span<const TableRows> tables) const {
  Shape shape;
  std::uint64_t offset = sizeof(RowLogHeader) + tables.size() * sizeof(RowLogSection);
  for (const TableRows& rows : tables) {
    RowLogSection section{};
    section.table = rows.table;
    section.num_rows = rows.num_rows;
    section.rows_offset = offset;
    offset += rows.num_rows * sizeof(std::uint64_t);
    shape.sections.push_back(section);
  }
  offset = format::align_up(offset, format::sector_bytes);
  shape.header.num_sections = static_cast<std::uint32_t>(tables.size());
  shape.header.images_offset = offset;
  for (RowLogSection& section : shape.sections) {
    section.images_offset = offset;
    offset += tables_[section.table].layout.bytes_for(section.num_rows);
  }
  shape.header.bytes = format::align_up(offset, format::block_bytes);
  return shape;
}

std::optional<std::uint64_t> LogStore::append(const StepMark& mark, std::span<const TableRows> tables) {
  require_usable();
  if (mark.step <= log_.last().step) {
    throw Error(ErrorKind::step, "step " + std::to_string(mark.step) + " cannot follow step " +
                                     std::to_string(log_.last().step) + " in " + log_.file().name());
  }
  Shape shape = shape_of(tables);
  shape.header.step = mark.step;
  shape.header.cursor = mark.cursor;
  shape.header.row_updates = mark.row_updates;
  if (shape.header.bytes > log_.ring_bytes()) {
    throw Error(ErrorKind::batch_too_large, "step " + std::to_string(mark.step) + " takes " +
                                                std::to_string(shape.header.bytes) + " bytes of a row log that has " +
                                                std::to_string(log_.ring_bytes()));
  }
  std::optional<std::uint64_t> position;
  {
    const std::lock_guard lock(mutex_);
    std::uint64_t pinned = format::no_position;
    for (const auto& [number, oldest] : fetches_) pinned = std::min(pinned, oldest);
    position = log_.room_for(shape.header.bytes, pinned);
  }
  if (!position) return std::nullopt;
  fill_record(shape, tables);
  RowLog::Live record;
  latching([&] { record = log_.write(shape.header, *position, record_.data()); });

  const std::lock_guard lock(mutex_);
  index_record(record, record_.data());
  log_.append(record);
  for (const TableRows& rows : tables) counters_.appended_rows += rows.num_rows;
  counters_.appended_bytes += shape.header.bytes;
  return shape.header.bytes;
}

// Everything of the record but its header, whose checksums are completed.
void LogStore::fill_record(Shape& shape, std::span<const TableRows> tables) {
  RowLogHeader& header = shape.header;
  if (record_.size() < header.bytes) record_ = SectorBuffer(header.bytes);
  std::byte* record = record_.data();
  std::memset(record, 0, header.images_offset);
  if (!tables.empty()) {
    std::memcpy(record + sizeof(header), shape.sections.data(), tables.size() * sizeof(RowLogSection));
  }
  for (std::size_t i = 0; i < tables.size(); ++i) {
    auto* rows = reinterpret_cast<std::uint64_t*>(record + shape.sections[i].rows_offset);
    std::transform(tables[i].rows.rows, tables[i].rows.rows + tables[i].num_rows, rows,
                   [](std::uint64_t row) { return row & ~fresh_bit; });
  }
  header.rows_crc = crc32c(0, record + sizeof(header), header.images_offset - sizeof(header));
  header.images_crc = fill_images(shape, tables);
}

// Returns the checksum of the images and of the zeros behind them.
std::uint32_t LogStore::fill_images(const Shape& shape, std::span<const TableRows> tables) {
  struct Chunk {
    std::size_t request;
    std::size_t begin;
    std::size_t end;
  };
  std::vector<Chunk> chunks;
  std::uint64_t images_end = shape.header.images_offset;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    const RowLayout& layout = tables_[tables[i].table].layout;
    const std::size_t rows = layout.unit_rows() * std::max<std::size_t>(1, chunk_bytes / layout.unit_bytes());
    for (std::size_t begin = 0; begin < tables[i].num_rows; begin += rows) {
      chunks.push_back({i, begin, std::min(begin + rows, tables[i].num_rows)});
    }
    images_end += layout.bytes_for(tables[i].num_rows);
  }
  std::memset(record_.data() + images_end, 0, shape.header.bytes - images_end);
  PartsChecksum checksum(shape.header.bytes - shape.header.images_offset);
  parallel_for(chunks.size(), [&](std::size_t c) {
    const auto [i, begin, end] = chunks[c];
    const RowLayout& layout = tables_[tables[i].table].layout;
    std::byte* images = record_.data() + shape.sections[i].images_offset;
    const std::size_t bytes = pack_images(layout, tables[i].table, tables[i].rows, begin, end, images);
    const std::uint64_t offset = shape.sections[i].images_offset + layout.offset_of(begin);
    checksum.add(offset - shape.header.images_offset, record_.data() + offset, bytes);
  });
  return checksum.value();
}

void LogStore::sync() {
  require_usable();
  latching([&] { log_.sync(); });
}

// Merge.

std::uint64_t LogStore::merge(std::uint64_t limit_step, std::uint64_t max_bytes) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const std::vector<RowLog::Live> records = oldest_records(limit_step, max_bytes);
  if (records.empty()) return 0;
  std::vector<SectorBuffer> data;
  for (const RowLog::Live& record : records) {
    data.push_back(log_.read(record, record.bytes));
    check_sections(record, data.back().data());
  }
  const auto versions = newest_versions(records, data);
  wait_for_fetches();
  latching([&] {
    write_home(versions);
    log_.checkpoint_without(records.size());
  });
  give_up(records, data);
  std::uint64_t bytes = 0;
  for (const RowLog::Live& record : records) bytes += record.bytes;
  const std::lock_guard lock(mutex_);
  counters_.merged_bytes += bytes;
  return bytes;
}

std::vector<RowLog::Live> LogStore::oldest_records(std::uint64_t limit_step, std::uint64_t max_bytes) const {
  const std::uint64_t limit = std::min(limit_step, log_.durable_step());
  std::vector<RowLog::Live> records;
  std::uint64_t bytes = 0;
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > limit || (bytes >= max_bytes && !records.empty())) break;
    records.push_back(record);
    bytes += record.bytes;
  }
  return records;
}

// Of each table, by row.
std::vector<std::vector<LogStore::Version>> LogStore::newest_versions(std::span<const RowLog::Live> records,
                                                                      std::span<const SectorBuffer> data) const {
  std::vector<std::vector<Version>> newest(tables_.size());
  for (std::size_t r = 0; r < records.size(); ++r) {
    for (const RowLogSection& section : sections_of(data[r].data())) {
      const RowLayout& layout = tables_[section.table].layout;
      const std::uint64_t* rows = rows_of(data[r].data(), section);
      for (std::uint64_t i = 0; i < section.num_rows; ++i) {
        const std::uint64_t offset = section.images_offset + layout.offset_of(i);
        const std::byte* image = data[r].data() + offset;
        if (check_image(layout, section.table, rows[i], image) != ImageState::whole) {
          throw Error(ErrorKind::corrupted, log_.place(records[r].link.position + offset) + ": row " +
                                                std::to_string(rows[i]) + " of table " + std::to_string(section.table) +
                                                " does not hold its checksum");
        }
        newest[section.table].push_back({rows[i], image});
      }
    }
  }
  for (auto& versions : newest) {
    std::stable_sort(versions.begin(), versions.end(),
                     [](const Version& a, const Version& b) { return a.row < b.row; });
    std::size_t kept = 0;
    for (std::size_t i = 0; i < versions.size(); ++i) {
      const bool superseded = i + 1 < versions.size() && versions[i + 1].row == versions[i].row;
      if (!superseded) versions[kept++] = versions[i];
    }
    versions.resize(kept);
  }
  return newest;
}

void LogStore::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
}

// Durably.
void LogStore::write_home(const std::vector<std::vector<Version>>& versions) {
  const SectorBuffer buffer(buffer_bytes);
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    const std::span<const Version> of_table = versions[t];
    for (std::size_t done = 0; done < of_table.size();) {
      done += write_home_part(tables_[t], of_table.subspan(done), buffer);
    }
  }
  for (std::size_t t = 0; t < tables_.size(); ++t) {
    if (!versions[t].empty()) tables_[t].home->sync();
  }
}

// Writes as many of the versions, from the first on, as the buffer holds; returns how many. Small images by whole
// blocks of the file system: single sectors in holes cost it six times the CPU, and the medium rewrites a block
// either way.
std::size_t LogStore::write_home_part(const Table& table, std::span<const Version> versions,
                                      const SectorBuffer& buffer) {
  const RowLayout& layout = table.layout;
  const bool alone = layout.unit_rows() == 1;  // no other row is in its sectors: they need not be read
  Runs runs(buffer, 0, alone ? format::sector_bytes : format::block_bytes);
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
  counters_.home_sectors_changed += changed_units * (layout.unit_bytes() / format::sector_bytes);
  return images.size();
}

// The records' rows are home: the index forgets them, then their space may be used again.
void LogStore::give_up(std::span<const RowLog::Live> records, std::span<const SectorBuffer> data) {
  const std::lock_guard lock(mutex_);
  for (std::size_t r = 0; r < records.size(); ++r) {
    for (const RowLogSection& section : sections_of(data[r].data())) {
      Table& table = tables_[section.table];
      const std::uint64_t* rows = rows_of(data[r].data(), section);
      for (std::uint64_t i = 0; i < section.num_rows; ++i) {
        const std::uint64_t image_offset = section.images_offset + table.layout.offset_of(i);
        table.index.erase_if_equal(rows[i], location_of(records[r].link.position, image_offset, table));
      }
    }
  }
  log_.forget(records.size());
}

void LogStore::require_recovered() const {
  if (epoch_ == 0) throw Error(ErrorKind::step, log_.file().name() + ": recover comes first");
}

void LogStore::require_usable() const {
  require_recovered();
  if (failed_) throw Error(ErrorKind::failed, log_.file().name() + ": an earlier write failed; open the store again");
}

// After a failure nobody knows what reached the medium; where it is only full, everything is as it was.
template <class Work>
void LogStore::latching(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::full) failed_ = true;
    throw;
  } catch (...) {
    failed_ = true;
    throw;
  }
}

std::size_t LogStore::index_entries() const {
  const std::lock_guard lock(mutex_);
  std::size_t entries = 0;
  for (const Table& table : tables_) entries += table.index.size();
  return entries;
}

std::size_t LogStore::index_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const Table& table : tables_) bytes += table.index.memory_bytes();
  return bytes;
}

LogStoreCounters LogStore::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace holdfast

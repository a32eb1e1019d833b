#include "log_store/log_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "layout/label.h"
#include "log_store/log_record.h"
#include "log_store/sector_runs.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {

using format::RowLogHeader;
using format::RowLogSection;
using log_record::header_of;
using log_record::rows_of;
using log_record::sections_of;

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;      // of sectors, read or written at once
constexpr std::size_t joined_gap_bytes = 7 * format::sector_bytes;  // reading these costs less than one more request
constexpr unsigned slot_bits = 7;  // of a location: which image of its sector; images take 6 bytes or more
constexpr std::uint64_t largest_ring_bytes = (RowIndex::end_location >> slot_bits) * format::sector_bytes;

// A store that lacks a file is damaged, not absent.
const std::string& existing(const std::string& path) {
  if (!has_name(path)) throw Error(ErrorKind::corrupted, path + " is missing; the store has lost a file");
  return path;
}

Opening opening_of(const LogStoreOptions& options) {
  return options.writable ? Opening::read_write : Opening::read_only;
}

constexpr const char* row_log_name = "row-log-0000";

std::string log_path(const std::string& directory) { return directory + "/" + row_log_name; }

std::string home_name(const RowTable& table, std::size_t number, const RowPiece& piece) {
  return row_file_name(table, piece.shard, number, "home");
}

std::string home_path(const std::string& directory, const RowTable& table, std::size_t number, const RowPiece& piece) {
  return directory + "/" + home_name(table, number, piece);
}

std::string home_bits_path(const std::string& directory) { return directory + "/home-bits-0000"; }

std::uint64_t num_owned_rows(const std::vector<RowTable>& tables) {
  std::uint64_t num_rows = 0;
  for (const RowTable& table : tables) num_rows += table.owned_rows();
  return num_rows;
}

std::uint64_t home_bytes(const RowLayout& layout, std::uint64_t num_rows) {
  return format::align_up(layout.bytes_for(num_rows), format::block_bytes);
}

FileRole role_of(std::size_t table, const RowPiece& piece) {
  return {format::FileKind::home, static_cast<std::uint32_t>(table), piece.shard};
}

// A home as it must be.
void check_home(BlockFile& file, BlockQueue& queue, const RowTable& table, std::size_t number, const RowPiece& piece) {
  const std::uint64_t bytes = home_bytes(RowLayout(table.spec), piece.num_rows);
  if (const std::uint64_t wanted = labelled_bytes(bytes, table.identity); file.size() != wanted) {
    throw Error(ErrorKind::corrupted,
                file.name() + ": " + std::to_string(file.size()) + " bytes, the table needs " + std::to_string(wanted));
  }
  check_label_of(file, queue, table.identity, role_of(number, piece));
}

}  // namespace

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

std::vector<LabelledName> LogStore::files(const std::vector<RowTable>& tables, const Identity& identity) {
  std::vector<LabelledName> files = {{row_log_name, {format::FileKind::row_log}, identity}};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      files.push_back({home_name(tables[i], i, piece), role_of(i, piece), tables[i].identity});
    }
  }
  return files;
}

void LogStore::create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t ring_bytes,
                      Caching caching, const StepMark& mark, bool adopt, const Identity& identity) {
  if (ring_bytes > largest_ring_bytes) {
    throw Error(ErrorKind::config, directory + ": a row log of " + std::to_string(ring_bytes) + " bytes is too large");
  }
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      const std::string path = home_path(directory, tables[i], i, piece);
      if (adopt) {
        BlockQueue queue;
        BlockFile home(existing(path), caching, nullptr, Opening::read_only);
        check_home(home, queue, tables[i], i, piece);
      } else {
        make_directories(directory_of(path));
        create_labelled_blocks(path, home_bytes(RowLayout(tables[i].spec), piece.num_rows), tables[i].identity,
                               role_of(i, piece));
      }
    }
  }
  if (!adopt) HomeBits::create(home_bits_path(directory), num_owned_rows(tables));
  RowLog::create(log_path(directory), ring_bytes, caching, mark, !adopt, identity);
}

LogStore::LogStore(const std::string& directory, std::vector<RowTable> tables, const LogStoreOptions& options)
    : kernels_(best_kernels()),
      queue_(options.way),
      log_(existing(log_path(directory)), options.caching, options.watcher, opening_of(options), queue_,
           options.identity),
      writable_(options.writable),
      merge_bytes_(options.merge_bytes),
      merge_slots_(options.merge_slots) {
  if (options.ring_bytes != 0 && log_.ring_bytes() != options.ring_bytes) {
    throw Error(ErrorKind::corrupted, log_.file().name() + ": " + std::to_string(log_.file().size()) +
                                          " bytes, the row log was made with " +
                                          std::to_string(format::row_log_ring_offset + options.ring_bytes));
  }
  unit_bytes_ = log_.file().unit_bytes();
  std::uint64_t num_rows = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    Table table{tables[i], RowLayout(tables[i].spec), {}, {}};
    if (table.what.layout) allow_many_files();
    for (const RowPiece& piece : table.what.owned_pieces()) {
      auto file = std::make_unique<BlockFile>(existing(home_path(directory, table.what, i, piece)), options.caching,
                                              options.watcher, opening_of(options));
      check_home(*file, queue_, table.what, i, piece);
      table.homes.push_back({piece.first, piece.end(), std::move(file), num_rows});
      num_rows += piece.num_rows;
      unit_bytes_ = std::max(unit_bytes_, table.homes.back().file->unit_bytes());
    }
    tables_.push_back(std::move(table));
  }
  // Who only reads beside a writer would not see what that adds.
  const auto least_rows = log_.home_rows();
  if (!writable_ || !least_rows) return;
  home_bits_ = HomeBits::open(home_bits_path(directory), num_rows, options.caching, options.watcher, queue_,
                              options.identity.seed());
  if (home_bits_ && home_bits_->count() < *least_rows) home_bits_.reset();  // it is older than the checkpoint
  if (home_bits_ && home_bits_->count() > *least_rows) home_bits_->write_again();
  if (!home_bits_) log_.set_home_rows(std::nullopt);
}

std::size_t LogStore::Table::home_of(std::uint64_t row) const {
  const auto after = std::ranges::upper_bound(homes, row, {}, &Home::first);
  if (after == homes.begin() || row >= (after - 1)->end) {
    throw Error(ErrorKind::config, "row " + std::to_string(row) + " of table '" + what.name + "' is not in this store");
  }
  return static_cast<std::size_t>(after - homes.begin()) - 1;
}

std::uint64_t LogStore::Table::owned_row(std::uint64_t i) const {
  for (const Home& home : homes) {
    if (i < home.end - home.first) return home.first + i;
    i -= home.end - home.first;
  }
  return what.num_rows;
}

// Recovery.

StepMark LogStore::scan() {
  if (scanned_) throw Error(ErrorKind::step, log_.file().name() + ": the log was read already");
  log_.scan();
  scanned_ = true;
  return log_.last();
}

void LogStore::index(std::uint64_t epoch, std::uint64_t step_limit) {
  log_.check_start(epoch, step_limit);
  if (writable_) latching([&] { log_.make_found_durable(); });
  rebuild_index(step_limit);
  indexed_step_ = step_limit;
}

std::uint64_t LogStore::recover(std::uint64_t epoch, std::uint64_t step_limit) {
  if (!writable_) throw Error(ErrorKind::step, log_.file().name() + ": opened for reading only");
  if (epoch_ != 0) throw Error(ErrorKind::step, log_.file().name() + ": recovered already");
  require_unfailed();
  if (!scanned_) scan();
  log_.check_start(epoch, step_limit);
  if (indexed_step_ != step_limit) rebuild_index(step_limit);
  latching([&] { log_.start(epoch, step_limit); });
  epoch_ = epoch;
  return log_.last().step;
}

void LogStore::view() {
  if (writable_ || !scanned_) {
    throw Error(ErrorKind::step, log_.file().name() + ": a view wants a store opened for reading only, and its scan");
  }
  rebuild_index(log_.last().step);
  viewed_ = true;
}

void LogStore::roll_back(std::uint64_t step) {
  const std::lock_guard turn(merge_mutex_);
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
    ++index_version_;
    for (Table& table : tables_) table.index.clear();
  }
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > step) break;
    const SpareBuffers::Borrowed data = read_rows(record);
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
    const std::span rows(rows_of(data, section), section.num_rows);
    for (std::size_t i = 1; i < rows.size(); ++i) {
      if (rows[i] <= rows[i - 1]) bad("rows that are out of order");
    }
    if ((!rows.empty() && (rows.back() & fresh_bit) != 0) || tables_[section.table].what.first_foreign(rows)) {
      bad("rows that its table does not have here");
    }
  }
}

// A record without its images.
SpareBuffers::Borrowed LogStore::read_rows(const RowLog::Live& record) const {
  SpareBuffers::Borrowed data = spare_.borrow(format::align_up(record.images_offset, unit_bytes_));
  log_.read(record, record.images_offset, data.data());
  check_sections(record, data.data());
  return data;
}

// The index says where in the ring an image's sector is, and which of the sector's images it is.

LogStore::Locations LogStore::locations_of(std::uint64_t position, const RowLogSection& section,
                                           std::uint64_t first) const {
  const RowLayout& layout = tables_[section.table].layout;
  const std::uint64_t unit = first / layout.unit_rows();
  const std::uint64_t offset = position % log_.ring_bytes() + section.images_offset + unit * layout.unit_bytes();
  return {offset / format::sector_bytes << slot_bits, first % layout.unit_rows(), layout.unit_rows(),
          layout.unit_bytes() / format::sector_bytes << slot_bits};
}

std::uint64_t LogStore::offset_of_location(std::uint64_t location, const Table& table) const {
  const std::uint64_t slot = location & ((1U << slot_bits) - 1);
  return format::row_log_ring_offset + (location >> slot_bits) * format::sector_bytes +
         slot * table.layout.image_bytes();
}

void LogStore::index_record(const RowLog::Live& record, const std::byte* data) {
  ++index_version_;
  for (const RowLogSection& section : sections_of(data)) {
    Table& table = tables_[section.table];
    const std::uint64_t* rows = rows_of(data, section);
    Locations locations = locations_of(record.link.position, section, 0);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      table.index.prefetch_ahead(rows, i, section.num_rows);
      table.index.insert(rows[i], locations.next());
    }
  }
}

// Of whole units, the most that a piece of whole sectors lies in.
std::size_t LogStore::bytes_around(const RowLayout& layout) const {
  return format::align_up(layout.unit_bytes() + unit_bytes_ - format::sector_bytes, unit_bytes_);
}

// Fetch.

void LogStore::fetch(std::span<const TableRows> tables) {
  require_readable();
  std::vector<Item> items;
  std::vector<Untouched> untouched;
  const Fetching fetching(*this, resolve(tables, items, untouched));
  for (const Untouched& row : untouched) take_initial(tables[row.request], row.row);
  std::size_t most_bytes = 0;
  for (const Item& item : items) most_bytes += bytes_around(tables_[tables[item.request].table].layout);
  const SpareBuffers::Borrowed buffer =
      spare_.borrow(std::min(buffer_bytes, most_bytes + items.size() * joined_gap_bytes));
  for (std::size_t done = 0; done < items.size();) {
    done += read_items(tables, std::span(items).subspan(done), buffer.buffer());
  }
}

std::uint64_t LogStore::resolve(std::span<const TableRows> tables, std::vector<Item>& items,
                                std::vector<Untouched>& untouched) {
  std::vector<Item> in_log;
  std::unique_lock lock(mutex_);
  for (std::uint32_t request = 0; request < tables.size(); ++request) {
    const Table& table = tables_.at(tables[request].table);
    std::size_t home = 0;
    for (std::size_t u = 0; u < tables[request].num_rows; ++u) {
      const std::uint64_t* rows = tables[request].rows.rows;
      table.index.prefetch_ahead(rows, u, tables[request].num_rows);
      const std::uint64_t row = rows[u];
      if (const auto location = table.index.find(row)) {
        in_log.push_back({offset_of_location(*location, table), request, 0, u});
      } else {
        const bool is_there =
            home < table.homes.size() && row >= table.homes[home].first && row < table.homes[home].end;
        if (!is_there) home = table.home_of(row);
        const Home& of_row = table.homes[home];
        if (home_bits_ && !home_bits_->may_have(of_row.number_of(row))) {
          untouched.push_back({request, u});
        } else {
          items.push_back({of_row.offset_of(table.layout, row), request, static_cast<std::uint32_t>(home + 1), u});
        }
      }
    }
  }
  counters_.initial_rows += untouched.size();
  items.reserve(items.size() + in_log.size());  // nothing throws any more once the fetch is noted
  const std::uint64_t number = ++num_fetches_;
  fetches_[number] = in_log.empty() ? format::no_position : log_.tail();
  lock.unlock();
  std::sort(in_log.begin(), in_log.end(), [](const Item& a, const Item& b) { return a.offset < b.offset; });
  items.insert(items.end(), in_log.begin(), in_log.end());
  return number;
}

const BlockFile& LogStore::file_of(const TableRows& request, const Item& item) const {
  return item.file == 0 ? log_.file() : *tables_[request.table].homes[item.file - 1].file;
}

// Reads as many of the items, from the first on, as the buffer holds; returns how many.
std::size_t LogStore::read_items(std::span<const TableRows> tables, std::span<const Item> items,
                                 const SectorBuffer& buffer) {
  SectorRuns runs(buffer, {.read_gap_bytes = joined_gap_bytes, .unit_bytes = unit_bytes_});
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
  counters_.fetched_bytes += runs.read_bytes();
  counters_.fetch_requests += runs.reads().size();
  return images.size();
}

void LogStore::take_image(const TableRows& request, const Item& item, const std::byte* image) const {
  const Table& table = tables_[request.table];
  const RowLayout& layout = table.layout;
  const std::uint64_t row = request.rows.rows[item.row];
  std::byte* weights = request.rows.weights + item.row * layout.weight_bytes();
  float* state = request.rows.state + item.row * table.what.spec.state_floats;
  const ImageState found = check_image(layout, request.table, row, image);
  if (found == ImageState::damaged || (found == ImageState::untouched && item.file == 0)) {
    throw Error(ErrorKind::corrupted, damaged(file_of(request, item).place(item.offset), request.table, row));
  }
  if (found == ImageState::whole) {
    std::memcpy(weights, image, layout.weight_bytes());
    if (layout.state_bytes() != 0) std::memcpy(state, image + layout.weight_bytes(), layout.state_bytes());
    return;
  }
  take_initial(request, item.row);
}

void LogStore::take_initial(const TableRows& request, std::size_t u) const {
  const Table& table = tables_[request.table];
  std::uint64_t& row = request.rows.rows[u];
  kernels_.initial_row(table.what.spec, row, request.rows.weights + u * table.layout.weight_bytes());
  std::fill_n(request.rows.state + u * table.what.spec.state_floats, table.what.spec.state_floats, 0.0F);
  row |= fresh_bit;
}

std::string LogStore::damaged(const std::string& place, std::uint32_t table, std::uint64_t row) {
  return place + ": row " + std::to_string(row) + " of table " + std::to_string(table) + " does not hold its checksum";
}

void LogStore::require_readable() const {
  if (epoch_ == 0 && !viewed_) throw Error(ErrorKind::step, log_.file().name() + ": recover or view comes first");
}

void LogStore::require_usable() const {
  if (!writable_) throw Error(ErrorKind::step, log_.file().name() + ": opened for reading only");
  if (epoch_ == 0) throw Error(ErrorKind::step, log_.file().name() + ": recover comes first");
  require_unfailed();
}

void LogStore::require_unfailed() const {
  if (!failed_) return;
  const std::lock_guard lock(mutex_);
  std::rethrow_exception(failure_);
}

void LogStore::fail(std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  if (!failed_) failure_ = std::move(failure);
  failed_ = true;
}

// After a failure nobody knows what reached the medium; where it is only full, everything is as it was.
void LogStore::latching(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::full) fail(std::current_exception());
    throw;
  } catch (...) {
    fail(std::current_exception());
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
  if (home_bits_) bytes += home_bits_->memory_bytes();
  return bytes;
}

LogStoreCounters LogStore::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace holdfast

#include "log_store/log_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "layout/row_log_place.h"
#include "log_store/log_record.h"
#include "log_store/sector_runs.h"
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
constexpr std::size_t tables_with_few_files = 200;  // each has two
constexpr std::uint64_t largest_ring_bytes = RowIndex::end_location;

Opening opening_of(const LogStoreOptions& options) {
  return options.writable ? Opening::read_write : Opening::read_only;
}

std::string home_bits_path(const std::string& directory) { return directory + "/home-bits-0000"; }

std::uint64_t num_owned_rows(const std::vector<RowTable>& tables) {
  std::uint64_t num_rows = 0;
  for (const RowTable& table : tables) num_rows += table.owned_rows();
  return num_rows;
}

bool are_by_first_touch(const std::vector<RowTable>& tables) {
  return std::ranges::all_of(tables, [](const RowTable& t) { return t.home_order == HomeOrder::by_first_touch; });
}

}  // namespace

std::vector<LabelledName> LogStore::files(const std::vector<RowTable>& tables, const Identity& identity) {
  std::vector<LabelledName> files = {{row_log_name, {format::FileKind::row_log}, identity}};
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      std::ranges::move(home_files(tables[i], i, piece), std::back_inserter(files));
    }
  }
  return files;
}

void LogStore::create(const std::string& directory, const std::vector<RowTable>& tables, std::uint64_t ring_bytes,
                      Caching caching, const StepMark& mark, bool adopt, const Identity& identity) {
  if (ring_bytes > largest_ring_bytes) {
    throw Error(ErrorKind::config, directory + ": a row log of " + std::to_string(ring_bytes) + " bytes is too large");
  }
  // How many rows homes have that are adopted, their addresses say; by number, nobody knows.
  const bool by_first_touch = are_by_first_touch(tables);
  std::optional<std::uint64_t> home_rows;
  if (by_first_touch || !adopt) home_rows = 0;
  BlockQueue queue;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      if (!adopt) {
        create_home(directory, tables[i], i, piece);
        continue;
      }
      const Home home = open_home(directory, tables[i], i, piece, caching, nullptr, Opening::read_only, queue);
      if (by_first_touch) *home_rows += home.addresses->read_count();
    }
  }
  if (!by_first_touch && !adopt) HomeBits::create(home_bits_path(directory), num_owned_rows(tables));
  RowLog::create(row_log_path(directory), ring_bytes, caching, mark, home_rows, identity);
}

LogStore::LogStore(const std::string& directory, std::vector<RowTable> tables, const LogStoreOptions& options)
    : kernels_(best_kernels()),
      queue_(options.way),
      log_(existing_row_log(directory, options.writable), options.caching, options.watcher, opening_of(options), queue_,
           options.identity),
      writable_(options.writable),
      merge_bytes_(options.merge_bytes),
      merge_slots_(options.merge_slots) {
  if (options.ring_bytes != 0 && log_.ring_bytes() != options.ring_bytes) {
    throw Error(ErrorKind::corrupted, log_.file().name() + ": " + std::to_string(log_.file().size()) +
                                          " bytes, the row log was made with " +
                                          std::to_string(format::row_log_ring_offset + options.ring_bytes));
  }
  log_.set_dial(options.log_dial);
  unit_bytes_ = log_.file().unit_bytes();
  std::uint64_t num_rows = 0;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    Table table{tables[i], layout_of(tables[i]), {}, {}};
    if (table.what.layout || tables.size() > tables_with_few_files) allow_many_files();
    for (const RowPiece& piece : table.what.owned_pieces()) {
      Home& home = table.homes.emplace_back(
          open_home(directory, table.what, i, piece, options.caching, options.watcher, opening_of(options), queue_));
      home.file->set_dial(options.dial);
      if (home.addresses) home.addresses->set_dial(options.dial);
      home.first_number = num_rows;
      num_rows += piece.num_rows;
      unit_bytes_ = std::max(unit_bytes_, home.file->unit_bytes());
    }
    tables_.push_back(std::move(table));
  }
  if (are_by_first_touch(tables)) return;
  // Who only reads beside a writer would not see what that adds.
  const auto least_rows = log_.home_rows();
  if (!writable_ || !least_rows) return;
  home_bits_ = HomeBits::open(home_bits_path(directory), num_rows, options.caching, options.watcher, queue_,
                              options.identity.seed());
  if (home_bits_ && home_bits_->count() < *least_rows) home_bits_.reset();  // it is older than the checkpoint
  if (home_bits_ && home_bits_->count() > *least_rows) home_bits_->write_again();
  if (!home_bits_) log_.set_home_rows(std::nullopt);
}

// After the log's checkpoint: of a row that it leaves to home, home's addresses know by then.
void LogStore::read_addresses() {
  std::vector<Home*> homes;
  for (Table& table : tables_) {
    for (Home& home : table.homes) {
      if (home.addresses) homes.push_back(&home);
    }
  }
  if (homes.empty()) return;
  const std::uint64_t least_rows = log_.home_rows().value_or(0);
  std::vector<HomeAddresses*> addresses;
  for (Home* home : homes) addresses.push_back(home->addresses.get());
  HomeAddresses::read_all(addresses, least_rows);
  std::uint64_t num_rows = 0;
  for (Home* home : homes) {
    home->end_of_images = home->addresses->count();
    num_rows += home->addresses->count();
  }
  if (num_rows < least_rows) {
    throw Error(ErrorKind::corrupted, log_.file().name() + ": " + std::to_string(least_rows) +
                                          " rows are home, and the homes' addresses name " + std::to_string(num_rows) +
                                          ": older files were put back");
  }
  if (!writable_ || num_rows == least_rows) return;
  for (Home* home : homes) home->addresses->write_header_again();
}

std::size_t LogStore::Table::home_of(std::uint64_t row) const {
  const auto after = std::ranges::upper_bound(homes, row, {}, &Home::first);
  if (!has(row)) {
    throw Error(ErrorKind::config, "row " + std::to_string(row) + " of table '" + what.name + "' is not in this store");
  }
  return static_cast<std::size_t>(after - homes.begin()) - 1;
}

bool LogStore::Table::has(std::uint64_t row) const {
  const auto after = std::ranges::upper_bound(homes, row, {}, &Home::first);
  return after != homes.begin() && row < (after - 1)->end;
}

// Recovery.

StepMark LogStore::scan() {
  if (scanned_) throw Error(ErrorKind::step, log_.file().name() + ": the log was read already");
  log_.scan();
  read_addresses();
  scanned_ = true;
  return log_.last();
}

void LogStore::index(std::uint64_t epoch, std::uint64_t step_limit) {
  log_.check_start(epoch, step_limit);
  latching([&] { log_.make_found_durable(); });
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

void LogStore::go_back(std::uint64_t epoch, std::uint64_t step, const Forgotten& forgotten) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  log_.check_start(epoch, step);
  std::vector<std::vector<std::uint64_t>> undone(tables_.size());
  bool is_any = false;
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step <= step) continue;
    is_any = true;
    const SpareBuffers::Borrowed data = read_rows(record);
    for (const RowLogSection& section : sections_of(data.data())) {
      const std::uint64_t* rows = rows_of(data.data(), section);
      undone[section.table].insert(undone[section.table].end(), rows, rows + section.num_rows);
    }
  }
  latching([&] {
    if (is_any) rebuild_index(step);
    log_.start(epoch, step);
  });
  epoch_ = epoch;
  forgotten(std::move(undone));
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

// The index says where in the ring an image begins.

LogStore::Locations LogStore::locations_of(std::uint64_t position, const RowLogSection& section) const {
  return {position % log_.ring_bytes() + section.images_offset, tables_[section.table].layout};
}

std::uint64_t LogStore::offset_of_location(std::uint64_t location) { return format::row_log_ring_offset + location; }

void LogStore::index_record(const RowLog::Live& record, const std::byte* data) {
  ++index_version_;
  for (const RowLogSection& section : sections_of(data)) {
    Table& table = tables_[section.table];
    const std::uint64_t* rows = rows_of(data, section);
    Locations locations = locations_of(record.link.position, section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      prefetch_ahead(table.index, rows, i, section.num_rows);
      table.index.insert(rows[i], locations.next());
    }
  }
}

// Of whole units, the most that a piece of images lies in.
std::size_t LogStore::bytes_around(const RowLayout& layout) const {
  return format::align_up(layout.unit_bytes() + unit_bytes_ - 1, unit_bytes_);
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
    const std::size_t at_home_before = items.size();
    std::size_t home = 0;
    for (std::size_t u = 0; u < tables[request].num_rows; ++u) {
      const std::uint64_t* rows = tables[request].rows.rows;
      prefetch_ahead(table.index, rows, u, tables[request].num_rows);
      const std::uint64_t row = rows[u];
      if (const auto location = table.index.find(row)) {
        in_log.push_back({offset_of_location(*location), request, 0, u});
        continue;
      }
      const bool is_there = home < table.homes.size() && row >= table.homes[home].first && row < table.homes[home].end;
      if (!is_there) home = table.home_of(row);
      if (const auto address = table.homes[home].address_of(row, home_bits_.get())) {
        items.push_back({table.layout.offset_of(*address), request, static_cast<std::uint32_t>(home + 1), u});
      } else {
        untouched.push_back({request, u});
      }
    }
    std::sort(items.begin() + static_cast<std::ptrdiff_t>(at_home_before), items.end(), lies_before);
  }
  counters_.initial_rows += untouched.size();
  counters_.log_rows_fetched += in_log.size();
  items.reserve(items.size() + in_log.size());  // nothing throws any more once the fetch is noted
  const std::uint64_t number = ++num_fetches_;
  fetches_[number] = in_log.empty() ? format::no_position : log_.tail();
  lock.unlock();
  std::sort(in_log.begin(), in_log.end(), lies_before);
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
  note_fetched(images.size(), runs.read_bytes(), runs.reads().size());
  return images.size();
}

void LogStore::note_fetched(std::uint64_t rows, std::uint64_t bytes, std::uint64_t requests) {
  const std::lock_guard lock(mutex_);
  counters_.fetched_rows += rows;
  counters_.fetched_bytes += bytes;
  counters_.fetch_requests += requests;
}

void LogStore::take_image(const TableRows& request, const Item& item, const std::byte* image) const {
  const Table& table = tables_[request.table];
  const RowLayout& layout = table.layout;
  const std::uint64_t row = request.rows.rows[item.row];
  std::byte* weights = request.rows.weights + item.row * layout.weight_bytes();
  float* state = request.rows.state + item.row * table.what.spec.state_floats;
  const ImageState found = check_image(layout, request.table, row, image);
  const bool must_be_whole = item.file == 0 || table.homes[item.file - 1].addresses;
  if (found == ImageState::damaged || (found == ImageState::untouched && must_be_whole)) {
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
  for (const Table& table : tables_) {
    for (const Home& home : table.homes) bytes += home.addresses ? home.addresses->memory_bytes() : 0;
  }
  if (home_bits_) bytes += home_bits_->memory_bytes();
  return bytes;
}

LogStoreCounters LogStore::counters() const {
  const std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace holdfast

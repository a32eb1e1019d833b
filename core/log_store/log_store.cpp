#include "log_store/log_store.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "layout/row_log_place.h"
#include "log_store/log_record.h"
#include "log_store/row_import.h"

namespace holdfast {

using format::RowLogHeader;
using format::RowLogSection;

namespace {

constexpr std::uint64_t largest_ring_bytes = RowIndex::end_location;

StoreTables store_tables(std::vector<RowTable> tables) {
  StoreTables of;
  for (RowTable& table : tables) {
    const RowLayout layout = layout_of(table);
    of.push_back({std::move(table), layout});
  }
  return of;
}

// Throws corrupted where it has another size.
RowLog& checked(RowLog& log, const LogStoreOptions& options) {
  if (options.ring_bytes != 0 && log.ring_bytes() != options.ring_bytes) {
    throw Error(ErrorKind::corrupted, log.file().name() + ": " + std::to_string(log.file().size()) +
                                          " bytes, the row log was made with " +
                                          std::to_string(format::row_log_ring_offset + options.ring_bytes));
  }
  log.set_dial(options.log_dial);
  return log;
}

bool holds(const std::byte* record, const RowLogHeader& expected, std::uint32_t seed) {
  const RowLogHeader header = log_record::header_of(record);
  const std::byte* rows = record + sizeof(RowLogHeader);
  const std::byte* images = record + header.images_offset;
  return std::memcmp(&header, &expected, sizeof(header)) == 0 &&
         crc32c(seed, rows, static_cast<std::size_t>(images - rows)) == header.rows_crc &&
         crc32c(seed, images, header.bytes - header.images_offset) == header.images_crc;
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
  const std::optional<std::uint64_t> home_rows = Homes::create(directory, tables, caching, adopt);
  RowLog::create(row_log_path(directory), ring_bytes, caching, mark, home_rows, identity);
}

LogStore::LogStore(const std::string& directory, std::vector<RowTable> tables, const LogStoreOptions& options)
    : writable_(options.writable),
      io_(options.way),
      tables_(store_tables(std::move(tables))),
      log_(existing_row_log(directory, options.writable), options.caching, options.watcher, options.opening(),
           io_.queue, options.identity),
      index_(tables_, checked(log_, options), options.merge_slots),
      homes_(directory, tables_, options, io_, log_, index_.mutex()),
      records_(tables_, io_, log_),
      log_writer_(log_, index_, io_.counters, latch_),
      home_writer_(tables_, io_, log_, homes_, index_.mutex(), latch_),
      view_{tables_, io_, log_, index_, homes_},
      versions_(view_, records_, options.merge_bytes),
      merge_({view_, versions_, home_writer_, log_writer_, options.merge_bytes}) {
  io_.unit_bytes = std::max(log_.file().unit_bytes(), homes_.unit_bytes());
}

// Recovery.

StepMark LogStore::scan() {
  if (scanned_) throw Error(ErrorKind::step, log_.file().name() + ": the log was read already");
  log_.scan();
  homes_.read_addresses(log_);
  scanned_ = true;
  return log_.last();
}

void LogStore::index(std::uint64_t epoch, std::uint64_t step_limit) {
  log_.check_start(epoch, step_limit);
  latch_.latching([&] { log_.make_found_durable(); });
  rebuild_index(step_limit);
  indexed_step_ = step_limit;
}

std::uint64_t LogStore::recover(std::uint64_t epoch, std::uint64_t step_limit) {
  if (!writable_) throw Error(ErrorKind::step, log_.file().name() + ": opened for reading only");
  if (epoch_ != 0) throw Error(ErrorKind::step, log_.file().name() + ": recovered already");
  latch_.require_unfailed();
  if (!scanned_) scan();
  log_.check_start(epoch, step_limit);
  if (indexed_step_ != step_limit) rebuild_index(step_limit);
  latch_.latching([&] { log_.start(epoch, step_limit); });
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
  latch_.latching([&] {
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
    const SpareBuffers::Borrowed data = records_.read_rows(record);
    for (const RowLogSection& section : log_record::sections_of(data.data())) {
      const std::uint64_t* rows = log_record::rows_of(data.data(), section);
      undone[section.table].insert(undone[section.table].end(), rows, rows + section.num_rows);
    }
  }
  latch_.latching([&] {
    if (is_any) rebuild_index(step);
    log_.start(epoch, step);
  });
  epoch_ = epoch;
  forgotten(std::move(undone));
}

void LogStore::rebuild_index(std::uint64_t step) {
  index_.clear();
  for (const RowLog::Live& record : log_.live()) {
    if (record.link.mark.step > step) break;
    index_.add(record, records_.read_rows(record).data());
  }
}

// Rows.

void LogStore::fetch(std::span<const TableRows> tables) {
  require_readable();
  fetch_rows(view_, tables);
}

std::vector<std::uint64_t> LogStore::touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) {
  require_readable();
  return store_survey::touched_rows(view_, table, first, count);
}

void LogStore::sweep_home(const HomeStretch& stretch, const Take& take) {
  require_readable();
  store_sweep::sweep_home(view_, stretch, take);
}

void LogStore::sweep_log(std::uint64_t back, std::uint64_t bytes, const store_sweep::IsWanted& is_wanted,
                         const Take& take) {
  require_readable();
  store_sweep::sweep_log(view_, back, bytes, is_wanted, take);
}

std::optional<std::uint64_t> LogStore::append(const PackedRecord& packed) {
  require_usable();
  if (packed.step() <= log_.last().step) {
    throw Error(ErrorKind::step, "step " + std::to_string(packed.step()) + " cannot follow step " +
                                     std::to_string(log_.last().step) + " in " + log_.file().name());
  }
  return log_writer_.append(packed);
}

void LogStore::sync() {
  require_usable();
  log_writer_.sync();
}

std::uint64_t LogStore::merge(const Limit& limit, const Rest& rest, const GivesUp& gives_up, std::uint64_t most_bytes) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  return merge_.run({limit, rest, gives_up, most_bytes});
}

void LogStore::import_rows(std::uint32_t table, const ImportedRows& imported) {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  const auto through_log = [this](const TableRows& of_table) {
    const StepMark mark = log_.last();
    log_writer_.append(records_.pack(mark, {&of_table, 1}));
    log_.sync();
    const Limit limit = [&] { return mark.step; };
    const Rest rest = [](auto...) { return true; };
    const GivesUp gives_up = [] { return false; };
    merge_.run({limit, rest, gives_up, ~std::uint64_t{0}});
  };
  holdfast::import_rows({view_, home_writer_, latch_}, table, imported, through_log);
}

void LogStore::sync_home() {
  const std::lock_guard turn(merge_mutex_);
  require_usable();
  home_writer_.sync_imports();
}

// Reading alone.

std::vector<std::string> LogStore::verify(std::uint64_t step) {
  if (!viewed_) throw Error(ErrorKind::step, log_.file().name() + ": only a view is verified");
  const std::uint64_t last = log_.last().step;
  if (step < last) rebuild_index(step);
  std::vector<std::string> problems = store_survey::verify_homes(view_);
  if (step < last) rebuild_index(last);
  store_survey::verify_log(view_, problems);
  return problems;
}

std::vector<RowLog::Link> LogStore::follow_from_tail() {
  if (writable_ || !scanned_) {
    throw Error(ErrorKind::step, log_.file().name() + ": who follows opens for reading only, and scans first");
  }
  unread_ = log_.live();
  std::vector<RowLog::Link> links = {unread_.empty() ? log_.newest() : unread_.front().previous};
  for (const RowLog::Live& record : unread_) links.push_back(record.link);
  log_.forget(unread_.size());
  return links;
}

std::optional<FollowedRecord> LogStore::follow() {
  if (unread_.empty()) {
    const auto header = log_.next();
    if (!header) return std::nullopt;
    FollowedRecord record{RowLog::Live::of(*header).link, io_.spare.borrow(header->bytes)};
    io_.queue.read_range(log_.file(), log_.offset_of(header->position), header->bytes, record.data.data());
    if (!holds(record.data.data(), *header, log_.seed())) return std::nullopt;  // it is being written
    const RowLog::Live live = RowLog::Live::of(*header);
    records_.check_sections(live, record.data.data());
    log_.append(live);
    log_.forget(1);
    return record;
  }
  const RowLog::Live live = unread_.front();
  FollowedRecord record{live.link, io_.spare.borrow(live.bytes)};
  log_.read(live, live.bytes, record.data.data());
  if (!holds(record.data.data(), log_record::header_of(record.data.data()), log_.seed())) {
    throw Error(ErrorKind::corrupted, log_.place(live.link.position) + ": the record's checksum does not hold");
  }
  records_.check_sections(live, record.data.data());
  unread_.pop_front();
  return record;
}

std::vector<RowTable> LogStore::tables() const {
  std::vector<RowTable> tables;
  for (const StoreTable& table : tables_) tables.push_back(table.what);
  return tables;
}

void LogStore::visit_rows(
    const FollowedRecord& record,
    const std::function<void(std::uint32_t table, std::uint64_t row, const std::byte* image)>& visit) const {
  for (const format::RowLogSection& section : log_record::sections_of(record.data.data())) {
    const RowLayout& layout = tables_[section.table].layout;
    const std::uint64_t* rows = log_record::rows_of(record.data.data(), section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      visit(section.table, rows[i], record.data.data() + section.images_offset + layout.offset_of(i));
    }
  }
}

void LogStore::require_readable() const {
  if (epoch_ == 0 && !viewed_) throw Error(ErrorKind::step, log_.file().name() + ": recover or view comes first");
}

void LogStore::require_usable() const {
  if (!writable_) throw Error(ErrorKind::step, log_.file().name() + ": opened for reading only");
  if (epoch_ == 0) throw Error(ErrorKind::step, log_.file().name() + ": recover comes first");
  latch_.require_unfailed();
}

}  // namespace holdfast

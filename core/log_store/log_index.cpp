#include "log_store/log_index.h"

#include <algorithm>

#include "log_store/log_record.h"

namespace holdfast {

void LogIndex::clear() {
  const std::lock_guard lock(mutex_);
  ++version_;
  for (RowIndex& index : indexes_) index.clear();
}

void LogIndex::insert(const RowLog::Live& record, const std::byte* data) {
  ++version_;
  for (const format::RowLogSection& section : log_record::sections_of(data)) {
    RowIndex& index = indexes_[section.table];
    const std::uint64_t* rows = log_record::rows_of(data, section);
    Locations locations = locations_of(record.link.position, section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      prefetch_ahead(index, rows, i, section.num_rows);
      index.insert(rows[i], locations.next());
    }
  }
}

void LogIndex::add(const RowLog::Live& record, const std::byte* data) {
  const std::lock_guard lock(mutex_);
  insert(record, data);
}

void LogIndex::append(const RowLog::Live& record, const std::byte* data) {
  const std::lock_guard lock(mutex_);
  insert(record, data);
  log_.append(record);
}

std::optional<std::uint64_t> LogIndex::room_for(std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  std::uint64_t pinned = format::no_position;
  for (const auto& [number, oldest] : fetches_) pinned = std::min(pinned, oldest);
  return log_.room_for(bytes, pinned);
}

void LogIndex::forget(const LogStretch& stretch, std::size_t count) {
  for (RowIndex& index : indexes_) {
    in_parts(
        index, [] {}, [] {},
        [&](RowIndex& of_table, std::size_t slot) {
          ++version_;
          return of_table.erase_if(slot, slots_at_once_, [&](std::uint64_t location) { return stretch.has(location); });
        });
  }
  log_.forget(count);
}

// A caller that goes through a table asks many times while the index is the same: its rows are sorted once.
std::vector<std::uint64_t> LogIndex::rows(std::uint32_t table, std::uint64_t first, std::size_t count) {
  const std::lock_guard turn(listing_mutex_);
  std::unique_lock lock(mutex_);
  if (listing_.table != table || listing_.version != version_) {
    listing_ = {table, version_, indexes_[table].rows()};
    lock.unlock();
    std::sort(listing_.rows.begin(), listing_.rows.end());
  }
  const auto begin = std::lower_bound(listing_.rows.begin(), listing_.rows.end(), first);
  const auto left = static_cast<std::size_t>(listing_.rows.end() - begin);
  return {begin, begin + static_cast<std::ptrdiff_t>(std::min(left, count))};
}

std::size_t LogIndex::size(std::uint32_t table) const {
  const std::lock_guard lock(mutex_);
  return indexes_[table].size();
}

std::size_t LogIndex::size() const {
  const std::lock_guard lock(mutex_);
  std::size_t entries = 0;
  for (const RowIndex& index : indexes_) entries += index.size();
  return entries;
}

std::size_t LogIndex::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = 0;
  for (const RowIndex& index : indexes_) bytes += index.memory_bytes();
  return bytes;
}

std::uint64_t LogIndex::begin_fetch(const Locked& /*locked*/, bool reads_log) {
  fetches_[num_fetches_ + 1] = reads_log ? log_.tail() : format::no_position;
  return ++num_fetches_;
}

LogIndex::Fetching::~Fetching() {
  {
    const std::lock_guard lock(index_.mutex_);
    index_.fetches_.erase(number_);
  }
  index_.fetch_done_.notify_all();
}

void LogIndex::wait_for_fetches() {
  std::unique_lock lock(mutex_);
  const std::uint64_t begun = num_fetches_;
  fetch_done_.wait(lock, [&] { return fetches_.empty() || fetches_.begin()->first > begun; });
}

}  // namespace holdfast

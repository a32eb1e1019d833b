// What a log store holds, read from one end to the other.
#include <algorithm>
#include <iterator>

#include "log_store.h"

namespace holdfast {

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of home, read at once, and
constexpr std::size_t least_bytes = std::size_t{256} << 10;

}  // namespace

// The log first: a row that a merge takes home meanwhile is found in either.
std::vector<std::uint64_t> LogStore::touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) {
  require_readable();
  if (count == 0) return {};
  const Table& of = tables_.at(table);
  const std::vector<std::uint64_t> in_log = rows_in_log(table, first, count);
  const std::uint64_t end = in_log.size() == count ? in_log.back() : of.what.num_rows;
  const std::vector<std::uint64_t> at_home = rows_at_home(of, first, end, count);
  std::vector<std::uint64_t> rows;
  std::set_union(in_log.begin(), in_log.end(), at_home.begin(), at_home.end(), std::back_inserter(rows));
  rows.resize(std::min(rows.size(), count));
  return rows;
}

// A caller that goes through a table asks many times while the index is the same: its rows are sorted once.
std::vector<std::uint64_t> LogStore::rows_in_log(std::uint32_t table, std::uint64_t first, std::size_t count) {
  const std::lock_guard turn(listing_mutex_);
  std::unique_lock lock(mutex_);
  if (listing_.table != table || listing_.version != index_version_) {
    listing_ = {table, index_version_, tables_[table].index.rows()};
    lock.unlock();
    std::sort(listing_.rows.begin(), listing_.rows.end());
  }
  const auto begin = std::lower_bound(listing_.rows.begin(), listing_.rows.end(), first);
  const auto left = static_cast<std::size_t>(listing_.rows.end() - begin);
  return {begin, begin + static_cast<std::ptrdiff_t>(std::min(left, count))};
}

// Of the rows [first, end), by their tags.
std::vector<std::uint64_t> LogStore::rows_at_home(const Table& table, std::uint64_t first, std::uint64_t end,
                                                  std::size_t count) {
  const RowLayout& layout = table.layout;
  std::vector<std::uint64_t> rows;
  for (std::uint64_t row = first; row < end && rows.size() < count;) {
    const std::uint64_t data = table.home->next_data(row / layout.unit_rows() * layout.unit_bytes());
    row = std::max(row, data / layout.unit_bytes() * layout.unit_rows());
    if (row >= end) break;
    // What would hold all that is wanted if every row had been written.
    const std::uint64_t wanted = layout.bytes_for(std::min<std::uint64_t>(count - rows.size(), end - row));
    const std::uint64_t bytes_wanted = std::clamp<std::uint64_t>(wanted, least_bytes, buffer_bytes);
    const std::uint64_t units = std::max<std::uint64_t>(1, bytes_wanted / layout.unit_bytes());
    const std::uint64_t first_unit = row / layout.unit_rows();
    const std::uint64_t stop = std::min(end, (first_unit + units) * layout.unit_rows());
    const std::uint64_t offset = first_unit * layout.unit_bytes();
    const std::size_t bytes = layout.bytes_for(stop - first_unit * layout.unit_rows());
    const SpareBuffers::Borrowed buffer = spare_.borrow(bytes);
    queue_.read_range(*table.home, offset, bytes, buffer.data());
    for (; row < stop && rows.size() < count; ++row) {
      if (has_tag(layout, buffer.data() + (layout.offset_of(row) - offset))) rows.push_back(row);
    }
  }
  return rows;
}

}  // namespace holdfast

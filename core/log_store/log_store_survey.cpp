// What a log store holds, read from one end to the other.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "base/checksum.h"
#include "base/error.h"
#include "log_store/log_record.h"
#include "log_store/log_store.h"

namespace holdfast {

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of home, read at once, and
constexpr std::size_t least_bytes = std::size_t{256} << 10;
constexpr std::size_t most_problems = 100;

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

// Where the next images of the home at or after the address and before `end` lie that are not in a hole, about `bytes` of
// them, and whose they are; none where only holes follow.
std::optional<LogStore::Piece> LogStore::place_piece(const Table& table, const Home& home, std::uint64_t address,
                                                     std::uint64_t bytes, std::uint64_t end) {
  const RowLayout& layout = table.layout;
  if (!home.addresses) {
    const std::uint64_t data = home.file->next_data(address / layout.unit_rows() * layout.unit_bytes());
    address = std::max(address, data / layout.unit_bytes() * layout.unit_rows());
  }
  if (address >= end) return std::nullopt;
  const std::uint64_t unit = address / layout.unit_rows();
  const std::uint64_t units = std::max<std::uint64_t>(1, bytes / layout.unit_bytes());
  const std::uint64_t piece_end = std::min(end, (unit + units) * layout.unit_rows());
  const std::uint64_t offset = unit * layout.unit_bytes() / unit_bytes_ * unit_bytes_;
  const std::uint64_t data_end = format::align_up(layout.bytes_for(piece_end), unit_bytes_);
  Piece piece{&home, address, {}, offset, data_end - offset, {}};
  if (home.addresses) {
    piece.rows = home.addresses->rows_at(address, piece_end - address);
  } else {
    piece.rows.resize(piece_end - address);
    std::iota(piece.rows.begin(), piece.rows.end(), address);
  }
  for (std::uint64_t& row : piece.rows) row += home.first;
  return piece;
}

void LogStore::read_piece(Piece& piece) {
  piece.data = spare_.borrow(piece.bytes);
  queue_.read_range(*piece.home->file, piece.offset, piece.bytes, piece.data.data());
}

std::optional<LogStore::Piece> LogStore::next_piece(const Table& table, const Home& home, std::uint64_t address,
                                                    std::uint64_t bytes) {
  std::optional<Piece> piece = place_piece(table, home, address, bytes, home.num_images());
  if (piece) read_piece(*piece);
  return piece;
}

// Of the rows [first, end).
std::vector<std::uint64_t> LogStore::rows_at_home(const Table& table, std::uint64_t first, std::uint64_t end,
                                                  std::size_t count) {
  return table.what.home_order == HomeOrder::by_first_touch ? rows_with_address(table, first, end, count)
                                                            : rows_with_tag(table, first, end, count);
}

std::vector<std::uint64_t> LogStore::rows_with_address(const Table& table, std::uint64_t first, std::uint64_t end,
                                                       std::size_t count) const {
  std::vector<std::uint64_t> rows;
  const std::lock_guard lock(mutex_);
  for (const Home& home : table.homes) {
    for (std::uint64_t row = std::max(first, home.first); row < std::min(end, home.end) && rows.size() < count; ++row) {
      const auto next = home.addresses->next_row(row - home.first);
      if (!next || home.first + *next >= end) break;
      row = home.first + *next;
      rows.push_back(row);
    }
  }
  return rows;
}

// A piece holds all that is wanted if every row of it was written.
std::vector<std::uint64_t> LogStore::rows_with_tag(const Table& table, std::uint64_t first, std::uint64_t end,
                                                   std::size_t count) {
  std::vector<std::uint64_t> rows;
  for (const Home& home : table.homes) {
    for (std::uint64_t row = std::max(first, home.first); row < std::min(end, home.end) && rows.size() < count;) {
      const std::uint64_t wanted = table.layout.bytes_for(std::min<std::uint64_t>(count - rows.size(), end - row));
      const auto piece =
          next_piece(table, home, row - home.first, std::clamp<std::uint64_t>(wanted, least_bytes, buffer_bytes));
      if (!piece) break;
      for (std::size_t i = 0; i < piece->rows.size() && piece->rows[i] < end && rows.size() < count; ++i) {
        if (has_tag(table.layout, piece->image(table.layout, i))) rows.push_back(piece->rows[i]);
      }
      row = piece->rows.back() + 1;
    }
  }
  return rows;
}

// Verification.

std::vector<std::string> LogStore::verify(std::uint64_t step) {
  if (!viewed_) throw Error(ErrorKind::step, log_.file().name() + ": only a view is verified");
  std::vector<std::string> problems;
  const std::uint64_t last = log_.last().step;
  if (step < last) rebuild_index(step);
  for (std::uint32_t t = 0; t < tables_.size(); ++t) verify_home(t, problems);
  if (step < last) rebuild_index(last);
  for (const RowLog::Live& record : log_.live()) verify_record(record, problems);
  problems.resize(std::min(problems.size(), most_problems));
  return problems;
}

// A row that the log has may be torn at home: a merge that a crash ended leaves that, and the next one writes the row
// again. It merged no step that recovery drops.
void LogStore::verify_home(std::uint32_t number, std::vector<std::string>& problems) {
  const Table& table = tables_[number];
  for (const Home& home : table.homes) {
    for (std::uint64_t address = 0; problems.size() < most_problems;) {
      const auto piece = next_piece(table, home, address, buffer_bytes);
      if (!piece) break;
      for (std::size_t i = 0; i < piece->rows.size(); ++i) {
        const std::uint64_t row = piece->rows[i];
        const ImageState state = check_image(table.layout, number, row, piece->image(table.layout, i));
        const bool holds = home.addresses ? state == ImageState::whole : state != ImageState::damaged;
        if (holds || table.index.find(row)) continue;
        const std::uint64_t offset = table.layout.offset_of(piece->first_address + i);
        problems.push_back(damaged(home.file->place(offset), number, row));
      }
      address = piece->first_address + piece->rows.size();
    }
  }
}

void LogStore::verify_record(const RowLog::Live& record, std::vector<std::string>& problems) {
  if (problems.size() >= most_problems) return;
  const SpareBuffers::Borrowed data = spare_.borrow(record.bytes);
  log_.read(record, record.bytes, data.data());
  const std::size_t problems_before = problems.size();
  for (const format::RowLogSection& section : log_record::sections_of(data.data())) {
    const RowLayout& layout = tables_[section.table].layout;
    const std::uint64_t* rows = log_record::rows_of(data.data(), section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      const std::uint64_t offset = section.images_offset + layout.offset_of(i);
      if (check_image(layout, section.table, rows[i], data.data() + offset) == ImageState::whole) continue;
      problems.push_back(damaged(log_.place(record.link.position + offset), section.table, rows[i]));
    }
  }
  const std::uint32_t crc =
      crc32c(log_.seed(), data.data() + record.images_offset, record.bytes - record.images_offset);
  if (problems.size() == problems_before && crc != log_record::header_of(data.data()).images_crc) {
    problems.push_back(log_.place(record.link.position + record.images_offset) +
                       ": the checksum of the record's images does not hold");
  }
}

}  // namespace holdfast

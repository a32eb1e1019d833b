#include "log_store/store_survey.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/checksum.h"
#include "base/error.h"
#include "log_store/log_record.h"

namespace holdfast::store_survey {

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of home, read at once, and
constexpr std::size_t least_bytes = std::size_t{256} << 10;
constexpr std::size_t most_problems = 100;

// Of `out`, row i.
void put_image(const RowLayout& layout, std::uint64_t row, const std::byte* image, const RowValues& out,
               std::size_t i) {
  const std::size_t num_bytes = layout.weight_bytes() + layout.state_bytes();
  out.rows[i] = row;
  std::memcpy(out.values + i * num_bytes, image, num_bytes);
}

std::vector<const std::byte*> images_of(const HomePiece& piece, const RowLayout& layout) {
  std::vector<const std::byte*> images;
  images.reserve(piece.rows.size());
  for (std::size_t i = 0; i < piece.rows.size(); ++i) images.push_back(piece.image(layout, i));
  return images;
}

// Of the rows [first, end).
std::vector<std::uint64_t> rows_with_address(const StoreView& store, std::uint32_t table, std::uint64_t first,
                                             std::uint64_t end, std::size_t count) {
  std::vector<std::uint64_t> rows;
  const LogIndex::Locked locked(store.index);
  for (const Home& home : store.homes.of(table)) {
    for (std::uint64_t row = std::max(first, home.first); row < std::min(end, home.end) && rows.size() < count; ++row) {
      const auto next = home.addresses->next_row(row - home.first);
      if (!next || home.first + *next >= end) break;
      row = home.first + *next;
      rows.push_back(row);
    }
  }
  return rows;
}

// The same where rows lie by number. A piece holds all that is wanted if every row of it was written.
std::vector<std::uint64_t> rows_with_tag(const StoreView& store, std::uint32_t table, std::uint64_t first,
                                         std::uint64_t end, std::size_t count) {
  const RowLayout& layout = store.tables[table].layout;
  std::vector<std::uint64_t> rows;
  for (const Home& home : store.homes.of(table)) {
    for (std::uint64_t row = std::max(first, home.first); row < std::min(end, home.end) && rows.size() < count;) {
      const std::uint64_t wanted = layout.bytes_for(std::min<std::uint64_t>(count - rows.size(), end - row));
      const auto piece = store.homes.next_piece(table, home, row - home.first,
                                                std::clamp<std::uint64_t>(wanted, least_bytes, buffer_bytes));
      if (!piece) break;
      for (std::size_t i = 0; i < piece->rows.size() && piece->rows[i] < end && rows.size() < count; ++i) {
        if (has_tag(layout, piece->image(layout, i))) rows.push_back(piece->rows[i]);
      }
      row = piece->rows.back() + 1;
    }
  }
  return rows;
}

// A row that the log has may be torn at home: a merge that a crash ended leaves that, and the next one writes the row
// again. It merged no step that recovery drops.
void verify_home(const StoreView& store, std::uint32_t table, const Home& home, std::vector<std::string>& problems) {
  const RowLayout& layout = store.tables[table].layout;
  for (std::uint64_t address = 0; problems.size() < most_problems;) {
    const auto piece = store.homes.next_piece(table, home, address, buffer_bytes);
    if (!piece) return;
    const std::vector<const std::byte*> images = images_of(*piece, layout);
    const LogIndex::Locked locked(store.index);
    for (std::size_t i = 0; i < images.size(); ++i) {
      i += count_whole(layout, table, std::span(piece->rows).subspan(i), std::span(images).subspan(i));
      if (i == images.size()) break;
      const std::uint64_t row = piece->rows[i];  // and this one is not
      const bool holds = !home.addresses && check_image(layout, table, row, images[i]) != ImageState::damaged;
      if (holds || locked.of(table).find(row)) continue;
      const std::uint64_t offset = layout.offset_of(piece->first_address + i);
      problems.push_back(damaged_row(home.file->place(offset), table, row));
    }
    address = piece->first_address + piece->rows.size();
  }
}

void verify_record(const StoreView& store, const RowLog::Live& record, std::vector<std::string>& problems) {
  if (problems.size() >= most_problems) return;
  const SpareBuffers::Borrowed data = store.io.spare.borrow(record.bytes);
  store.log.read(record, record.bytes, data.data());
  const std::size_t problems_before = problems.size();
  for (const format::RowLogSection& section : log_record::sections_of(data.data())) {
    const RowLayout& layout = store.tables[section.table].layout;
    const std::uint64_t* rows = log_record::rows_of(data.data(), section);
    for (std::uint64_t i = 0; i < section.num_rows; ++i) {
      const std::uint64_t offset = section.images_offset + layout.offset_of(i);
      if (check_image(layout, section.table, rows[i], data.data() + offset) == ImageState::whole) continue;
      problems.push_back(damaged_row(store.log.place(record.link.position + offset), section.table, rows[i]));
    }
  }
  const std::uint32_t crc =
      crc32c(store.log.seed(), data.data() + record.images_offset, record.bytes - record.images_offset);
  if (problems.size() == problems_before && crc != log_record::header_of(data.data()).images_crc) {
    problems.push_back(store.log.place(record.link.position + record.images_offset) +
                       ": the checksum of the record's images does not hold");
  }
}

}  // namespace

// The log first: a row that a merge takes home meanwhile is found in either.
std::vector<std::uint64_t> touched_rows(const StoreView& store, std::uint32_t table, std::uint64_t first,
                                        std::size_t count) {
  if (count == 0) return {};
  const RowTable& what = store.tables.at(table).what;
  const std::vector<std::uint64_t> in_log = store.index.rows(table, first, count);
  const std::uint64_t end = in_log.size() == count ? in_log.back() : what.num_rows;
  const std::vector<std::uint64_t> at_home = what.home_order == HomeOrder::by_first_touch
                                                 ? rows_with_address(store, table, first, end, count)
                                                 : rows_with_tag(store, table, first, end, count);
  std::vector<std::uint64_t> rows;
  std::set_union(in_log.begin(), in_log.end(), at_home.begin(), at_home.end(), std::back_inserter(rows));
  rows.resize(std::min(rows.size(), count));
  return rows;
}

// Homes lie one behind another here, each with so many places as it has images, or rows.
HomeRead read_home(const StoreView& store, std::uint32_t number, std::uint64_t first, const RowValues& out,
                   std::size_t count, std::vector<std::uint64_t>& torn) {
  const auto& [what, layout] = store.tables.at(number);
  HomeRead read{0, first};
  std::uint64_t begin = 0;  // place of the home's first image
  for (const Home& home : store.homes.of(number)) {
    if (!home.addresses) begin = home.first;
    const std::uint64_t end = begin + home.num_images();
    for (read.next = std::max(read.next, begin); read.next < end;) {
      const std::uint64_t wanted = layout.bytes_for(count - read.num_rows);
      const auto piece = store.homes.next_piece(number, home, read.next - begin,
                                                std::clamp<std::uint64_t>(wanted, least_bytes, buffer_bytes));
      if (!piece) break;
      const std::vector<const std::byte*> images = images_of(*piece, layout);
      for (std::size_t i = 0; i < piece->rows.size();) {
        if (read.num_rows == count) return read;
        const std::size_t most = std::min(piece->rows.size() - i, count - read.num_rows);
        const auto rows = std::span(piece->rows).subspan(i, most);
        const std::size_t whole = count_whole(layout, number, rows, std::span(images).subspan(i, most));
        for (std::size_t k = 0; k < whole; ++k) put_image(layout, rows[k], images[i + k], out, read.num_rows++);
        i += whole;
        if (whole < most) {  // and the next one is not
          // An address is written before it counts.
          const bool is_torn =
              home.addresses || check_image(layout, number, rows[whole], images[i]) == ImageState::damaged;
          if (is_torn) torn.push_back(rows[whole]);
          ++i;
        }
        read.next = begin + piece->first_address + i;
      }
    }
    read.next = std::max(read.next, end);
    begin = end;
  }
  return {read.num_rows, std::max(read.next, what.num_rows)};
}

std::vector<std::string> verify_homes(const StoreView& store) {
  std::vector<std::string> problems;
  for (std::uint32_t t = 0; t < store.tables.size(); ++t) {
    for (const Home& home : store.homes.of(t)) verify_home(store, t, home, problems);
  }
  return problems;
}

void verify_log(const StoreView& store, std::vector<std::string>& problems) {
  for (const RowLog::Live& record : store.log.live()) verify_record(store, record, problems);
  problems.resize(std::min(problems.size(), most_problems));
}

}  // namespace holdfast::store_survey

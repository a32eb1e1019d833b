// What a copy of a log store reads while a writer may be at work: records as they appear, and home as it is.
#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/error.h"
#include "log_store/log_record.h"
#include "log_store/log_store.h"

namespace holdfast {

using format::RowLogHeader;

namespace {

constexpr std::size_t buffer_bytes = std::size_t{8} << 20;  // of home, read at once, and
constexpr std::size_t least_bytes = std::size_t{256} << 10;

// Of `out`, row i.
void put_image(const RowLayout& layout, std::uint64_t row, const std::byte* image, const WorkingRows& out,
               std::size_t i) {
  out.rows[i] = row;
  std::memcpy(out.weights + i * layout.weight_bytes(), image, layout.weight_bytes());
  if (layout.state_bytes() == 0) return;
  std::memcpy(reinterpret_cast<std::byte*>(out.state) + i * layout.state_bytes(), image + layout.weight_bytes(),
              layout.state_bytes());
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
    FollowedRecord record{RowLog::Live::of(*header).link, spare_.borrow(header->bytes)};
    queue_.read_range(log_.file(), log_.offset_of(header->position), header->bytes, record.data.data());
    if (!holds(record.data.data(), *header, log_.seed())) return std::nullopt;  // it is being written
    const RowLog::Live live = RowLog::Live::of(*header);
    check_sections(live, record.data.data());
    log_.append(live);
    log_.forget(1);
    return record;
  }
  const RowLog::Live live = unread_.front();
  FollowedRecord record{live.link, spare_.borrow(live.bytes)};
  log_.read(live, live.bytes, record.data.data());
  if (!holds(record.data.data(), log_record::header_of(record.data.data()), log_.seed())) {
    throw Error(ErrorKind::corrupted, log_.place(live.link.position) + ": the record's checksum does not hold");
  }
  check_sections(live, record.data.data());
  unread_.pop_front();
  return record;
}

std::vector<RowTable> LogStore::tables() const {
  std::vector<RowTable> tables;
  for (const Table& table : tables_) tables.push_back(table.what);
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

// Homes lie one behind another here, each with so many places as it has images, or rows.
HomeRead LogStore::read_home(std::uint32_t number, std::uint64_t first, const WorkingRows& out, std::size_t count,
                             std::vector<std::uint64_t>& torn) {
  const Table& table = tables_.at(number);
  const RowLayout& layout = table.layout;
  HomeRead read{0, first};
  std::uint64_t begin = 0;  // place of the home's first image
  for (const Home& home : table.homes) {
    if (!home.addresses) begin = home.first;
    const std::uint64_t end = begin + home.num_images();
    for (read.next = std::max(read.next, begin); read.next < end;) {
      const std::uint64_t wanted = layout.bytes_for(count - read.num_rows);
      const auto piece =
          next_piece(table, home, read.next - begin, std::clamp<std::uint64_t>(wanted, least_bytes, buffer_bytes));
      if (!piece) break;
      for (std::size_t i = 0; i < piece->rows.size(); ++i) {
        if (read.num_rows == count) return read;
        const std::uint64_t row = piece->rows[i];
        read.next = begin + piece->first_address + i + 1;
        const std::byte* image = piece->image(layout, i);
        const ImageState state = check_image(layout, number, row, image);
        // An address is written before it counts.
        const bool is_torn = state == ImageState::damaged || (state == ImageState::untouched && home.addresses);
        if (is_torn) torn.push_back(row);
        if (state == ImageState::whole) put_image(layout, row, image, out, read.num_rows++);
      }
    }
    read.next = std::max(read.next, end);
    begin = end;
  }
  return {read.num_rows, std::max(read.next, table.what.num_rows)};
}

}  // namespace holdfast

// A row log read back: which records it has, by what they say themselves, and how a life makes those durable that it begins
// with.
#include <algorithm>

#include "base/checksum.h"
#include "base/error.h"
#include "log_store/row_log.h"

namespace holdfast {

using format::RowLogHeader;

namespace {

constexpr std::size_t check_bytes = std::size_t{4} << 20;  // of a record, at a time
constexpr std::size_t search_bytes = std::size_t{64} << 20;  // how far behind the log's end lost records are looked for

}  // namespace

bool RowLog::holds(const RowLogHeader& header) const {
  const SectorBuffer data(std::min<std::uint64_t>(header.bytes, check_bytes));
  const auto crc_of_range = [&](std::uint64_t begin, std::uint64_t end) {
    std::uint32_t crc = seed_;
    while (begin < end) {
      const std::uint64_t from = begin / file_.unit_bytes() * file_.unit_bytes();
      const std::uint64_t bytes = std::min<std::uint64_t>(data.size(), end - from);
      read_range(header.position + from, format::align_up(bytes, file_.unit_bytes()), data.data());
      crc = crc32c(crc, data.data() + (begin - from), from + bytes - begin);
      begin = from + bytes;
    }
    return crc;
  };
  return crc_of_range(sizeof(header), header.images_offset) == header.rows_crc &&
         crc_of_range(header.images_offset, header.bytes) == header.images_crc;
}

void RowLog::scan() {
  live_.clear();
  newest_.last = {checkpoint_.last_record,
                  checkpoint_.last_record_crc,
                  {checkpoint_.last_record_step, checkpoint_.last_record_cursor, checkpoint_.last_record_row_updates}};
  newest_.end = checkpoint_.head;
  known_durable_ = checkpoint_.head;
  scan_backwards();
  scan_forwards();
  refuse_lost_records();
}

void RowLog::scan_backwards() {
  Link link = newest_.last;
  while (link.position != format::no_position && link.position >= checkpoint_.tail) {
    std::string why;
    const auto header = read_header(link.position, &why);
    if (!header || header->crc != link.crc) {
      throw Error(ErrorKind::corrupted,
                  place(link.position) + ": " + (header ? "a record that breaks the chain" : why));
    }
    live_.push_front(Live::of(*header));
    link = live_.front().previous;
  }
  if (!live_.empty() && live_.front().link.position != checkpoint_.tail) {
    throw Error(ErrorKind::corrupted, place(checkpoint_.tail) + ": no record where the log begins");
  }
}

void RowLog::scan_forwards() {
  while (const auto header = successor()) {
    live_.push_back(Live::of(*header));
    newest_ = {live_.back().link, live_.back().end()};
    known_durable_ = std::max(known_durable_, header->durable);
  }
}

std::optional<RowLogHeader> RowLog::successor() const {
  const auto header = next();
  return header && holds(*header) ? header : std::nullopt;
}

std::optional<RowLogHeader> RowLog::next() const {
  for (const std::uint64_t position : {newest_.end, next_turn(newest_.end)}) {
    std::string why;
    const auto header = read_header(position, &why);
    if (!header) continue;
    if (header->epoch > checkpoint_.epoch) {
      throw Error(ErrorKind::corrupted, place(position) + ": a record of epoch " + std::to_string(header->epoch) +
                                            ", whose checkpoint is lost");
    }
    const bool follows = header->epoch == checkpoint_.epoch && header->previous == newest_.last.position &&
                         header->previous_crc == newest_.last.crc;
    if (follows) return header;
  }
  return std::nullopt;
}

// A record of this epoch, further on, that says that the log was durable beyond where it ends now.
void RowLog::refuse_lost_records() const {
  const std::uint64_t tail = live_.empty() ? newest_.end : live_.front().link.position;
  const std::uint64_t end = std::min(newest_.end + search_bytes, tail + ring_bytes());
  std::vector<BlockRead> reads;
  for (std::uint64_t position = newest_.end + format::block_bytes; position < end; position += format::block_bytes) {
    reads.push_back({&file_, offset_of(position), file_.unit_bytes(), nullptr});
  }
  const SectorBuffer units(reads.size() * file_.unit_bytes());
  for (std::size_t i = 0; i < reads.size(); ++i) reads[i].dst = units.data() + i * file_.unit_bytes();
  queue_.read_many(reads);
  for (std::size_t i = 0; i < reads.size(); ++i) {
    std::string why;
    const auto header = check_header(reads[i].dst, newest_.end + (i + 1) * format::block_bytes, &why);
    if (!header || header->epoch != checkpoint_.epoch || header->durable <= newest_.end) continue;
    throw Error(ErrorKind::corrupted, place(newest_.end) +
                                          ": a record that was durable does not hold, the one of step " +
                                          std::to_string(header->step) + " says so");
  }
}

void RowLog::make_found_durable() {
  if (is_found_durable_) return;
  if (!file_.reads_device()) write_again();
  file_.sync();
  is_found_durable_ = true;
}

void RowLog::write_again() {
  for (const Live& record : live_) {
    if (record.end() > known_durable_) write_again(record);
  }
  write_block(file_, format::row_log_checkpoint_offset[checkpoint_slot_], checkpoint_);
}

void RowLog::write_again(const Live& record) {
  const SectorBuffer data(record.bytes);
  read_range(record.link.position, record.bytes, data.data());
  std::string why;
  const auto header = check_header(data.data(), record.link.position, &why);
  const auto crc_of_range = [&](std::uint64_t begin, std::uint64_t end) {
    return crc32c(seed_, data.data() + begin, end - begin);
  };
  if (!header || header->crc != record.link.crc ||
      crc_of_range(sizeof(RowLogHeader), record.images_offset) != header->rows_crc ||
      crc_of_range(record.images_offset, record.bytes) != header->images_crc) {
    throw Error(ErrorKind::failed, place(record.link.position) +
                                       ": a record that was there a moment ago was never written; open the pool again");
  }
  file_.write(offset_of(record.link.position), record.bytes, data.data());
}

}  // namespace holdfast

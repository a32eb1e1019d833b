#include "in_place/undo_log.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/error.h"

namespace holdfast {

using format::RecordHeader;
using format::RecordSection;

void UndoLog::start(std::uint64_t epoch, std::uint64_t head, const Link& begin) {
  const std::lock_guard lock(mutex_);
  epoch_ = epoch;
  last_ = begin;
  live_.clear();
  head_ = head;
}

std::optional<std::uint64_t> UndoLog::reserve(std::uint64_t step, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  std::uint64_t position = head_;
  if (position % ring_.size() + bytes > ring_.size()) position = (position / ring_.size() + 1) * ring_.size();
  // An empty log has no tail to spare: it may begin anywhere, so a record as large as the ring fits.
  const std::uint64_t tail = live_.empty() ? position : live_.front().position;
  if (position + bytes - tail > ring_.size()) return std::nullopt;
  const bool begins_step = live_.empty() || live_.back().step != step;
  live_.push_back({step, position, bytes + (begins_step ? 0 : live_.back().step_bytes)});
  largest_step_bytes_ = std::max(largest_step_bytes_, live_.back().step_bytes);
  head_ = position + bytes;
  return position;
}

void UndoLog::seal(std::uint64_t step, std::uint64_t position, std::size_t bytes, std::uint32_t num_sections,
                   std::optional<std::uint32_t> payload_crc) {
  std::byte* data = at(position);
  std::byte* payload = data + sizeof(RecordHeader);
  const std::size_t payload_bytes = bytes - sizeof(RecordHeader);
  // Capture's stores went to the processor's caches; here they go to the medium.
  DialService service(medium_.dial(), {.stream_written_bytes = bytes});
  medium_.flush(payload, payload_bytes);
  RecordHeader header{};
  header.magic = format::record_magic;
  header.epoch = epoch_;
  header.step = step;
  header.position = position;
  header.bytes = bytes;
  header.previous = last_.position;
  header.previous_crc = last_.crc;
  header.previous_step = last_.step;
  header.num_sections = num_sections;
  header.payload_crc = payload_crc ? *payload_crc : crc32c(seed_, payload, payload_bytes);
  header.crc = crc_of(header, seed_);
  medium_.persist_point();
  std::memcpy(data, &header, sizeof(header));
  medium_.persist(data, sizeof(header));
  service.finish();
  last_ = Link::to(header);
}

void UndoLog::rewind(std::uint64_t position, const Link& last) {
  const std::lock_guard lock(mutex_);
  if (live_.empty() || head_ <= position) return;
  // A header that stands could still be taken for a successor while its payload is being overwritten.
  for (; !live_.empty() && live_.back().position >= position; live_.pop_back()) {
    std::byte* header = at(live_.back().position);
    std::memset(header, 0, sizeof(RecordHeader));
    medium_.persist(header, sizeof(RecordHeader));
  }
  head_ = position;
  last_ = last;
}

UndoLog::Link UndoLog::before(std::uint64_t position) const {
  RecordHeader header;
  std::memcpy(&header, at(position), sizeof(header));
  return Link::before(header);
}

bool UndoLog::empty() const {
  const std::lock_guard lock(mutex_);
  return live_.empty();
}

void UndoLog::grow(std::size_t bytes) {
  const std::size_t had = ring_.size();
  if (bytes <= had) return;
  ring_.resize(bytes);
  try {
    ring_.allocate(had, bytes - had);
  } catch (...) {
    ring_.resize(had);
    throw;
  }
}

void UndoLog::release(std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  while (!live_.empty() && live_.front().step <= step) live_.pop_front();
}

std::uint64_t UndoLog::head() const {
  const std::lock_guard lock(mutex_);
  return head_;
}

std::uint64_t UndoLog::tail() const {
  const std::lock_guard lock(mutex_);
  return live_.empty() ? head_ : live_.front().position;
}

std::uint64_t UndoLog::free_bytes() const { return ring_.size() - (head() - tail()); }

std::uint64_t UndoLog::largest_step_bytes() const {
  const std::lock_guard lock(mutex_);
  return largest_step_bytes_;
}

std::optional<RecordHeader> UndoLog::read_header(std::uint64_t position, std::string* why) const {
  const auto refuse = [why](const char* reason) -> std::optional<RecordHeader> {
    if (why != nullptr) *why = reason;
    return std::nullopt;
  };
  const std::size_t offset = position % ring_.size();
  const std::size_t room = ring_.size() - offset;
  if (room < sizeof(RecordHeader)) return refuse("no room for a record header");
  RecordHeader header;
  std::memcpy(&header, ring_.data() + offset, sizeof(header));
  if (header.magic != format::record_magic) return refuse("no record here");
  if (header.crc != crc_of(header, seed_)) return refuse("the record header's checksum does not hold");
  if (header.position != position) return refuse("a record of another turn of the ring");
  if (header.bytes < sizeof(header) || header.bytes > room) return refuse("a record length that does not fit");
  if (header.num_sections > (header.bytes - sizeof(header)) / sizeof(RecordSection)) {
    return refuse("more sections than bytes");
  }
  return header;
}

std::optional<Record> UndoLog::read(std::uint64_t position, std::string* why) const {
  const auto header = read_header(position, why);
  if (!header) return std::nullopt;
  const std::byte* data = ring_.data() + position % ring_.size();
  if (header->payload_crc != crc32c(seed_, data + sizeof(RecordHeader), header->bytes - sizeof(RecordHeader))) {
    if (why != nullptr) *why = "the record payload's checksum does not hold";
    return std::nullopt;
  }
  return Record{*header, data};
}

std::optional<Record> UndoLog::read(const Link& link, std::string* why) const {
  const auto record = read(link.position, why);
  if (record && (record->header.crc != link.crc || record->header.step != link.step)) {
    *why = "a record that breaks the chain";
    return std::nullopt;
  }
  return record;
}

std::optional<Record> UndoLog::successor(std::uint64_t epoch, std::uint64_t position, const Link& link) const {
  const std::uint64_t next_turn = (position / ring_.size() + 1) * ring_.size();
  for (const std::uint64_t candidate : {position, next_turn}) {
    const auto header = read_header(candidate, nullptr);
    if (!header || header->epoch != epoch || header->previous != link.position || header->previous_crc != link.crc) {
      continue;
    }
    std::string why;
    if (auto record = read(candidate, &why)) return record;
    throw Error(ErrorKind::corrupted, place(candidate) + ": " + why);
  }
  return std::nullopt;
}

}  // namespace holdfast

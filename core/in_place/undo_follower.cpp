#include "in_place/undo_follower.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/checksum.h"
#include "base/error.h"
#include "in_place/undo.h"
#include "layout/pool_files.h"
#include "media/directory.h"
#include "step/lookup.h"

namespace holdfast {

using format::RecordHeader;

namespace {

[[noreturn]] void overtaken(const std::string& where, const std::string& why) {
  throw Error(ErrorKind::overtaken, where + ": " + why);
}

RecordHeader header_of(const std::vector<std::byte>& record) {
  RecordHeader header;
  std::memcpy(&header, record.data(), sizeof(header));
  return header;
}

}  // namespace

UndoFollower::UndoFollower(Medium& medium, const Superblock& superblock, const InPlaceStore& store)
    : superblock_(superblock),
      store_(store),
      ring_(open_log_file(medium, superblock.identity(), superblock.header().log_bytes, false)),
      log_(medium, *ring_, superblock.identity().seed()),
      begin_(superblock.read_commit()),
      chain_{{UndoLog::Link::of(begin_), begin_.log_head}},
      versions_(superblock.row_tables()) {}

void UndoFollower::follow(std::uint64_t floor) {
  do {
    for (; !pending_.empty() && (step_ || pending_.front().step <= floor); pending_.pop_front()) {
      if (step_) keep(pending_.front());
    }
  } while (advance());
}

// The records of steps that were committed when this began are read backwards, and count before those taken since.
void UndoFollower::fix(std::uint64_t step) {
  std::vector<Taken> before;
  UndoLog::Link link = chain_.front().link;
  while (link.position != format::no_position && link.step > step) {
    std::string why = "a record was given up";
    const auto header = log_.read_header(link.position, &why);
    const bool stands = header && header->crc == link.crc && link.position >= begin_.log_tail;
    auto record = stands ? take(link.position, *header) : std::nullopt;
    if (!record) overtaken(log_.place(link.position), why);
    before.push_back(std::move(*record));
    link = UndoLog::Link::before(*header);
  }
  if (link.position == format::no_position && link.step > step) overtaken(ring_->name(), "the pool was opened anew");
  step_ = step;
  for (auto record = before.rbegin(); record != before.rend(); ++record) keep(*record);
  for (; !pending_.empty(); pending_.pop_front()) keep(pending_.front());
}

void UndoFollower::catch_up() {
  __sync_synchronize();  // what the caller has read, it read before; TSan takes no atomic_thread_fence
  for (;;) {
    follow(0);
    const format::CommitRecord commit = superblock_.read_commit();
    if (commit.epoch != begin_.epoch) overtaken(ring_->name(), "the pool was opened anew");
    if (is_taken(UndoLog::Link::of(commit))) break;
    if (!advance()) overtaken(ring_->name(), "the log came round before a record was read");
  }
  check_ring();
}

// The next record: after the newest, or after an older one, where those behind it were taken back.
bool UndoFollower::advance() {
  for (std::size_t i = chain_.size(); i-- > 0;) {
    if (auto record = take_after(chain_[i])) {
      const UndoLog::Link link = UndoLog::Link::to(header_of(record->bytes));
      const bool is_known =
          i + 1 < chain_.size() && chain_[i + 1].link.position == link.position && chain_[i + 1].link.crc == link.crc;
      if (is_known) return false;
      chain_.resize(i + 1);
      chain_.push_back({link, link.position + record->bytes.size()});
      pending_.push_back(std::move(*record));
      return true;
    }
    // Only records of a step that is not committed are taken back, and of one captured ahead of it.
    if (i == 0 || chain_[i].link.step + 1 < chain_.back().link.step) return false;
    std::string why;
    const auto header = log_.read_header(chain_[i].link.position, &why);
    if (header && header->crc == chain_[i].link.crc) return false;
  }
  return false;
}

std::optional<UndoFollower::Taken> UndoFollower::take_after(const Point& point) const {
  const std::uint64_t next_turn = (point.end / ring_->size() + 1) * ring_->size();
  for (const std::uint64_t position : {point.end, next_turn}) {
    const auto header = log_.read_header(position, nullptr);
    if (!header || header->epoch != begin_.epoch || header->previous != point.link.position ||
        header->previous_crc != point.link.crc) {
      continue;
    }
    return take(position, *header);
  }
  return std::nullopt;
}

std::optional<UndoFollower::Taken> UndoFollower::take(std::uint64_t position, const RecordHeader& expected) const {
  const std::byte* data = log_.at(position);
  Taken taken{expected.step, {data, data + expected.bytes}};
  const std::byte* payload = taken.bytes.data() + sizeof(RecordHeader);
  if (std::memcmp(taken.bytes.data(), &expected, sizeof(expected)) != 0) return std::nullopt;
  if (crc32c(log_.seed(), payload, expected.bytes - sizeof(RecordHeader)) != expected.payload_crc) {
    const auto header = log_.read_header(position, nullptr);
    if (!header || header->crc != expected.crc) return std::nullopt;
    overtaken(log_.place(position), "a record's checksum does not hold");
  }
  check_record({expected, taken.bytes.data()}, log_, store_);
  return taken;
}

void UndoFollower::keep(const Taken& taken) {
  if (taken.step <= *step_) return;
  const Record record{header_of(taken.bytes), taken.bytes.data()};
  for (const format::RecordSection& section : record.sections()) {
    versions_.keep_first(section.table, rows_of(section, const_cast<std::byte*>(record.data)), section.num_rows);
  }
}

bool UndoFollower::is_taken(const UndoLog::Link& link) const {
  return std::any_of(chain_.rbegin(), chain_.rend(), [&](const Point& point) {
    return point.link.position == link.position && point.link.crc == link.crc;
  });
}

// Offsets in the ring count by its size.
void UndoFollower::check_ring() const {
  if (bytes_of_file_at(ring_->name()) != ring_->file_offset(ring_->size()))
    overtaken(ring_->name(), "the log was made larger");
}

}  // namespace holdfast

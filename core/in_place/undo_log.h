// Undo log: a ring of records, each the before-images of one capture, chained by checksum.
//
// Invariants
// - A record lies in one piece; its header is written after its payload is durable, and is the flag that says so.
// - Records form a chain: each carries epoch, step, its own position and its predecessor's checksum. A record is
//   believed only as the successor of one that is (or of the commit record), so nothing from an earlier life, an
//   earlier turn of the ring or before a rewind is ever taken for a record.
// - Bytes between tail and head are never overwritten. head - tail <= ring size.
// - reserve, rewind and the seals of one log happen in one order; reserve and release may run on two threads.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "media/medium.h"

namespace holdfast {

// A record that was read back and found whole.
struct Record {
  format::RecordHeader header;
  const std::byte* data;  // of the record's first byte
  std::span<const format::RecordSection> sections() const {
    return {reinterpret_cast<const format::RecordSection*>(data + sizeof(format::RecordHeader)), header.num_sections};
  }
};

class UndoLog {
 public:
  // A link of the chain: the record that the next one follows. The record itself may be gone (released).
  struct Link {
    std::uint64_t position = format::no_position;
    std::uint32_t crc = 0;
    std::uint64_t step = 0;  // where there is no record: the step at whose end the life began

    static Link of(const format::CommitRecord& commit) {
      return {commit.last_record, commit.last_record_crc, commit.last_record_step};
    }
    static Link before(const format::RecordHeader& record) {
      return {record.previous, record.previous_crc, record.previous_step};
    }
    static Link to(const format::RecordHeader& record) { return {record.position, record.crc, record.step}; }
  };

  // seed: what its checksums go on from (identity.h).
  UndoLog(Medium& medium, File& ring, std::uint32_t seed) : medium_(medium), ring_(ring), seed_(seed) {}

  std::uint64_t ring_bytes() const { return ring_.size(); }
  std::uint32_t seed() const { return seed_; }
  // Makes the ring larger; only while it holds no record that is needed. Throws full, and nothing has changed.
  void grow(std::size_t bytes);
  bool empty() const;

  // Begins an empty log at `head`: what lies in the ring is forgotten. The chain begins at `begin`, which names no
  // record.
  void start(std::uint64_t epoch, std::uint64_t head, const Link& begin);

  // Space for a record of `bytes` (a multiple of line_bytes) of `step`; nothing when the ring has no room now.
  std::optional<std::uint64_t> reserve(std::uint64_t step, std::size_t bytes);
  // Where that is, for messages.
  std::string place(std::uint64_t position) const { return ring_.place(position % ring_.size()); }
  // The record at `position`, header first.
  std::byte* at(std::uint64_t position) const { return ring_.data() + position % ring_.size(); }

  // Writes the header of the record at `position`, whose sections and payload are stored: makes the payload durable,
  // then the header. Records are sealed in the order of their positions. payload_crc: where it is known already.
  void seal(std::uint64_t step, std::uint64_t position, std::size_t bytes, std::uint32_t num_sections,
            std::optional<std::uint32_t> payload_crc);

  // Takes back the records from `position` on; `last` is the link before them.
  void rewind(std::uint64_t position, const Link& last);

  // Records of steps up to `step` are needed no more.
  void release(std::uint64_t step);

  // The newest sealed record.
  const Link& last() const { return last_; }
  // The link before the sealed record at `position`.
  Link before(std::uint64_t position) const;
  std::uint64_t head() const;
  std::uint64_t tail() const;
  std::uint64_t free_bytes() const;
  // What the records of one step took at most, those of the newest so far.
  std::uint64_t largest_step_bytes() const;

  // The header at `position`, where it holds, or the reason why there is none.
  std::optional<format::RecordHeader> read_header(std::uint64_t position, std::string* why) const;
  // The whole, valid record at `position`, or the reason why there is none.
  std::optional<Record> read(std::uint64_t position, std::string* why = nullptr) const;
  // The record that `link` points to.
  std::optional<Record> read(const Link& link, std::string* why) const;
  // The record that follows `link` at `position` (or at the ring's next turn), of `epoch`, or nothing. Throws corrupted
  // where its header stands but its payload does not hold: the header is written last, so no crash leaves that.
  std::optional<Record> successor(std::uint64_t epoch, std::uint64_t position, const Link& link) const;

 private:
  struct Live {
    std::uint64_t step;
    std::uint64_t position;
    std::uint64_t step_bytes;  // of its step's records up to its own
  };

  Medium& medium_;
  File& ring_;
  std::uint32_t seed_;
  std::uint64_t epoch_ = 0;
  Link last_;  // touched by seals only, which are in order

  mutable std::mutex mutex_;  // guards what follows
  std::deque<Live> live_;
  std::uint64_t head_ = 0;
  std::uint64_t largest_step_bytes_ = 0;
};

}  // namespace holdfast

// Row log: a ring of records on a block device, each the new versions of the rows that one step updated.
//
// Invariants
// - Only writes of one 512-byte sector are taken to be atomic. Records carry checksums over all their bytes; a
//   checkpoint is written to the one of two blocks that does not count. No sector that is durable and needed is
//   written again.
// - A record lies in one piece. Positions are logical and grow; a record's offset is position % ring, behind the
//   checkpoints. Bytes from tail to head are never overwritten: head - tail <= ring.
// - Records form a chain: each names position and checksum of the one before. A record is believed only as named by
//   the checkpoint (backwards, by checksum) or as the successor of one that is believed, of the checkpoint's epoch,
//   and whole.
// - Every life has an epoch of its own and begins with a durable checkpoint, before its first append. Only that may
//   take the head back, so within an epoch no position is used twice.
// - What a life begins with and that was not read from the device for certain is written once more, with the same bytes,
//   before it is synced and believed: it may be nowhere but in the page cache, whose pages the kernel takes for written
//   after it has once said that they were not. That is the checkpoint, and the records that no other calls durable.
// - What the checkpoint names was durable: where it does not hold, the medium or a person damaged it. So it was where
//   a later record of the same epoch says that everything up to it was durable. Any other record that does not hold
//   is a torn tail, which is what a crash leaves.
// - One thread appends; one thread at a time merges; sync and the getters may be called from any.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/format.h"
#include "base/identity.h"
#include "base/step_mark.h"
#include "media/block_file.h"
#include "media/block_queue.h"

namespace holdfast {

class RowLog {
 public:
  // A link of the chain. The record itself may be gone: what it says beside rows is in the link.
  struct Link {
    std::uint64_t position = format::no_position;
    std::uint32_t crc = 0;
    StepMark mark{};

    bool operator==(const Link& other) const { return position == other.position && crc == other.crc; }
  };
  // A record that is needed.
  struct Live {
    Link link;
    Link previous;
    std::uint64_t bytes;
    std::uint64_t images_offset;

    static Live of(const format::RowLogHeader& header);
    std::uint64_t end() const { return link.position + bytes; }
  };

  // A new log of `ring_bytes` (a multiple of 4096) for records, which begins after the mark's step; its space is
  // allocated. home_rows: how many rows are home, where that is known. identity: of the pool (identity.h). Throws full.
  static void create(const std::string& path, std::uint64_t ring_bytes, Caching caching, const StepMark& mark = {},
                     std::optional<std::uint64_t> home_rows = std::nullopt, const Identity& identity = {});

  // Opens; throws corrupted where it is another pool's or neither checkpoint holds, and changes nothing.
  RowLog(const std::string& path, Caching caching, BlockWatcher* watcher, Opening opening, BlockQueue& queue,
         const Identity& identity = {});

  // Reads the log back. Throws corrupted, and changes nothing.
  void scan();
  // For whoever looks on: the header of a record behind the newest, which a writer may still be at work on. It is not
  // in the log before `append` is told.
  std::optional<format::RowLogHeader> next() const;
  // The newest checkpoint's merged step, as it is in the file now.
  std::uint64_t read_merged_step() const;
  // What was read is on the device, whatever became of the process that wrote it, or of its sync. Once in a life.
  void make_found_durable();
  // Begins life `epoch`: forgets the records after `step` and makes that durable. The same again only before its first
  // append; a later one whenever nothing is being appended, merged or synced.
  // Throws step or corrupted where that cannot be, as check_start does.
  void check_start(std::uint64_t epoch, std::uint64_t step) const;
  void start(std::uint64_t epoch, std::uint64_t step);

  // What the checksums of its records go on from.
  std::uint32_t seed() const { return seed_; }
  std::uint64_t ring_bytes() const { return file_.size() - format::row_log_ring_offset; }
  std::uint64_t offset_of(std::uint64_t position) const {
    return format::row_log_ring_offset + position % ring_bytes();
  }
  std::string place(std::uint64_t position) const { return file_.place(offset_of(position)); }
  std::string place_of_checkpoint() const { return file_.place(format::row_log_checkpoint_offset[checkpoint_slot_]); }
  std::uint64_t epoch_of_checkpoint() const { return checkpoint_.epoch; }
  // The checkpoint that does not count, where it neither holds nor is as creation left it, with file and offset. In a
  // pool that was closed cleanly there is none.
  std::optional<std::uint64_t> offset_of_broken_checkpoint() const;
  std::optional<std::string> broken_checkpoint() const;
  const BlockFile& file() const { return file_; }
  void set_dial(Dial* dial) { file_.set_dial(dial); }

  // How many rows are home at least, by the newest checkpoint, where that is known; and what those that follow are to
  // say, which checkpoint makes durable at once. Whoever does not know it writes checkpoints that say nothing.
  std::optional<std::uint64_t> home_rows() const;
  void set_home_rows(std::optional<std::uint64_t> count);
  void checkpoint();

  // Where a record of `bytes` would go, or nothing when there is no room behind the tail and `pinned`, the oldest
  // position that somebody still reads.
  std::optional<std::uint64_t> room_for(std::uint64_t bytes, std::uint64_t pinned) const;
  // Fills in the header's position and chain, seals it and writes the record. It is not in the log yet.
  Live write(format::RowLogHeader header, std::uint64_t position, std::byte* record);
  // It is now.
  void append(const Live& record);
  // Everything that was appended before is durable.
  void sync();

  // Makes durable that the `count` oldest records are merged; only then may they be forgotten. They are durable, and no
  // recovery goes before `merged_step`, that of the last of them or a later durable one, from now on.
  void checkpoint_without(std::size_t count, std::uint64_t merged_step);
  // Gives up the space of the `count` oldest records.
  void forget(std::size_t count);

  // Reads the first `bytes` of a record, rounded up to whole units of the file. Throws corrupted where its header is not
  // the one that was believed.
  void read(const Live& record, std::uint64_t bytes, std::byte* dst) const;

  // The records that are needed, oldest first.
  std::deque<Live> live() const;
  StepMark last() const;
  Link newest() const;  // of the chain; the record itself may be gone
  std::uint64_t durable_step() const;
  std::uint64_t merged_step() const;
  // Position of the oldest record that is needed; the head where there is none.
  std::uint64_t tail() const;
  // From there to the head.
  std::uint64_t used_bytes() const;

 private:
  // A point between two records.
  struct Point {
    Link last;
    std::uint64_t end = 0;
  };

  static void write_block(BlockFile& file, std::uint64_t offset, const format::RowLogCheckpoint& checkpoint);
  std::optional<format::RowLogHeader> read_header(std::uint64_t position, std::string* why) const;
  std::optional<format::RowLogHeader> check_header(const std::byte* data, std::uint64_t position,
                                                   std::string* why) const;
  void read_range(std::uint64_t position, std::uint64_t bytes, std::byte* dst) const;
  bool holds(const format::RowLogHeader& header) const;
  void write_again();
  void write_again(const Live& record);
  void scan_backwards();
  void scan_forwards();
  std::optional<format::RowLogHeader> successor() const;
  void refuse_lost_records() const;
  void write_checkpoint(std::uint64_t tail, std::uint64_t merged_step, const Point& durable);
  std::uint64_t next_turn(std::uint64_t position) const { return (position / ring_bytes() + 1) * ring_bytes(); }

  BlockFile file_;
  BlockQueue& queue_;
  std::uint32_t seed_;
  format::RowLogCheckpoint checkpoint_;  // the newest that is durable
  std::size_t checkpoint_slot_;
  std::uint64_t next_home_rows_;  // as the next one is to say it
  std::uint64_t epoch_ = 0;
  bool appended_ = false;
  bool is_found_durable_ = false;
  std::uint64_t known_durable_ = 0;  // position before which all records were, as the log itself says

  mutable std::mutex mutex_;  // guards what follows
  std::deque<Live> live_;
  Point newest_;
  Point durable_;
};

}  // namespace holdfast

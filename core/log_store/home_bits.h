// Home bits: which rows a log store has ever written home, a bit each. Where a row's bit is clear and the log has no
// version of it, the row is untouched, and its value is made without a look at the medium.
//
// Invariants
// - A bit that is clear says that home has no version of its row. One that is set says nothing.
// - A bit is set before its row is written home, and never cleared. The store makes bits durable before the checkpoint
//   after which the log has no version of their rows any more: a crash before that loses bits of rows that the log has.
//   Where the log has none to begin with, a checkpoint that gives all bits up is durable before home is written; one
//   that takes them back follows when they are durable.
// - Blocks are written in place. One that a crash tore, or that was damaged, does not hold its checksum, and is read as
//   if all its bits were set; so is a file that is not there. Neither costs more than time.
// - How many bits are set only grows, and the checkpoint says how many were, unless it gives them up: a file of fewer has
//   lost some, and counts for nothing.
// - Only one thread at a time adds and syncs; whoever asks meanwhile is kept apart by the caller's mutex while it adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/huge_array.h"
#include "media/block_file.h"
#include "media/block_queue.h"

namespace holdfast {

class HomeBits {
 public:
  // A new file for so many rows, none of them home; sparse, and durable.
  static void create(const std::string& path, std::uint64_t num_rows);
  // Reads it; nothing where there is no file, or one of another size. seed: what its checksums go on from (identity.h).
  static std::unique_ptr<HomeBits> open(const std::string& path, std::uint64_t num_rows, Caching caching,
                                        BlockWatcher* watcher, BlockQueue& queue, std::uint32_t seed = 0);

  bool may_have(std::uint64_t row) const;
  void add(std::uint64_t row);
  // What was added is durable.
  void sync();
  // Of a file that names more rows than were ever known to be durable: the next sync writes all of it, since what was
  // read may be in the page cache alone, and pass for written.
  void write_again();

  // How many rows there may be at home, those of blocks that did not hold among them.
  std::uint64_t count() const { return count_; }
  std::size_t memory_bytes() const { return blocks_.size(); }

 private:
  HomeBits(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint32_t seed);
  void read();

  std::byte* block(std::uint64_t number) const { return blocks_.data() + number * format::block_bytes; }
  std::uint64_t num_blocks() const { return is_new_.size(); }

  std::unique_ptr<BlockFile> file_;
  BlockQueue& queue_;
  std::uint32_t seed_;
  HugeArray<std::byte> blocks_;  // as in the file, but for checksums of the new ones
  std::uint64_t count_ = 0;
  std::vector<bool> is_new_;  // by block: it is not in the file yet, as it is
};

}  // namespace holdfast

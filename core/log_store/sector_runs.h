// Sector runs: scattered pieces of files, gathered into few long ranges of whole sectors, to be read or written at
// once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "base/format.h"
#include "media/block_file.h"
#include "media/block_queue.h"

namespace holdfast {

// A device reads what is between two blocks while it would turn to another request, which also takes a microsecond of
// CPU. What is written wears it out: there one block goes with its neighbours, no more, and none with a few that lie by
// themselves, of which half would be such blocks.
inline constexpr std::size_t read_gap_bytes = 2 * format::block_bytes;
inline constexpr std::size_t write_gap_bytes = format::block_bytes;
inline constexpr std::size_t least_before_write_gap = 4 * format::block_bytes;

// How runs are made. unit_bytes: what is read and written as a whole. read_gap_bytes: two units so far apart are read
// with what is between them; write_gap_bytes, not more than that: and so they are written back, behind
// least_before_write_gap bytes or more. most_bytes, most_writes: further units find no room.
struct RunShape {
  std::size_t read_gap_bytes = 0;
  std::size_t write_gap_bytes = 0;
  std::size_t least_before_write_gap = 0;
  std::size_t unit_bytes = format::sector_bytes;
  std::size_t most_bytes = std::numeric_limits<std::size_t>::max();
  std::size_t most_writes = std::numeric_limits<std::size_t>::max();
};

// Sectors of files (or units of several), gathered into few long ranges that lie one behind another in a buffer.
class SectorRuns {
 public:
  SectorRuns(const SectorBuffer& buffer, const RunShape& shape) : buffer_(buffer), shape_(shape) {}

  // Where these bytes of `file` are going to lie, or null when there is no room left. Where offsets of a file do not
  // ascend, a run ends.
  std::byte* place(const BlockFile& file, std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t begin = offset / shape_.unit_bytes * shape_.unit_bytes;
    const std::uint64_t end = format::align_up(offset + bytes, shape_.unit_bytes);
    const bool in_run = !reads_.empty() && reads_.back().file == &file &&
                        joins(reads_.back().offset + reads_.back().bytes, begin, shape_.read_gap_bytes);
    const bool in_write = in_run && joins(writes_.back().offset + writes_.back().bytes, begin, write_gap());
    const std::uint64_t run_end = in_run ? reads_.back().offset + reads_.back().bytes : begin;
    const std::size_t more = end > run_end ? end - run_end : 0;
    if (used_bytes_ + more > std::min(buffer_.size(), shape_.most_bytes)) return nullptr;
    if (!in_write && writes_.size() == shape_.most_writes) return nullptr;
    if (!in_run) reads_.push_back({&file, begin, 0, buffer_.data() + used_bytes_});
    BlockRead& run = reads_.back();
    run.bytes += more;
    used_bytes_ += more;
    if (!in_write) writes_.push_back({&file, begin, 0, run.dst + (begin - run.offset)});
    BlockWrite& write = writes_.back();
    const std::size_t write_bytes = std::max<std::size_t>(write.bytes, end - write.offset);
    written_bytes_ += write_bytes - write.bytes;
    write.bytes = write_bytes;
    return run.dst + (offset - run.offset);
  }

  std::span<const BlockRead> reads() const { return reads_; }
  std::span<const BlockWrite> writes() const { return writes_; }
  std::size_t read_bytes() const { return used_bytes_; }
  std::size_t written_bytes() const { return written_bytes_; }

 private:
  static constexpr std::size_t longest_run_bytes = std::size_t{1} << 20;

  std::size_t write_gap() const {
    return writes_.back().bytes < shape_.least_before_write_gap ? 0 : shape_.write_gap_bytes;
  }

  // Do units from `begin` on go on what ends at `last`? A unit is in one run alone, however long that is.
  bool joins(std::uint64_t last, std::uint64_t begin, std::size_t gap_bytes) const {
    if (begin < reads_.back().offset) return false;
    return begin < last || (begin <= last + gap_bytes && reads_.back().bytes < longest_run_bytes);
  }

  const SectorBuffer& buffer_;
  RunShape shape_;
  std::size_t used_bytes_ = 0;
  std::size_t written_bytes_ = 0;
  std::vector<BlockRead> reads_;
  std::vector<BlockWrite> writes_;  // of the same memory
};

}  // namespace holdfast

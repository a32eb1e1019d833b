// Sector runs: scattered pieces of files, gathered into few long ranges of whole sectors, to be read or written at
// once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "format.h"
#include "media/block_file.h"
#include "media/block_queue.h"

namespace holdfast {

// Sectors of files (or units of several), gathered into few long ranges that lie one behind another in a buffer.
class SectorRuns {
 public:
  SectorRuns(const SectorBuffer& buffer, std::size_t gap_bytes, std::size_t unit_bytes = format::sector_bytes,
             std::size_t most_runs = std::numeric_limits<std::size_t>::max())
      : buffer_(buffer), gap_bytes_(gap_bytes), unit_bytes_(unit_bytes), most_runs_(most_runs) {}

  // Where these bytes of `file` are going to lie, or null when there is no room left. Offsets of a file ascend.
  std::byte* place(const BlockFile& file, std::uint64_t offset, std::size_t bytes) {
    const std::uint64_t begin = offset / unit_bytes_ * unit_bytes_;
    const std::uint64_t end = format::align_up(offset + bytes, unit_bytes_);
    if (!joins(file, begin, end)) {
      if (runs_.size() == most_runs_ || used_bytes_ + (end - begin) > buffer_.size()) return nullptr;
      runs_.push_back({&file, begin, end - begin, buffer_.data() + used_bytes_});
      used_bytes_ += end - begin;
    }
    BlockRead& run = runs_.back();
    if (const std::uint64_t run_end = run.offset + run.bytes; end > run_end) {
      if (used_bytes_ + (end - run_end) > buffer_.size()) return nullptr;
      run.bytes += end - run_end;
      used_bytes_ += end - run_end;
    }
    return run.dst + (offset - run.offset);
  }

  std::span<const BlockRead> reads() const { return runs_; }
  std::vector<BlockWrite> writes() const {
    std::vector<BlockWrite> writes;
    for (const BlockRead& run : runs_) writes.push_back({run.file, run.offset, run.bytes, run.dst});
    return writes;
  }
  std::size_t used_bytes() const { return used_bytes_; }

 private:
  static constexpr std::size_t longest_run_bytes = std::size_t{1} << 20;

  bool joins(const BlockFile& file, std::uint64_t begin, std::uint64_t end) const {
    if (runs_.empty() || runs_.back().file != &file) return false;
    const std::uint64_t run_end = runs_.back().offset + runs_.back().bytes;
    return end <= run_end || (begin <= run_end + gap_bytes_ && runs_.back().bytes < longest_run_bytes);
  }

  const SectorBuffer& buffer_;
  std::size_t gap_bytes_;
  std::size_t unit_bytes_;
  std::size_t most_runs_;
  std::size_t used_bytes_ = 0;
  std::vector<BlockRead> runs_;
};

}  // namespace holdfast

#include "commit/dense_copy.h"

#include <algorithm>

#include "base/checksum.h"
#include "base/error.h"
#include "commit/dense_slots.h"
#include "layout/pool_files.h"

namespace holdfast {
namespace {

// A writer may take the slot away while it is being read; the other slot is newer then. A few turns are plenty: a slot
// stays whole for at least a step.
constexpr int turns = 100;

}  // namespace

std::optional<DenseCopy> copy_newest_dense(Medium& medium, const Superblock& superblock, bool commits_by_record,
                                           std::uint64_t last) {
  for (int turn = 0; turn < turns; ++turn) {
    DenseSlots slots(medium, open_dense_files(medium, false), superblock.identity());
    const auto commit = superblock.read_commit();
    const std::uint64_t newest = commits_by_record ? commit.step : every_step;
    try {
      slots.load(commit.epoch, newest, false);
    } catch (const Error&) {
      if (turn + 1 == turns) throw;
      continue;  // committed between the two reads
    }
    const auto state = slots.newest(std::min(newest, last));
    if (!state) {
      if (commit.step == 0 || newest == every_step || last != every_step || turn + 1 == turns) return std::nullopt;
      continue;
    }
    DenseCopy copy{state->header,
                   {state->structure.begin(), state->structure.end()},
                   {state->tensors.begin(), state->tensors.end()}};
    std::uint32_t crc = crc32c(superblock.identity().seed(), copy.structure.data(), copy.structure.size());
    const std::byte zeros[format::line_bytes] = {};
    crc = crc32c(crc, zeros, format::line_up(copy.structure.size()) - copy.structure.size());
    crc = crc32c(crc, copy.tensors.data(), copy.tensors.size());
    if (crc == copy.header.payload_crc) return copy;
  }
  return std::nullopt;
}

std::vector<StepMark> dense_marks_of(Medium& medium, const Superblock& superblock, bool commits_by_record) {
  for (int turn = 1;; ++turn) {
    DenseSlots slots(medium, open_dense_files(medium, false), superblock.identity());
    const auto commit = superblock.read_commit();
    try {
      slots.load(commit.epoch, commits_by_record ? commit.step : every_step, false);
      return slots.marks();
    } catch (const Error&) {
      if (turn == turns) throw;
    }
  }
}

}  // namespace holdfast

// Dense copy: a pool's newest dense state, copied whole while a writer may be at work on the slots.
//
// Invariants
// - What is returned holds its checksum, taken over the copy.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "base/format.h"
#include "base/step_mark.h"
#include "layout/superblock.h"
#include "media/medium.h"

namespace holdfast {

struct DenseCopy {
  format::DenseHeader header;
  std::vector<std::byte> structure;
  std::vector<std::byte> tensors;
};

// Nothing where there is no dense state. commits_by_record: a state of a step after the newest commit record's does not
// count.
std::optional<DenseCopy> copy_newest_dense(Medium& medium, const Superblock& superblock, bool commits_by_record);

// The steps of all dense states that count, likewise.
std::vector<StepMark> dense_marks_of(Medium& medium, const Superblock& superblock, bool commits_by_record);

}  // namespace holdfast

// Dense copy: a pool's dense state, copied whole while a writer may be at work on the slots.
//
// Invariants
// - What is returned holds its checksum, taken over the copy.
#pragma once

#include <cstddef>
#include <cstdint>
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

constexpr std::uint64_t every_step = ~std::uint64_t{0};

// The newest dense state of steps up to `last`; nothing where there is none. commits_by_record: a state of a step after
// the newest commit record's does not count.
std::optional<DenseCopy> copy_newest_dense(Medium& medium, const Superblock& superblock, bool commits_by_record,
                                           std::uint64_t last = every_step);

// The steps of all dense states that count, likewise.
std::vector<StepMark> dense_marks_of(Medium& medium, const Superblock& superblock, bool commits_by_record);

}  // namespace holdfast

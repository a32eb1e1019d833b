// Recovery: which step a pool goes back to.
//
// Invariants
// - It reads and checks, and writes nothing.
// - exact: to the newest dense state, so that all is of one step. relaxed: the newest rows, beside an older dense
//   state; but where rows in place were already on their way back to a step, exactly to it.
#pragma once

#include <cstdint>
#include <optional>

#include "base/step_mark.h"
#include "commit/dense_slots.h"
#include "layout/superblock.h"

namespace holdfast {

enum class Recovery { exact, relaxed };

struct RecoveryPlan {
  StepMark rows;  // the newest step whose rows are all there
  StepMark target;  // where training goes on: the dense state's step (exact) or the rows' (relaxed)
  std::optional<DenseState> dense;  // the newest at or before it
};

// The step to which rows in place were being taken back when a life ended that had not begun its first step: rows that
// later steps updated may be of either, so the commit record promises too much. Nothing otherwise.
std::optional<std::uint64_t> unfinished_return(const Superblock& superblock);

// Throws corrupted where a record or slot that is needed does not hold. `dense` is loaded here.
RecoveryPlan plan_recovery(const Superblock& superblock, const StepMark& rows, DenseSlots& dense, Recovery mode);

}  // namespace holdfast

// Recovery: which step a pool goes back to, and the way there.
//
// Invariants
// - plan_recovery reads and checks everything that the way needs, and writes nothing.
// - Records are undone newest first, so a row that several steps overwrote ends with the oldest before-image.
// - Undoing needs no space: a row that was touched has its pages since then, and one that was not is only marked so.
// - Undoing twice is undoing once: a crash on the way starts over.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "dense_slots.h"
#include "in_place_store.h"
#include "superblock.h"
#include "undo_log.h"

namespace holdfast {

enum class Recovery { exact, relaxed };

struct RecoveryPlan {
  format::CommitRecord commit;      // the newest one: rows are at its step, or on the way to the next
  std::uint64_t step;               // where training goes on: the dense state's step (exact) or the rows' (relaxed)
  std::uint64_t cursor;
  std::uint64_t row_updates;
  std::uint64_t log_head;           // the end of the newest record
  std::vector<Record> undo;         // newest first
  std::optional<DenseState> dense;  // the newest at or before `step`
};

// Throws corrupted where a record or slot that is needed does not hold. `dense` is loaded here.
RecoveryPlan plan_recovery(const Superblock& superblock, const UndoLog& log, DenseSlots& dense,
                           const InPlaceStore& store, Recovery mode);

// Writes the before-images home, in the order given. Returns how many rows that were.
std::uint64_t undo_records(const std::vector<Record>& records, InPlaceStore& store, Medium& medium);

}  // namespace holdfast

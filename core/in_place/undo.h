// Undo: taking rows home back to an earlier step, by the undo log's before-images.
//
// Invariants
// - plan_undo reads and checks everything that the way needs, and writes nothing.
// - Records are undone newest first, so a row that several steps overwrote ends with the oldest before-image.
// - Undoing needs no space: a row that was touched has its pages since then, and one that was not is only marked so.
// - Undoing twice is undoing once: a crash on the way starts over.
#pragma once

#include <cstdint>
#include <vector>

#include "in_place/in_place_store.h"
#include "in_place/undo_log.h"
#include "layout/superblock.h"

namespace holdfast {

struct UndoPlan {
  std::uint64_t log_head;       // the end of the newest record
  std::vector<Record> records;  // newest first
};

// A record's bytes hold their checksum; this says that they also make sense for the tables. Throws corrupted.
void check_record(const Record& record, const UndoLog& log, const InPlaceStore& store);

// The way from what the pool's newest life left behind to the end of `step`. Throws corrupted where a record that is
// needed does not hold.
UndoPlan plan_undo(const Superblock& superblock, const UndoLog& log, const InPlaceStore& store, std::uint64_t step);

// Writes the before-images home, in the order given. Returns how many rows that were.
std::uint64_t undo_records(const std::vector<Record>& records, InPlaceStore& store, Medium& medium);

}  // namespace holdfast

// Slot map: which slot of a scratchpad each row of one table is in.
//
// Invariants
// - A row is in one slot at most. What is found is what was inserted last, and not erased.
// - Where every row has room, the map is an array over the rows: a lookup is one load, and rows in order are found in
//   order. Elsewhere it is a hash of the rows that are in.
// - Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/huge_array.h"
#include "rows/row_index.h"

namespace holdfast {

class SlotMap {
 public:
  SlotMap() : is_direct_(false) {}
  // Of rows [first, first + num_rows), all of which have room.
  SlotMap(std::uint64_t first, std::uint64_t num_rows) : is_direct_(true), first_(first), slots_(num_rows) {}

  std::optional<std::uint32_t> find(std::uint64_t row) const {
    if (is_direct_) {
      const std::uint32_t slot_plus_one = slots_[row - first_];
      if (slot_plus_one == 0) return std::nullopt;
      return slot_plus_one - 1;
    }
    const auto found = hashed_.find(row);
    if (!found) return std::nullopt;
    return static_cast<std::uint32_t>(*found);
  }
  void insert(std::uint64_t row, std::uint32_t slot) {
    if (is_direct_) {
      slots_[row - first_] = slot + 1;
    } else {
      hashed_.insert(row, slot);
    }
  }
  void erase_if_equal(std::uint64_t row, std::uint32_t slot) {
    if (!is_direct_) {
      hashed_.erase_if_equal(row, slot);
    } else if (slots_[row - first_] == slot + 1) {
      slots_[row - first_] = 0;
    }
  }

  // See RowIndex.
  void prefetch(std::uint64_t row) const {
    if (is_direct_) {
      __builtin_prefetch(&slots_[row - first_]);
    } else {
      hashed_.prefetch(row);
    }
  }

 private:
  bool is_direct_;
  std::uint64_t first_ = 0;
  HugeArray<std::uint32_t> slots_;  // one more than a row's slot; 0: it is in none
  RowIndex hashed_;
};

}  // namespace holdfast

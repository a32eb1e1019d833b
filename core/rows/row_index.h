// Row index: of one table, where in the row log each row's newest version lies. Rows whose newest version is at home
// are not in it.
//
// Invariants
// - A slot takes 10 bytes: 40 bits of row, 40 bits of location. The table is kept between 55% and 72% full while it
//   grows (below 64 entries it is not), so an entry takes 14 to 18 bytes, 16 on average. It never shrinks.
// - Open addressing with linear probing and no tombstones: erasing moves later entries of the run back.
// - What it answers, and the memory it takes, is a function of the calls made; there is no random seed.
// - Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "base/huge_array.h"

namespace holdfast {

class RowIndex {
 public:
  static constexpr std::uint64_t end_row = std::uint64_t{1} << 40;  // rows are below
  static constexpr std::uint64_t end_location = (std::uint64_t{1} << 40) - 1;  // locations are below

  RowIndex();

  // Where `row` is; replaces what was known of it.
  void insert(std::uint64_t row, std::uint64_t location);
  std::optional<std::uint64_t> find(std::uint64_t row) const;
  // Asks for the memory that a call for `row` is going to read, so that misses of the processor's caches overlap.
  void prefetch(std::uint64_t row) const {
    const Slot* slot = slots_.data() + first_slot(row);
    __builtin_prefetch(slot);
    __builtin_prefetch(slot + run_slots);
  }
  // All entries, some slots at a time: those of `count` slots from `slot` on, or of as many as there are. Returns the
  // slot after them, num_slots() at the end. Where rows were inserted meanwhile, and num_slots is what it was, none of
  // the others is left out.
  template <class Visit>
  std::size_t visit(std::size_t slot, std::size_t count, const Visit& visit_entry) const {
    const std::size_t end = std::min(slots_.size(), slot + count);
    for (; slot < end; ++slot) {
      const Entry entry = unpack(slots_[slot]);
      if (entry.location_plus_one != 0) visit_entry(entry.row, entry.location_plus_one - 1);
    }
    return end;
  }
  std::size_t num_slots() const { return slots_.size(); }
  // Forgets `row` if that is where it is still said to be.
  void erase_if_equal(std::uint64_t row, std::uint64_t location);
  // Forgets the rows of whose location that holds.
  void erase_if(const std::function<bool(std::uint64_t location)>& is_forgotten);
  void clear();

  // All of them, in no order.
  std::vector<std::uint64_t> rows() const;
  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const { return slots_.size() * sizeof(Slot); }

 private:
  struct Slot {  // all zeros: empty
    std::uint8_t bytes[10];
  };
  struct Entry {
    std::uint64_t row;
    std::uint64_t location_plus_one;
  };
  static_assert(sizeof(Slot) == 10);
  static constexpr std::size_t run_slots = 3;  // that a search looks at, as a rule; they may end in the next line

  static Entry unpack(const Slot& slot) {
    std::uint64_t low;
    std::uint16_t high;
    std::memcpy(&low, slot.bytes, sizeof(low));
    std::memcpy(&high, slot.bytes + sizeof(low), sizeof(high));
    return {low & (end_row - 1), low >> 40 | std::uint64_t{high} << 24};
  }
  static Slot pack(const Entry& entry);
  std::size_t first_slot(std::uint64_t row) const;
  std::size_t after(std::size_t slot) const { return slot + 1 == slots_.size() ? 0 : slot + 1; }
  // The slot of `row`, or the empty one where it would go.
  std::size_t slot_of(std::uint64_t row) const;
  void close_gap(std::size_t gap);
  void grow();

  HugeArray<Slot> slots_;
  std::size_t size_ = 0;
};

// In a loop over i of rows[i], one of these calls for each that looks it up in `map`: prefetches for a call further on.
template <class Map>
void prefetch_ahead(const Map& map, const std::uint64_t* rows, std::size_t i, std::size_t num_rows) {
  constexpr std::size_t distance = 24;
  if (i + distance < num_rows) map.prefetch(rows[i + distance]);
}

}  // namespace holdfast

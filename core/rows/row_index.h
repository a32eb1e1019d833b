// Row index: of one table, where in the row log each row's newest version lies. Rows whose newest version is at home
// are not in it.
//
// Invariants
// - A slot takes 10 bytes: 40 bits of row, 40 bits of location. The table is kept between 55% and 72% full while it
//   grows (below 64 entries it is not), so an entry takes 14 to 18 bytes, 16 on average. It never shrinks.
// - It grows a few slots at each row that is new, so that no call takes long. Slots go by their hashes' order in either
//   table, so those that have moved are a stretch of the old one, whose memory is given back, and a stretch of the new
//   one has been touched: both take no more than the larger one would. A hash says which of the two a row is in.
// - Open addressing with linear probing and no tombstones: erasing moves later entries of the run back.
// - What it answers, and the memory it takes, is a function of the calls made; there is no random seed.
// - Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
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
    const HugeArray<Slot>& slots = slots_of(row);
    const Slot* slot = slots.data() + first_slot(slots, row);
    __builtin_prefetch(slot);
    __builtin_prefetch(slot + run_slots);
  }
  // All entries, some slots at a time: those of `count` slots from `slot` on, or of as many as there are. Returns the
  // slot after them, num_slots() at the end. Where rows were inserted meanwhile, and num_slots is what it was, none of
  // the others is left out; none is seen twice, unless it grows.
  template <class Visit>
  std::size_t visit(std::size_t slot, std::size_t count, const Visit& visit_entry) const {
    const std::size_t end = std::min(num_slots(), slot + count);
    for (; slot < end; ++slot) {
      const Entry entry = unpack(slot < old_.size() ? old_[slot] : slots_[slot - old_.size()]);
      if (entry.location_plus_one != 0) visit_entry(entry.row, entry.location_plus_one - 1);
    }
    return end;
  }
  std::size_t num_slots() const { return old_.size() + slots_.size(); }
  bool is_growing() const { return old_.size() != 0; }
  // Moves the entries of so many slots, and of some more.
  void grow_on(std::size_t count);
  // Forgets `row` if that is where it is still said to be.
  void erase_if_equal(std::uint64_t row, std::uint64_t location);
  // Forgets rows of whose location that holds, some slots at a time, as `visit` goes through them; it does not grow.
  template <class IsForgotten>
  std::size_t erase_if(std::size_t slot, std::size_t count, const IsForgotten& is_forgotten) {
    const std::size_t end = std::min(slots_.size(), slot + count);
    while (slot < end) slot += erase_in_run(slot, is_forgotten);
    return std::min(slot, slots_.size());
  }
  void clear();

  // All of them, in no order.
  std::vector<std::uint64_t> rows() const;
  std::size_t size() const { return size_; }
  std::size_t memory_bytes() const;

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
  static std::size_t first_slot(const HugeArray<Slot>& slots, std::uint64_t row);
  static std::size_t after(const HugeArray<Slot>& slots, std::size_t slot) {
    return slot + 1 == slots.size() ? 0 : slot + 1;
  }
  // Those that have `row`, if any do.
  const HugeArray<Slot>& slots_of(std::uint64_t row) const { return !is_growing() || has_moved(row) ? slots_ : old_; }
  bool has_moved(std::uint64_t row) const;
  // The slot of `row`, or the empty one where it would go.
  static std::size_t slot_of(const HugeArray<Slot>& slots, std::uint64_t row);
  static void close_gap(const HugeArray<Slot>& slots, std::size_t gap);
  void begin_to_grow();

  // Of the slots from there up to an empty one, all of which that is asked for: what stays finds its place again. Returns
  // how many slots that were, at least one.
  template <class IsForgotten>
  std::size_t erase_in_run(std::size_t slot, const IsForgotten& is_forgotten) {
    kept_.clear();
    std::size_t num_forgotten = 0;
    std::size_t num_slots = 0;
    for (std::size_t at = slot;; at = after(slots_, at), ++num_slots) {
      const Entry entry = unpack(slots_[at]);
      if (entry.location_plus_one == 0) break;
      if (is_forgotten(entry.location_plus_one - 1)) {
        ++num_forgotten;
      } else {
        kept_.push_back(slots_[at]);
      }
    }
    if (num_forgotten != 0) {
      for (std::size_t i = 0, at = slot; i < num_slots; ++i, at = after(slots_, at)) slots_[at] = Slot{};
      for (const Slot& kept : kept_) slots_[slot_of(slots_, unpack(kept).row)] = kept;
      size_ -= num_forgotten;
    }
    return num_slots + 1;
  }

  HugeArray<Slot> slots_;
  HugeArray<Slot> old_;  // while it grows: where the rows are that have not moved yet
  std::size_t old_start_ = 0;  // the first slot that has moved; it was empty
  std::size_t num_moved_ = 0;  // slots from there on
  std::size_t kept_back_ = 0;  // of these, the first whose memory was not given back
  std::vector<Slot> kept_;  // of a run
  std::size_t size_ = 0;
};

// In a loop over i of rows[i], one of these calls for each that looks it up in `map`: prefetches for a call further on.
template <class Map>
void prefetch_ahead(const Map& map, const std::uint64_t* rows, std::size_t i, std::size_t num_rows) {
  constexpr std::size_t distance = 24;
  if (i + distance < num_rows) map.prefetch(rows[i + distance]);
}

}  // namespace holdfast

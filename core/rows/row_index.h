// Row index: of one table, where in the row log each row's newest version lies. Rows whose newest version is at home
// are not in it.
//
// Invariants
// - A slot takes 10 bytes: 40 bits of row, 40 bits of location. The table is kept between 55% and 72% full while it
//   grows (below 64 entries it is not), so an entry takes 14 to 18 bytes, 16 on average. How it grows: growing_table.h.
// - What it answers, and the memory it takes, is a function of the calls made; there is no random seed.
// - Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "base/counter_rng.h"
#include "base/growing_table.h"

namespace holdfast {

class RowIndex {
 public:
  static constexpr std::uint64_t end_row = std::uint64_t{1} << 40;  // rows are below
  static constexpr std::uint64_t end_location = (std::uint64_t{1} << 40) - 1;  // locations are below

  // Where `row` is; replaces what was known of it.
  void insert(std::uint64_t row, std::uint64_t location) { entries_.insert(pack({row, location + 1})); }
  std::optional<std::uint64_t> find(std::uint64_t row) const {
    const Slot* const slot = entries_.find(row);
    if (slot == nullptr) return std::nullopt;
    return unpack(*slot).location_plus_one - 1;
  }
  // Asks for the memory that a call for `row` is going to read, so that misses of the processor's caches overlap.
  [[gnu::always_inline]] void prefetch(std::uint64_t row) const { entries_.prefetch(entries_.hash(row)); }
  // As GrowingTable's, with a row and its location.
  template <class Visit>
  std::size_t visit(std::size_t slot, std::size_t count, const Visit& visit_entry) const {
    return entries_.visit(slot, count, [&](const Slot& found) {
      const Entry entry = unpack(found);
      visit_entry(entry.row, entry.location_plus_one - 1);
    });
  }
  std::size_t num_slots() const { return entries_.num_slots(); }
  bool is_growing() const { return entries_.is_growing(); }
  // Moves the entries of so many slots, and of some more.
  void grow_on(std::size_t count) { entries_.grow_on(count); }
  // Forgets `row` if that is where it is still said to be.
  void erase_if_equal(std::uint64_t row, std::uint64_t location) {
    entries_.erase(row, [&](const Slot& slot) { return unpack(slot).location_plus_one == location + 1; });
  }
  // Forgets rows of whose location that holds, some slots at a time, as `visit` goes through them; it does not grow.
  template <class IsForgotten>
  std::size_t erase_if(std::size_t slot, std::size_t count, const IsForgotten& is_forgotten) {
    return entries_.erase_if(slot, count,
                             [&](const Slot& found) { return is_forgotten(unpack(found).location_plus_one - 1); });
  }
  void clear() { entries_.clear(); }

  // All of them, in no order.
  std::vector<std::uint64_t> rows() const {
    std::vector<std::uint64_t> rows;
    rows.reserve(size());
    visit(0, num_slots(), [&](std::uint64_t row, std::uint64_t) { rows.push_back(row); });
    return rows;
  }
  std::size_t size() const { return entries_.size(); }
  std::size_t memory_bytes() const { return entries_.memory_bytes(); }

 private:
  struct Slot {  // all zeros: empty
    std::uint8_t bytes[10];
  };
  struct Entry {
    std::uint64_t row;
    std::uint64_t location_plus_one;
  };
  static_assert(sizeof(Slot) == 10);

  static Entry unpack(const Slot& slot) {
    std::uint64_t low;
    std::uint16_t high;
    std::memcpy(&low, slot.bytes, sizeof(low));
    std::memcpy(&high, slot.bytes + sizeof(low), sizeof(high));
    return {low & (end_row - 1), low >> 40 | std::uint64_t{high} << 24};
  }
  static Slot pack(const Entry& entry) {
    const std::uint64_t low = entry.row | entry.location_plus_one << 40;
    const auto high = static_cast<std::uint16_t>(entry.location_plus_one >> 24);
    Slot slot;
    std::memcpy(slot.bytes, &low, sizeof(low));
    std::memcpy(slot.bytes + sizeof(low), &high, sizeof(high));
    return slot;
  }

  struct Policy {
    using Slot = RowIndex::Slot;
    using Key = std::uint64_t;
    static constexpr std::size_t full_percent = 72;
    static constexpr std::size_t grown_percent = 55;
    static constexpr std::size_t group_slots = 1;
    static constexpr std::size_t run_slots = 3;

    static std::uint64_t hash(std::uint64_t row) { return counter_rng::mix64(row + 1); }
    static std::uint64_t key_of(const Slot& slot) { return unpack(slot).row; }
    static bool is_empty(const Slot& slot) { return unpack(slot).location_plus_one == 0; }
  };

  GrowingTable<Policy> entries_;
};

// In a loop over i of rows[i], one of these calls for each that looks it up in `map`: prefetches for a call further on.
// Inlined by order, see GrowingTable::prefetch.
template <class Map>
[[gnu::always_inline]] inline void prefetch_ahead(const Map& map, const std::uint64_t* rows, std::size_t i,
                                                  std::size_t num_rows) {
  constexpr std::size_t distance = 24;
  if (i + distance < num_rows) map.prefetch(rows[i + distance]);
}

}  // namespace holdfast

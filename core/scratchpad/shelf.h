// Shelf: a scratchpad's slots for rows of one size, and which of their rows leaves when there is no free slot.
//
// Rows are evicted in the manner of S3-FIFO (Yang et al., SOSP 2023), without its ghosts: a row comes in on trial. Whoever
// is asked for again while on trial moves to the main queue when its turn comes, the others go. In the main queue every
// row that was asked for again since its last turn has another turn. So a use of a row costs one store, and rows that are
// wanted once do not push out those that are wanted now and then.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "base/huge_array.h"
#include "kernels/kernels.h"
#include "rows/row_table.h"
#include "scratchpad/slot_map.h"

namespace holdfast {

// Whether a slot that was given to a row has its values. under_way: whoever gave it brings them; left: or a sweep does,
// until that one claims it.
enum class Filling : std::uint8_t { under_way, left, filled };

struct Shelf {
  // num_rows: of all tables whose rows have this size.
  Shelf(const RowTable& table, std::size_t num_slots, std::uint64_t num_rows);

  SlotRows rows() const { return {weights.data(), reinterpret_cast<float*>(state.data())}; }

  static constexpr std::uint64_t kept = ~std::uint64_t{0};  // a use that never ends
  static constexpr unsigned lives_bits = 2;
  static constexpr std::uint64_t most_lives = (1 << lives_bits) - 1;

  std::uint64_t newest_hold(std::uint32_t slot) const { return use[slot] >> lives_bits; }
  std::uint64_t lives(std::uint32_t slot) const { return use[slot] & most_lives; }
  void set_use(std::uint32_t slot, std::uint64_t order, std::uint64_t lives_left) {
    use[slot] = order << lives_bits | lives_left;
  }
  void use_again(std::uint32_t slot, std::uint64_t order) {
    if (use[slot] != kept) set_use(slot, order, std::min(lives(slot) + 1, most_lives));
  }

  static std::uint64_t key_of(std::uint32_t table, std::uint64_t row) { return table * RowIndex::end_row + row; }
  void set_key(std::uint32_t slot, std::uint32_t table, std::uint64_t row) { key[slot] = key_of(table, row); }
  // On trial, where rows are evicted at all.
  void note_arrival(std::uint32_t slot, std::uint32_t table, std::uint64_t row) {
    if (holds_all) return;
    set_key(slot, table, row);
    trial.push_back(slot);
  }
  std::uint32_t table_of(std::uint32_t slot) const { return static_cast<std::uint32_t>(key[slot] / RowIndex::end_row); }
  std::uint64_t row_of(std::uint32_t slot) const { return key[slot] % RowIndex::end_row; }

  // A slot whose row has left, also the map of its table; nothing where holds from `oldest_live` on need them all.
  std::optional<std::uint32_t> evict(std::uint64_t oldest_live, std::span<SlotMap> slot_of_table);

  const RowSpec spec;  // of one of the tables: sizes are those of all of them
  const std::size_t weight_bytes;
  const std::size_t state_bytes;
  const std::size_t num_slots;
  const bool holds_all;  // every row has room: none is ever evicted, and queues and keys are not kept
  const HugeArray<std::byte> weights;
  const HugeArray<std::byte> state;
  std::size_t num_used = 0;  // slots below have a row
  const HugeArray<std::uint64_t> key;  // table and row
  const HugeArray<std::uint64_t> use;  // its newest hold, and its lives in the low bits
  const HugeArray<std::atomic<Filling>> filling;
  std::deque<std::uint32_t> trial;
  std::deque<std::uint32_t> main;

 private:
  void prefetch_turns(const std::deque<std::uint32_t>& queue, std::span<SlotMap> slot_of_table) const;
};

// What wants a part of some memory: so many units of so many bytes at most.
struct Want {
  std::uint64_t most;
  std::uint64_t unit_bytes;
};
// How many units each gets of `bytes`: those that need least all that they want, the others the same bytes.
std::vector<std::uint64_t> share_out(std::uint64_t bytes, std::span<const Want> wants);

// How a scratchpad's memory is shared out.
struct Shelving {
  struct Size {
    const RowTable* table;  // one of those whose rows have this size
    std::uint64_t num_rows;  // of all of them
    std::uint64_t num_slots;

    std::uint64_t row_bytes() const { return table->weight_bytes() + table->state_bytes(); }
  };
  std::vector<Size> shelves;
  std::vector<std::size_t> shelf_of_table;
};

// As many slots as fit in `bytes`, everything counted. The shelves that need least get all that they need, the others the
// same: small tables are wanted in every batch. Keeps pointers to the tables.
Shelving shelve(const std::vector<RowTable>& tables, std::uint64_t bytes);
// The fewest bytes that give each shelf as many slots as it wants.
std::uint64_t least_bytes(const std::vector<RowTable>& tables, const std::vector<std::uint64_t>& wanted);

}  // namespace holdfast

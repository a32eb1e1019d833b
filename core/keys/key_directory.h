// Key directory: which row of a table has which key. Of a table whose ids are keys, 64 bits of anything.
//
// Invariants
// - Of a table in shards a key's row lies in the shard that its hash says (key_shards.h), for good, and a directory has
//   the keys of those shards that its pool's writer owns. Nothing else depends on shards.
// - Two keys never have the same row. A key keeps its row until it is left behind (key_ages.h); some time later the row is
//   free for another one. That is never while a batch that wants the key may be on its way: planning puts off the end of a
//   key by `steps_ahead`, and who captures a batch that was planned earlier than that asks for its rows again (`keep`).
// - Rows are handed out in the order in which `place` meets new keys: a function of its calls, of those of `pass`, and of
//   what was there when the pool was opened. Nothing that a row holds depends on which row it is (initial values and rounding go by the key).
// - The directory is an index, in memory. What says for good whose a row is, is the record at the end of its state
//   (KeyRecord, kernels.h), which the update of a step writes with the row; a directory is filled from these when the pool
//   is opened. A key that was placed, and whose step never came, keeps its row until then.
// - Hashes are seeded by the pool's identity, so that nobody who chooses keys chooses where they go.
// - Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/counter_rng.h"
#include "base/growing_table.h"
#include "base/huge_array.h"
#include "kernels/kernels.h"
#include "keys/key_shards.h"
#include "keys/living_keys.h"

namespace holdfast {

class KeyDirectory {
 public:
  static constexpr std::int64_t no_row = -1;
  static constexpr std::uint64_t steps_ahead = 32;

  // table: its name, for messages. shards: the rows that there are for keys, all of them at most format::max_keyed_rows.
  // policy: which are left behind.
  KeyDirectory(std::string table, KeyShards shards, std::uint64_t seed, const KeyPolicy& policy = {});

  // What a pool holds when it is opened: rows that an update wrote, ascending, and their records. Then `place` begins.
  // Throws corrupted where a key lies in a shard that is not its own.
  void add(std::span<const std::uint64_t> rows, std::span<const KeyRecord> records);

  // The rows of keys; a new key gets the next free one. Throws full where there is none left, and data where a key is of
  // no shard that is here: the keys before it have theirs. Returns the step that `pass` told last: the batch may be captured up to steps_ahead later.
  std::uint64_t place(std::span<const std::int64_t> keys, std::int64_t* rows);
  // The keys have these rows still, and a batch of step `step` is going to update them. Returns whether that is so.
  bool keep(std::span<const std::uint64_t> keys, std::span<const std::uint64_t> rows, std::uint64_t step);
  // These rows, ascending, have keys of these levels now (KeyStay), where levels are told apart.
  void note_levels(std::span<const std::uint64_t> rows, std::span<const std::uint8_t> levels);
  // Step `step` is over; other keys than these are left behind.
  void pass(std::uint64_t step, LivingKeys living);
  // The rows of keys that may have none: no_row. Throws data as `place` does.
  void find(std::span<const std::int64_t> keys, std::int64_t* rows) const;

  std::uint64_t seed() const { return seed_; }
  std::size_t num_keys() const;
  // How many rows were ever handed out, or were found when the pool was opened.
  std::uint64_t num_rows_used() const;
  std::size_t memory_bytes() const;

 private:
  struct Slot {
    std::uint64_t key;
    std::uint32_t row_plus_one;  // 0: empty
    std::uint32_t step;  // no update of the key is newer
  };
  struct Policy {
    using Slot = KeyDirectory::Slot;
    using Key = std::uint64_t;
    // 20 to 25 bytes a key, 22 on average.
    static constexpr std::size_t full_percent = 80;
    static constexpr std::size_t grown_percent = 64;
    static constexpr std::size_t group_slots = 4;
    static constexpr std::size_t run_slots = 0;  // for_blocks asks for the line behind

    std::uint64_t seed = 0;

    std::uint64_t hash(std::uint64_t key) const { return counter_rng::absorb(seed, key); }
    static std::uint64_t key_of(const Slot& slot) { return slot.key; }
    static bool is_empty(const Slot& slot) { return slot.row_plus_one == 0; }
  };

  // Rows of one shard.
  struct Piece {
    std::uint64_t next_row;  // those from here on were never handed out
    std::uint64_t end;
    std::vector<std::uint32_t> free;  // of those before, without a key; the last one is handed out first
    HugeArray<std::uint8_t> levels;  // of its rows' keys, where they are told apart

    // Those before `row` are free.
    void skip_to(std::uint64_t row) {
      while (next_row < row) free.push_back(static_cast<std::uint32_t>(next_row++));
    }
  };

  // Calls visit(i, slot) for each of the keys, with its slot or an empty one, and after each block of them, whose end it
  // says, end_block(end), which may change the table.
  template <class Visit, class EndBlock>
  void for_blocks(std::span<const std::int64_t> keys, const Visit& visit, const EndBlock& end_block) const;
  // Throws data.
  Piece& piece_of(std::uint64_t key);
  // Of a row in piece p.
  std::uint8_t& level_of(std::size_t p, std::uint64_t row) { return pieces_[p].levels[row - shards_.pieces[p].first]; }
  bool is_left_behind(const Slot& slot);
  [[noreturn]] void refuse_foreign(std::uint64_t key) const;
  [[noreturn]] void refuse_step(std::uint64_t step) const;
  std::uint32_t take_row(std::uint64_t key);
  std::uint32_t row_of_new(std::uint64_t key, std::uint32_t step);
  // Frees rows of keys that were left behind, looking at so many slots.
  void free_rows(std::size_t num_slots);

  const std::string table_;
  const KeyShards shards_;
  const std::uint64_t seed_;
  mutable std::mutex mutex_;
  GrowingTable<Policy> slots_;
  std::vector<Piece> pieces_;  // of the shards that are here
  const bool leaves_keys_;
  const bool has_levels_;
  std::uint64_t step_ = 0;
  LivingKeys living_;
  std::size_t hand_ = 0;  // the slot that is looked at next
  std::vector<Slot> left_behind_;  // found, and on their way out
};

}  // namespace holdfast

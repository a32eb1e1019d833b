#include "keys/key_directory.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/error.h"

namespace holdfast {
namespace {

constexpr std::size_t prefetch_distance = 32;  // a power of two
// Looked at for each new key: where as many keys are left behind as come, so many rows for each that is found lie idle.
constexpr std::size_t slots_a_new_key = 8;

// Calls body(i, key, hash) for each of the keys, whose slots are asked for some calls earlier.
template <class Slots, class Body>
void for_keys(const Slots& slots, std::span<const std::int64_t> keys, const Body& body) {
  std::array<std::uint64_t, prefetch_distance> hashes;  // of the keys that come next
  const auto key_at = [&](std::size_t i) { return static_cast<std::uint64_t>(keys[i]); };
  const auto ask_for = [&](std::size_t i) {
    const std::uint64_t hash = hashes[i % prefetch_distance] = slots.hash(key_at(i));
    slots.prefetch(hash);
  };
  for (std::size_t i = 0; i < std::min(prefetch_distance, keys.size()); ++i) ask_for(i);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = hashes[i % prefetch_distance];
    if (i + prefetch_distance < keys.size()) ask_for(i + prefetch_distance);
    body(i, key_at(i), hash);
  }
}

}  // namespace

KeyDirectory::KeyDirectory(std::string table, KeyShards shards, std::uint64_t seed, const KeyPolicy& policy)
    : table_(std::move(table)),
      shards_(std::move(shards)),
      seed_(seed),
      slots_(Policy{seed}),
      leaves_keys_(policy.leaves_keys()),
      has_levels_(leaves_keys_ && policy.stay.counts_updates()) {
  for (const KeyShards::Piece& piece : shards_.pieces) {
    HugeArray<std::uint8_t> levels(has_levels_ ? piece.num_rows : 0);
    pieces_.push_back({piece.first, piece.first + piece.num_rows, {}, std::move(levels)});
  }
}

// Of two rows with one key, the one that was updated later is its row: the other was given up in between.
void KeyDirectory::add(std::span<const std::uint64_t> rows, std::span<const KeyRecord> records) {
  const std::lock_guard lock(mutex_);
  std::size_t p = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint32_t row = static_cast<std::uint32_t>(rows[i]);
    const KeyRecord& record = records[i];
    while (row >= pieces_[p].end) ++p;
    Piece& piece = pieces_[p];
    piece.skip_to(row);
    piece.next_row = std::uint64_t{row} + 1;
    if (record.updates == 0) {
      piece.free.push_back(row);
      continue;
    }
    if (shards_.piece_of_key(record.key) != p) {
      throw Error(ErrorKind::corrupted, "table '" + table_ + "': row " + std::to_string(row) + " has key " +
                                            std::to_string(static_cast<std::int64_t>(record.key)) +
                                            ", which belongs into another shard");
    }
    if (has_levels_) level_of(p, row) = KeyStay::level_of(record.updates);
    if (Slot* const slot = slots_.find(record.key); slot == nullptr) {
      slots_.insert({record.key, row + 1, record.step});
    } else if (slot->step < record.step) {
      piece.free.push_back(std::exchange(slot->row_plus_one, row + 1) - 1);
      slot->step = record.step;
    } else {
      piece.free.push_back(row);
    }
  }
}

std::uint64_t KeyDirectory::place(std::span<const std::int64_t> keys, std::int64_t* rows) {
  const std::lock_guard lock(mutex_);
  const auto last_step = static_cast<std::uint32_t>(step_ + steps_ahead);
  for_keys(slots_, keys, [&](std::size_t i, std::uint64_t key, std::uint64_t hash) {
    Slot* const slot = slots_.find(key, hash);
    if (slot != nullptr) {
      if (leaves_keys_ && slot->step < last_step) slot->step = last_step;
      rows[i] = std::int64_t{slot->row_plus_one} - 1;
      return;
    }
    if (leaves_keys_) free_rows(slots_a_new_key);
    const std::uint32_t row = take_row(key);
    slots_.insert({key, row + 1, last_step});
    rows[i] = row;
  });
  return step_;
}

bool KeyDirectory::keep(std::span<const std::uint64_t> keys, std::span<const std::uint64_t> rows, std::uint64_t step) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    Slot* const slot = slots_.find(keys[i]);
    if (slot == nullptr || slot->row_plus_one != rows[i] + 1) return false;
    slot->step = std::max(slot->step, static_cast<std::uint32_t>(step));
  }
  return true;
}

void KeyDirectory::note_levels(std::span<const std::uint64_t> rows, std::span<const std::uint8_t> levels) {
  const std::lock_guard lock(mutex_);
  std::size_t p = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint64_t row = rows[i] & ~fresh_bit;
    while (row >= pieces_[p].end) ++p;
    level_of(p, row) = levels[i];
  }
}

void KeyDirectory::pass(std::uint64_t step, LivingKeys living) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  living_ = std::move(living);
}

// The slot's step is no earlier than the record's, now and once the batches that are planned are committed.
bool KeyDirectory::is_left_behind(const Slot& slot) {
  const std::uint64_t row = std::uint64_t{slot.row_plus_one} - 1;
  return !living_.count(row, slot.step, has_levels_ ? level_of(shards_.piece_of_key(slot.key), row) : std::uint8_t{0});
}

// A row may be taken while the table grows: then slots are looked at that have moved, or are skipped this time.
void KeyDirectory::free_rows(std::size_t num_slots) {
  if (hand_ >= slots_.num_slots()) hand_ = 0;
  left_behind_.clear();
  hand_ = slots_.visit(hand_, num_slots, [&](const Slot& slot) {
    if (is_left_behind(slot)) left_behind_.push_back(slot);
  });
  for (const Slot& slot : left_behind_) {
    slots_.erase(slot.key);
    piece_of(slot.key).free.push_back(slot.row_plus_one - 1);
  }
}

void KeyDirectory::find(std::span<const std::int64_t> keys, std::int64_t* rows) const {
  const std::lock_guard lock(mutex_);
  for_keys(slots_, keys, [&](std::size_t i, std::uint64_t key, std::uint64_t hash) {
    const Slot* const slot = slots_.find(key, hash);
    if (slot == nullptr && shards_.piece_of_key(key) == KeyShards::not_here) refuse_foreign(key);
    rows[i] = slot == nullptr ? no_row : std::int64_t{slot->row_plus_one} - 1;
  });
}

KeyDirectory::Piece& KeyDirectory::piece_of(std::uint64_t key) {
  const std::uint32_t piece = shards_.piece_of_key(key);
  if (piece == KeyShards::not_here) refuse_foreign(key);
  return pieces_[piece];
}

void KeyDirectory::refuse_foreign(std::uint64_t key) const {
  throw Error(ErrorKind::data, "table '" + table_ + "': key " + std::to_string(static_cast<std::int64_t>(key)) +
                                   " is of a shard that another rank owns");
}

std::uint32_t KeyDirectory::take_row(std::uint64_t key) {
  Piece& piece = piece_of(key);
  const auto taken = [&](std::uint32_t row) {
    if (has_levels_) level_of(shards_.piece_of_key(key), row) = 0;
    return row;
  };
  if (piece.free.empty() && piece.next_row == piece.end && leaves_keys_) {
    hand_ = 0;
    free_rows(slots_.num_slots());
  }
  if (!piece.free.empty()) {
    const std::uint32_t row = piece.free.back();
    piece.free.pop_back();
    return taken(row);
  }
  if (piece.next_row < piece.end) return taken(static_cast<std::uint32_t>(piece.next_row++));
  const KeyShards::Piece& rows = shards_.pieces[shards_.piece_of_key(key)];
  throw Error(ErrorKind::full,
              "table '" + table_ + "' has a key in each of its " + std::to_string(rows.num_rows) + " rows" +
                  (shards_.num_shards() == 1 ? "" : " of shard " + std::to_string(shards_.shard_of_key(key))) +
                  ", and none for a new one; make the pool with a larger capacity");
}

std::size_t KeyDirectory::num_keys() const {
  const std::lock_guard lock(mutex_);
  return slots_.size();
}

std::uint64_t KeyDirectory::num_rows_used() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t used = 0;
  for (std::size_t p = 0; p < pieces_.size(); ++p) used += pieces_[p].next_row - shards_.pieces[p].first;
  return used;
}

std::size_t KeyDirectory::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  std::size_t bytes = slots_.memory_bytes();
  for (const Piece& piece : pieces_) bytes += piece.free.capacity() * sizeof(std::uint32_t);
  return bytes;
}

}  // namespace holdfast

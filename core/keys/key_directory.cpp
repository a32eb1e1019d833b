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

KeyDirectory::KeyDirectory(std::string table, std::uint64_t num_rows, std::uint64_t seed, bool leaves_keys)
    : table_(std::move(table)), num_rows_(num_rows), seed_(seed), slots_(Policy{seed}), leaves_keys_(leaves_keys) {}

// Of two rows with one key, the one that was updated later is its row: the other was given up in between.
void KeyDirectory::add(std::span<const std::uint64_t> rows, std::span<const KeyRecord> records) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::uint32_t row = static_cast<std::uint32_t>(rows[i]);
    const KeyRecord& record = records[i];
    for (; end_row_ < row; ++end_row_) free_.push_back(static_cast<std::uint32_t>(end_row_));
    end_row_ = std::uint64_t{row} + 1;
    if (record.updates == 0) {
      free_.push_back(row);
    } else if (Slot* const slot = slots_.find(record.key); slot == nullptr) {
      slots_.insert({record.key, row + 1, record.step});
    } else if (slot->step < record.step) {
      free_.push_back(std::exchange(slot->row_plus_one, row + 1) - 1);
      slot->step = record.step;
    } else {
      free_.push_back(row);
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
    const std::uint32_t row = take_row();
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

void KeyDirectory::pass(std::uint64_t step, std::uint64_t oldest) {
  const std::lock_guard lock(mutex_);
  step_ = step;
  oldest_ = oldest;
}

// A row may be taken while the table grows: then slots are looked at that have moved, or are skipped this time.
void KeyDirectory::free_rows(std::size_t num_slots) {
  if (oldest_ == 0) return;
  if (hand_ >= slots_.num_slots()) hand_ = 0;
  left_behind_.clear();
  hand_ = slots_.visit(hand_, num_slots, [&](const Slot& slot) {
    if (slot.step < oldest_) left_behind_.push_back(slot);
  });
  for (const Slot& slot : left_behind_) {
    slots_.erase(slot.key);
    free_.push_back(slot.row_plus_one - 1);
  }
}

void KeyDirectory::find(std::span<const std::int64_t> keys, std::int64_t* rows) const {
  const std::lock_guard lock(mutex_);
  for_keys(slots_, keys, [&](std::size_t i, std::uint64_t key, std::uint64_t hash) {
    const Slot* const slot = slots_.find(key, hash);
    rows[i] = slot == nullptr ? no_row : std::int64_t{slot->row_plus_one} - 1;
  });
}

std::uint32_t KeyDirectory::take_row() {
  if (!free_.empty()) {
    const std::uint32_t row = free_.back();
    free_.pop_back();
    return row;
  }
  if (end_row_ == num_rows_ && leaves_keys_) {
    hand_ = 0;
    free_rows(slots_.num_slots());
    if (!free_.empty()) return take_row();
  }
  if (end_row_ == num_rows_) {
    throw Error(ErrorKind::full, "table '" + table_ + "' has a key in each of its " + std::to_string(num_rows_) +
                                     " rows, and none for a new one; make the pool with a larger capacity");
  }
  return static_cast<std::uint32_t>(end_row_++);
}

std::uint64_t KeyDirectory::end_row() const {
  const std::lock_guard lock(mutex_);
  return end_row_;
}

std::size_t KeyDirectory::num_keys() const {
  const std::lock_guard lock(mutex_);
  return slots_.size();
}

std::size_t KeyDirectory::memory_bytes() const {
  const std::lock_guard lock(mutex_);
  return slots_.memory_bytes() + free_.capacity() * sizeof(std::uint32_t);
}

}  // namespace holdfast

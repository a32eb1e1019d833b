#include "keys/key_directory.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace holdfast {
namespace {

constexpr std::size_t prefetch_distance = 24;

// Calls body(i, key) for each of the keys, whose slots are asked for some calls earlier.
template <class Slots, class Body>
void for_keys(const Slots& slots, std::span<const std::int64_t> keys, const Body& body) {
  const auto key_at = [&](std::size_t i) { return static_cast<std::uint64_t>(keys[i]); };
  for (std::size_t i = 0; i < std::min(prefetch_distance, keys.size()); ++i) slots.prefetch(key_at(i));
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (i + prefetch_distance < keys.size()) slots.prefetch(key_at(i + prefetch_distance));
    body(i, key_at(i));
  }
}

}  // namespace

KeyDirectory::KeyDirectory(std::string table, std::uint64_t num_rows, std::uint64_t seed)
    : table_(std::move(table)), num_rows_(num_rows), slots_(Policy{seed}) {}

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

void KeyDirectory::place(std::span<const std::int64_t> keys, std::int64_t* rows) {
  const std::lock_guard lock(mutex_);
  for_keys(slots_, keys, [&](std::size_t i, std::uint64_t key) {
    const Slot* const slot = slots_.find(key);
    if (slot != nullptr) {
      rows[i] = std::int64_t{slot->row_plus_one} - 1;
      return;
    }
    const std::uint32_t row = take_row();
    slots_.insert({key, row + 1, 0});
    rows[i] = row;
  });
}

void KeyDirectory::find(std::span<const std::int64_t> keys, std::int64_t* rows) const {
  const std::lock_guard lock(mutex_);
  for_keys(slots_, keys, [&](std::size_t i, std::uint64_t key) {
    const Slot* const slot = slots_.find(key);
    rows[i] = slot == nullptr ? no_row : std::int64_t{slot->row_plus_one} - 1;
  });
}

std::uint32_t KeyDirectory::take_row() {
  if (!free_.empty()) {
    const std::uint32_t row = free_.back();
    free_.pop_back();
    return row;
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

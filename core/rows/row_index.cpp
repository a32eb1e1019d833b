#include "rows/row_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/counter_rng.h"

namespace holdfast {
namespace {

constexpr std::size_t fewest_slots = 64;
constexpr std::size_t full_percent = 72;
constexpr std::size_t grown_percent = 55;
constexpr std::size_t slots_moved_at_once = 8;  // so that all have moved long before the new ones are full

}  // namespace

RowIndex::RowIndex() : slots_(fewest_slots) {}

RowIndex::Slot RowIndex::pack(const Entry& entry) {
  const std::uint64_t low = entry.row | entry.location_plus_one << 40;
  const auto high = static_cast<std::uint16_t>(entry.location_plus_one >> 24);
  Slot slot;
  std::memcpy(slot.bytes, &low, sizeof(low));
  std::memcpy(slot.bytes + sizeof(low), &high, sizeof(high));
  return slot;
}

// Any number of slots will do: the hash is scaled, not cut.
std::size_t RowIndex::first_slot(const HugeArray<Slot>& slots, std::uint64_t row) {
  return static_cast<std::size_t>((counter_rng::mix64(row + 1) >> 32) * slots.size() >> 32);
}

std::size_t RowIndex::slot_of(const HugeArray<Slot>& slots, std::uint64_t row) {
  for (std::size_t slot = first_slot(slots, row);; slot = after(slots, slot)) {
    const Entry entry = unpack(slots[slot]);
    if (entry.location_plus_one == 0 || entry.row == row) return slot;
  }
}

// What has moved is whole runs, so a row's first slot says whether it has.
bool RowIndex::has_moved(std::uint64_t row) const {
  const std::size_t slot = first_slot(old_, row);
  return (slot >= old_start_ ? slot - old_start_ : slot + old_.size() - old_start_) < num_moved_;
}

void RowIndex::insert(std::uint64_t row, std::uint64_t location) {
  const HugeArray<Slot>* slots = &slots_of(row);
  std::size_t slot = slot_of(*slots, row);
  const bool is_new = unpack((*slots)[slot]).location_plus_one == 0;
  if (is_new) {
    if ((size_ + 1) * 100 > slots_.size() * full_percent) {
      begin_to_grow();
      slots = &slots_of(row);
      slot = slot_of(*slots, row);
    }
    ++size_;
  }
  (*slots)[slot] = pack({row, location + 1});
  if (is_new && is_growing()) grow_on(slots_moved_at_once);
}

std::optional<std::uint64_t> RowIndex::find(std::uint64_t row) const {
  const HugeArray<Slot>& slots = slots_of(row);
  const Entry entry = unpack(slots[slot_of(slots, row)]);
  if (entry.location_plus_one == 0) return std::nullopt;
  return entry.location_plus_one - 1;
}

void RowIndex::erase_if_equal(std::uint64_t row, std::uint64_t location) {
  const HugeArray<Slot>& slots = slots_of(row);
  const std::size_t slot = slot_of(slots, row);
  if (unpack(slots[slot]).location_plus_one != location + 1) return;
  --size_;
  close_gap(slots, slot);
}

// An entry further on moves into the gap unless its run begins behind the gap.
void RowIndex::close_gap(const HugeArray<Slot>& slots, std::size_t gap) {
  const auto distance = [&](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + slots.size() - from;
  };
  for (std::size_t slot = after(slots, gap);; slot = after(slots, slot)) {
    const Entry entry = unpack(slots[slot]);
    if (entry.location_plus_one == 0) break;
    if (distance(first_slot(slots, entry.row), slot) < distance(gap, slot)) continue;
    slots[gap] = slots[slot];
    gap = slot;
  }
  slots[gap] = Slot{};
}

// Where there is no memory for more slots, those that there are stay as they are. What is inserted into the last run may
// reach into the first slots: they move before, and more of them at each insert, so that it meets none that has not.
void RowIndex::begin_to_grow() {
  while (is_growing()) grow_on(old_.size());
  HugeArray<Slot> larger(std::max(slots_.size() + 1, (size_ + 1) * 100 / grown_percent));
  old_ = std::exchange(slots_, std::move(larger));
  num_moved_ = 0;
  for (old_start_ = 0; unpack(old_[old_start_]).location_plus_one != 0;) ++old_start_;
  kept_back_ = old_start_;
  grow_on(slots_moved_at_once);
}

// It stops before an empty slot. What was inserted meanwhile may lie behind the last one, where everything has moved.
void RowIndex::grow_on(std::size_t count) {
  if (!is_growing()) return;
  const std::size_t moved_before = num_moved_;
  for (std::size_t slot = (old_start_ + num_moved_) % old_.size();; slot = after(old_, slot)) {
    const Slot moved = old_[slot];
    if (const Entry entry = unpack(moved); entry.location_plus_one != 0) {
      slots_[slot_of(slots_, entry.row)] = moved;
      old_[slot] = Slot{};
    } else if (num_moved_ - moved_before >= count || num_moved_ >= old_.size()) {
      break;
    }
    ++num_moved_;
  }
  if (num_moved_ >= old_.size()) {
    old_ = {};
  } else {
    kept_back_ = old_.give_back(kept_back_, std::min(old_.size(), old_start_ + num_moved_));
  }
}

std::size_t RowIndex::memory_bytes() const {
  if (!is_growing()) return slots_.size() * sizeof(Slot);
  const double share = static_cast<double>(num_moved_) / static_cast<double>(old_.size());
  const double slots = share * static_cast<double>(slots_.size()) + (1 - share) * static_cast<double>(old_.size());
  return static_cast<std::size_t>(slots) * sizeof(Slot);
}

std::vector<std::uint64_t> RowIndex::rows() const {
  std::vector<std::uint64_t> rows;
  rows.reserve(size_);
  visit(0, num_slots(), [&](std::uint64_t row, std::uint64_t) { rows.push_back(row); });
  return rows;
}

void RowIndex::clear() {
  slots_ = HugeArray<Slot>(fewest_slots);
  old_ = {};
  size_ = 0;
}

}  // namespace holdfast

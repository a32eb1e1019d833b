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
std::size_t RowIndex::first_slot(std::uint64_t row) const {
  return static_cast<std::size_t>((counter_rng::mix64(row + 1) >> 32) * slots_.size() >> 32);
}

std::size_t RowIndex::slot_of(std::uint64_t row) const {
  for (std::size_t slot = first_slot(row);; slot = after(slot)) {
    const Entry entry = unpack(slots_[slot]);
    if (entry.location_plus_one == 0 || entry.row == row) return slot;
  }
}

void RowIndex::insert(std::uint64_t row, std::uint64_t location) {
  std::size_t slot = slot_of(row);
  if (unpack(slots_[slot]).location_plus_one == 0) {
    if ((size_ + 1) * 100 > slots_.size() * full_percent) {
      grow();
      slot = slot_of(row);
    }
    ++size_;
  }
  slots_[slot] = pack({row, location + 1});
}

std::optional<std::uint64_t> RowIndex::find(std::uint64_t row) const {
  const Entry entry = unpack(slots_[slot_of(row)]);
  if (entry.location_plus_one == 0) return std::nullopt;
  return entry.location_plus_one - 1;
}

void RowIndex::erase_if_equal(std::uint64_t row, std::uint64_t location) {
  const std::size_t slot = slot_of(row);
  if (unpack(slots_[slot]).location_plus_one != location + 1) return;
  --size_;
  close_gap(slot);
}

// The slots stay, for the rows that come.
void RowIndex::erase_if(const std::function<bool(std::uint64_t location)>& is_forgotten) {
  std::vector<Slot> kept;
  for (const Slot& slot : slots_) {
    const Entry entry = unpack(slot);
    if (entry.location_plus_one != 0 && !is_forgotten(entry.location_plus_one - 1)) kept.push_back(slot);
  }
  std::fill(slots_.begin(), slots_.end(), Slot{});
  for (const Slot& slot : kept) slots_[slot_of(unpack(slot).row)] = slot;
  size_ = kept.size();
}

// An entry further on moves into the gap unless its run begins behind the gap.
void RowIndex::close_gap(std::size_t gap) {
  const auto distance = [&](std::size_t from, std::size_t to) {
    return to >= from ? to - from : to + slots_.size() - from;
  };
  for (std::size_t slot = after(gap);; slot = after(slot)) {
    const Entry entry = unpack(slots_[slot]);
    if (entry.location_plus_one == 0) break;
    if (distance(first_slot(entry.row), slot) < distance(gap, slot)) continue;
    slots_[gap] = slots_[slot];
    gap = slot;
  }
  slots_[gap] = Slot{};
}

// Where there is no memory for more slots, those that there are stay as they are.
void RowIndex::grow() {
  HugeArray<Slot> old(std::max(slots_.size() + 1, (size_ + 1) * 100 / grown_percent));
  std::swap(old, slots_);
  for (const Slot& slot : old) {
    const Entry entry = unpack(slot);
    if (entry.location_plus_one != 0) slots_[slot_of(entry.row)] = slot;
  }
}

std::vector<std::uint64_t> RowIndex::rows() const {
  std::vector<std::uint64_t> rows;
  rows.reserve(size_);
  visit(0, num_slots(), [&](std::uint64_t row, std::uint64_t) { rows.push_back(row); });
  return rows;
}

void RowIndex::clear() {
  slots_ = HugeArray<Slot>(fewest_slots);
  size_ = 0;
}

}  // namespace holdfast

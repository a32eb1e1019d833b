#include "rows/address_map.h"

#include <algorithm>

namespace holdfast {

AddressMap::~AddressMap() {
  if (size_ == 0) return;  // a look at groups that were never touched would take memory
  for (std::optional<std::uint64_t> row = next(0); row;) {
    delete[] groups_[*row / group_rows].addresses;
    row = next((*row / group_rows + 1) * group_rows);
  }
}

// With an eighth to grow, so that few rows that come make a group move.
std::uint32_t AddressMap::room_for(std::uint32_t count) {
  return std::min<std::uint32_t>(group_rows, count + std::max<std::uint32_t>(4, count / 8));
}

void AddressMap::move(Group& group, std::uint32_t room) {
  auto* addresses = new std::uint32_t[room];
  if (group.room != 0) std::copy(group.addresses, group.addresses + group.count, addresses);
  delete[] group.addresses;
  memory_bytes_ += (room - group.room) * sizeof(std::uint32_t) + (group.room == 0 ? sizeof(Group) : 0);
  group.addresses = addresses;
  group.room = room;
}

// Three passes, each with its misses of the processor's caches ahead of it: who has how many, room for them, and then each
// address once, at its place.
std::optional<std::uint64_t> AddressMap::load(std::span<const std::uint64_t> rows) {
  constexpr std::size_t ahead = 24;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + ahead < rows.size()) prefetch(rows[i + ahead]);
    Group& group = groups_[rows[i] / group_rows];
    const std::size_t bit = rows[i] % group_rows;
    if (group.has(bit)) return rows[i];
    group.bits[bit / word_bits] |= std::uint64_t{1} << bit % word_bits;
    ++group.count;
  }
  size_ = rows.size();  // from now on the destructor has something to do
  for (Group& group : groups_) {
    if (group.count != 0) move(group, room_for(group.count));
  }
  const auto slot_of = [&](std::uint64_t row) {
    Group& group = groups_[row / group_rows];
    return group.addresses + group.before(row % group_rows);
  };
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (i + 2 * ahead < rows.size()) prefetch(rows[i + 2 * ahead]);
    if (i + ahead < rows.size()) __builtin_prefetch(slot_of(rows[i + ahead]), 1);
    *slot_of(rows[i]) = static_cast<std::uint32_t>(i);
  }
  return std::nullopt;
}

std::uint64_t AddressMap::add(std::uint64_t row) {
  Group& group = groups_[row / group_rows];
  const std::size_t bit = row % group_rows;
  if (group.count == group.room) move(group, room_for(group.count));
  std::uint32_t* at = group.addresses + group.before(bit);
  std::copy_backward(at, group.addresses + group.count, group.addresses + group.count + 1);
  *at = static_cast<std::uint32_t>(size_);
  ++group.count;
  group.bits[bit / word_bits] |= std::uint64_t{1} << bit % word_bits;
  return size_++;
}

std::optional<std::uint64_t> AddressMap::next(std::uint64_t row) const {
  std::size_t first_bit = row % group_rows;
  for (std::size_t number = row / group_rows; number < groups_.size(); ++number, first_bit = 0) {
    const Group& group = groups_[number];
    std::uint64_t mask = ~std::uint64_t{0} << first_bit % word_bits;
    for (std::size_t word = first_bit / word_bits; word < group.bits.size(); ++word, mask = ~std::uint64_t{0}) {
      if (const std::uint64_t left = group.bits[word] & mask; left != 0) {
        return number * group_rows + word * word_bits + static_cast<std::size_t>(std::countr_zero(left));
      }
    }
  }
  return std::nullopt;
}

}  // namespace holdfast

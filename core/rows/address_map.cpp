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

void AddressMap::make_room(Group& group) {
  if (group.count < group.room) return;
  const std::uint32_t more = std::max<std::uint32_t>(4, group.count / 8);
  const std::uint32_t room = std::min<std::uint32_t>(group_rows, group.count + more);
  auto* addresses = new std::uint32_t[room];
  std::copy(group.addresses, group.addresses + group.count, addresses);
  delete[] group.addresses;
  memory_bytes_ += (room - group.room) * sizeof(std::uint32_t) + (group.room == 0 ? sizeof(Group) : 0);
  group.addresses = addresses;
  group.room = room;
}

std::uint64_t AddressMap::add(std::uint64_t row) {
  Group& group = groups_[row / group_rows];
  const std::size_t bit = row % group_rows;
  make_room(group);
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

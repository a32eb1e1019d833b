// Address map: of a home whose rows lie by first touch, which image each row has. Addresses are given in order, from 0 on.
//
// Invariants
// - A row's address never changes, and no two rows have the same.
// - Rows are in groups of 256: bits say which of a group's rows have an address, and theirs lie in an array, by row. So a
//   row takes 4 bytes and what its group's array is larger than it need be, an eighth as a rule; a group 48, once one of its
//   rows has an address.
// - What fails for want of memory changes nothing.
// - Not thread-safe.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>

#include "base/huge_array.h"

namespace holdfast {

class AddressMap {
 public:
  static constexpr std::uint64_t most_addresses = std::numeric_limits<std::uint32_t>::max();

  explicit AddressMap(std::uint64_t num_rows) : groups_(num_rows / group_rows + 1) {}
  ~AddressMap();
  AddressMap(const AddressMap&) = delete;
  AddressMap& operator=(const AddressMap&) = delete;

  std::optional<std::uint64_t> find(std::uint64_t row) const {
    const Group& group = groups_[row / group_rows];
    const std::size_t bit = row % group_rows;
    if (!group.has(bit)) return std::nullopt;
    return group.addresses[group.before(bit)];
  }
  // Asks for the memory that a call for `row` is going to read first.
  void prefetch(std::uint64_t row) const { __builtin_prefetch(groups_.data() + row / group_rows); }
  // Gives addresses to rows, from 0 on, in a map that has none; all of them are below num_rows. Returns the first that is
  // there twice, and the map is of no use then.
  std::optional<std::uint64_t> load(std::span<const std::uint64_t> rows);
  // Gives the next address to `row`, which has none. There are fewer than most_addresses.
  std::uint64_t add(std::uint64_t row);
  // The first row at or after `row` that has an address.
  std::optional<std::uint64_t> next(std::uint64_t row) const;

  // How many rows have one: the next address.
  std::uint64_t size() const { return size_; }
  std::size_t memory_bytes() const { return memory_bytes_; }

 private:
  static constexpr std::size_t group_rows = 256;
  static constexpr std::size_t word_bits = 64;

  struct Group {  // all zeros: none of its rows has an address
    std::array<std::uint64_t, group_rows / word_bits> bits;
    std::uint32_t* addresses;  // of its rows that have one, ascending by row
    std::uint32_t count;
    std::uint32_t room;

    bool has(std::size_t bit) const { return (bits[bit / word_bits] >> bit % word_bits & 1) != 0; }
    std::size_t before(std::size_t bit) const {
      int count_before = 0;
      for (std::size_t word = 0; word < bit / word_bits; ++word) count_before += std::popcount(bits[word]);
      const std::uint64_t below = (std::uint64_t{1} << bit % word_bits) - 1;
      return static_cast<std::size_t>(count_before + std::popcount(bits[bit / word_bits] & below));
    }
  };
  static_assert(sizeof(Group) == 48);

  static std::uint32_t room_for(std::uint32_t count);
  void move(Group& group, std::uint32_t room);

  HugeArray<Group> groups_;
  std::uint64_t size_ = 0;
  std::size_t memory_bytes_ = 0;
};

}  // namespace holdfast

// Route message: what a trainer tells an owner of rows about its batch, in words of 32 bits.
//
// Feature by feature, for each that has ids there: the lengths of its bags (left out where every bag has one id), and
// its ids' places, in order (two words each, the low one first, where the table's places do not fit one). Only bags with
// ids there are told of. How many there are travels apart from the message.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

// Of one feature, from one trainer, for one owner.
struct BagCounts {
  std::int64_t bags;
  std::int64_t ids;

  bool has_lengths() const { return bags != ids; }
};

constexpr std::uint64_t words_of_place(std::uint64_t end_place) { return end_place > std::uint64_t{1} << 32 ? 2 : 1; }

inline std::uint64_t message_words(const BagCounts& counts, std::uint64_t end_place) {
  return static_cast<std::uint64_t>(counts.has_lengths() ? counts.bags : 0) +
         static_cast<std::uint64_t>(counts.ids) * words_of_place(end_place);
}

}  // namespace holdfast

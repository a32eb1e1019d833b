// Route message: what a trainer tells an owner of rows about its batch, in words of 32 bits.
//
// Feature by feature, for each that has ids there: the lengths of its bags (left out where every bag has one id), and
// its ids' places, in order (two words each, the low one first, where the table's places do not fit one); where they have
// per-sample weights these, float32, and of a split table's mean 1 / length of each whole bag, float32. Only bags with
// ids there are told of. How many there are travels apart from the message.
//
// Numbered, ids are told otherwise: their distinct places, ascending, then of each id which of these it is, in 16 bits
// (two a word, the low one first) where that is enough for all. Then the owner has nothing to sort.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

// Of one feature, from one trainer, for one owner.
struct BagCounts {
  std::int64_t bags;
  std::uint32_t ids;
  std::uint32_t weighted : 1;  // the ids have per-sample weights
  std::uint32_t distinct : 31;  // places, where ids are numbered; else 0

  bool has_lengths() const { return bags != std::int64_t{ids}; }
  bool numbers_are_short() const { return distinct <= std::uint32_t{1} << 16; }
};
static_assert(sizeof(BagCounts) == 16);

inline constexpr std::uint32_t max_distinct = (std::uint32_t{1} << 31) - 1;

constexpr std::uint64_t words_of_place(std::uint64_t end_place) { return end_place > std::uint64_t{1} << 32 ? 2 : 1; }

// What says which places the ids are.
inline std::uint64_t words_of_ids(const BagCounts& counts, std::uint64_t end_place) {
  const std::uint64_t ids = counts.ids;
  if (counts.distinct == 0) return ids * words_of_place(end_place);
  return counts.distinct * words_of_place(end_place) + (counts.numbers_are_short() ? (ids + 1) / 2 : ids);
}

// end_place: of the table. takes_mean: it is split, and its bags' mean is taken.
inline std::uint64_t message_words(const BagCounts& counts, std::uint64_t end_place, bool takes_mean) {
  const std::uint64_t bags = static_cast<std::uint64_t>(counts.bags);
  const bool weighted = counts.weighted != 0;
  return (counts.has_lengths() ? bags : 0) + words_of_ids(counts, end_place) + (weighted ? counts.ids : 0) +
         (weighted && takes_mean ? bags : 0);
}

}  // namespace holdfast

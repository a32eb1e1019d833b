#include "step/plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace holdfast {
namespace {

// Counters of one digit stay in L1 (2048 × 4 bytes) and a table of a million rows takes two passes.
constexpr unsigned max_digit_bits = 11;
constexpr unsigned max_passes = 6;
constexpr std::size_t max_count = std::numeric_limits<std::uint32_t>::max();

struct Digits {
  unsigned num;
  unsigned bits;  // of each
};

Digits digits_of(unsigned key_bits) {
  const unsigned num = std::max(1u, (key_bits + max_digit_bits - 1) / max_digit_bits);
  return {num, (key_bits + num - 1) / num};
}

// Counts of each digit of the rows; then, digit by digit, where the next lookup with that digit goes.
using Counters = std::array<std::array<std::uint32_t, std::size_t{1} << max_digit_bits>, max_passes>;

// What the plan needs of each lookup, by position, until it is put in order of rows.
struct Lookups {
  std::uint32_t* gradient_offset;
  float* scale;  // null when every scale is 1
};

constexpr std::size_t prefetched_ids = 256;

// Counts the digits of one feature's ids. Returns whether all of them are rows of the table.
bool count_digits(std::span<const std::int64_t> ids, std::uint64_t num_rows, Digits digits, Counters& counters) {
  const std::uint64_t mask = (std::uint64_t{1} << digits.bits) - 1;
  std::uint64_t largest = 0;
  const auto count = [&](unsigned num_digits) {
    for (const std::int64_t& signed_id : ids) {
      __builtin_prefetch(&signed_id + prefetched_ids);
      std::uint64_t id = static_cast<std::uint64_t>(signed_id);  // a negative id becomes a huge one
      largest = std::max(largest, id);
      for (unsigned digit = 0; digit < num_digits; ++digit, id >>= digits.bits) ++counters[digit][id & mask];
    }
  };
  digits.num == 2 ? count(2) : count(digits.num);
  return ids.empty() || largest < num_rows;
}

// Fills one feature's bags and lookups, whose positions begin at `first`.
template <class Offset>
void fill_lookups(const FeatureInput& feature, std::span<const Offset> offsets, std::size_t first, bool mean,
                  std::uint32_t* bag_start, const Lookups& lookups) {
  const std::size_t num_bags = feature.bags.num_bags;
  for (std::size_t bag = 0; bag <= num_bags; ++bag) {
    bag_start[bag] = static_cast<std::uint32_t>(first + static_cast<std::size_t>(offsets[bag] - offsets[0]));
  }
  std::uint32_t gradient_offset = feature.first_output;
  for (std::size_t bag = 0; bag < num_bags; ++bag, gradient_offset += feature.output_stride) {
    for (std::uint32_t p = bag_start[bag]; p < bag_start[bag + 1]; ++p) lookups.gradient_offset[p] = gradient_offset;
  }
  if (lookups.scale != nullptr) {
    const float* const weights = feature.weights == nullptr ? nullptr : feature.weights + offsets[0];
    for (std::size_t bag = 0; bag < num_bags; ++bag) {
      const float per_bag = feature.bag_factor != nullptr ? feature.bag_factor[bag]
                            : mean ? 1.0f / static_cast<float>(bag_start[bag + 1] - bag_start[bag])
                                   : 1.0f;
      for (std::uint32_t p = bag_start[bag]; p < bag_start[bag + 1]; ++p) {
        lookups.scale[p] = weights == nullptr ? per_bag : weights[p - first] * per_bag;
      }
    }
  }
}

void counts_to_starts(std::span<std::uint32_t> counts) {
  std::uint32_t sum = 0;
  for (std::uint32_t& count : counts) sum += std::exchange(count, sum);
}

}  // namespace

void plan_table(std::span<const FeatureInput> features, std::uint64_t num_rows, Pooling pooling, TablePlan& plan) {
  const bool mean = pooling == Pooling::mean;
  std::size_t num_lookups = 0;
  std::size_t num_bag_starts = 0;
  bool weighted = false;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const FeatureInput& feature = features[f];
    num_lookups += checked_num_ids(feature.bags, f);
    num_bag_starts += feature.bags.num_bags + 1;
    weighted |= feature.weights != nullptr;
    if (feature.bags.num_bags != 0 &&
        (max_count - feature.first_output) / std::max(feature.output_stride, 1u) < feature.bags.num_bags - 1) {
      throw std::length_error("plan_table: an output of " + std::to_string(feature.bags.num_bags) + " bags × " +
                              std::to_string(feature.output_stride) + " columns has offsets that do not fit 32 bits");
    }
  }
  const unsigned shift = static_cast<unsigned>(std::bit_width(num_lookups));
  const unsigned row_bits = static_cast<unsigned>(std::bit_width(num_rows == 0 ? 0 : num_rows - 1));
  if (num_lookups > max_count || shift + row_bits > 64) {
    throw std::length_error("plan_table: " + std::to_string(num_lookups) + " lookups in " + std::to_string(num_rows) +
                            " rows are more than a plan can number");
  }

  bool scaled = weighted;
  if (mean && !scaled) {
    for (const FeatureInput& feature : features) {
      scaled |= with_offsets(feature.bags, [&](auto offsets) {
        bool other_than_one = false;
        for (std::size_t bag = 0; bag + 1 < offsets.size(); ++bag)
          other_than_one |= offsets[bag + 1] - offsets[bag] > 1;
        return other_than_one;
      });
    }
  }

  // Two arrays of packed lookups, then gradient offsets and scales by position, half a word each. The thread's, not the
  // plan's: memory that the table before has just used is in the caches (30% of the time).
  static thread_local std::vector<std::uint64_t> scratch;
  if (scratch.size() < 3 * num_lookups) scratch.resize(3 * num_lookups);
  plan.bag_start.resize(num_bag_starts);
  plan.position.resize(num_lookups);
  plan.gradient_offset.resize(num_lookups);
  plan.scale.resize(scaled ? num_lookups : 0);
  plan.bag_scale.resize(weighted ? num_lookups : 0);
  std::uint64_t* packed = scratch.data();
  std::uint64_t* other = packed + num_lookups;
  std::uint32_t* const by_position = reinterpret_cast<std::uint32_t*>(other + num_lookups);
  const Lookups lookups{by_position, scaled ? reinterpret_cast<float*>(by_position) + num_lookups : nullptr};

  const Digits digits = digits_of(row_bits);
  const std::uint64_t digit_mask = (std::uint64_t{1} << digits.bits) - 1;
  Counters counters;
  for (unsigned digit = 0; digit < digits.num; ++digit) std::fill_n(counters[digit].begin(), digit_mask + 1, 0u);
  std::size_t first = 0;
  std::uint32_t* bag_start = plan.bag_start.data();
  for (std::size_t f = 0; f < features.size(); ++f) {
    const FeatureInput& feature = features[f];
    const auto ids = all_ids(feature.bags);
    if (!count_digits(ids, num_rows, digits, counters)) throw_first_bad_id(feature.bags, f, num_rows);
    with_offsets(feature.bags, [&](auto offsets) {
      fill_lookups(feature, offsets, first, mean, bag_start, lookups);
      if (weighted && feature.weights == nullptr) std::fill_n(plan.bag_scale.begin() + first, ids.size(), 1.0f);
      if (feature.weights != nullptr) {
        std::copy_n(feature.weights + offsets[0], ids.size(), plan.bag_scale.begin() + first);
      }
    });
    first += ids.size();
    bag_start += feature.bags.num_bags + 1;
  }

  // Radix sort by row, from the lowest digit on. The first pass packs as well: row << shift | position.
  counts_to_starts({counters[0].data(), digit_mask + 1});
  std::uint64_t position = 0;
  for (const FeatureInput& feature : features) {
    for (const std::int64_t signed_id : all_ids(feature.bags)) {
      const std::uint64_t id = static_cast<std::uint64_t>(signed_id);
      packed[counters[0][id & digit_mask]++] = id << shift | position++;
    }
  }
  for (unsigned digit = 1; digit < digits.num; ++digit) {
    const unsigned digit_shift = shift + digit * digits.bits;
    auto& next = counters[digit];
    if (num_lookups == 0 || next[packed[0] >> digit_shift & digit_mask] == num_lookups) continue;  // all rows share it
    counts_to_starts({next.data(), digit_mask + 1});
    for (std::size_t i = 0; i < num_lookups; ++i) other[next[packed[i] >> digit_shift & digit_mask]++] = packed[i];
    std::swap(packed, other);
  }

  // Cut the runs of equal rows. No branch asks where a run ends, which could not be predicted: what belongs to the
  // run is written for each of its lookups, and the last one stays.
  std::size_t num_unique = num_lookups == 0 ? 0 : 1;
  for (std::size_t j = 1; j < num_lookups; ++j) num_unique += (packed[j] ^ packed[j - 1]) >> shift != 0;
  plan.rows.resize(num_unique);
  plan.row_start.resize(num_unique + 1);
  plan.row_start[0] = 0;
  const std::uint64_t position_mask = (std::uint64_t{1} << shift) - 1;
  const auto cut = [&, rows = plan.rows.data(), row_start = plan.row_start.data(), position_of = plan.position.data(),
                    gradient_offset = plan.gradient_offset.data(), scale = plan.scale.data()](auto has_scale) {
    std::uint64_t previous = num_lookups == 0 ? 0 : packed[0] >> shift;
    std::uint32_t unique = 0;
    for (std::size_t j = 0; j < num_lookups; ++j) {
      const std::uint64_t row = packed[j] >> shift;
      const std::size_t p = packed[j] & position_mask;
      unique += row != previous;
      previous = row;
      rows[unique] = row;
      row_start[unique + 1] = static_cast<std::uint32_t>(j + 1);
      position_of[p] = unique;
      gradient_offset[j] = lookups.gradient_offset[p];
      if constexpr (has_scale) scale[j] = lookups.scale[p];
    }
  };
  scaled ? cut(std::true_type{}) : cut(std::false_type{});
  plan.keys.clear();
  plan.num_placed = num_unique;
}

}  // namespace holdfast

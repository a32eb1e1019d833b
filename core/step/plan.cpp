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

// What all of a bag's gradients are multiplied with.
float bag_scale_of(const FeatureInput& feature, bool mean, std::size_t bag, std::uint32_t length) {
  if (feature.bag_factor != nullptr) return feature.bag_factor[bag];
  return mean ? 1.0f / static_cast<float>(length) : 1.0f;
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
      const float per_bag = bag_scale_of(feature, mean, bag, bag_start[bag + 1] - bag_start[bag]);
      for (std::uint32_t p = bag_start[bag]; p < bag_start[bag + 1]; ++p) {
        lookups.scale[p] = weights == nullptr ? per_bag : weights[p - first] * per_bag;
      }
    }
  }
}

// What a plan of features is going to be.
struct Extent {
  std::size_t num_lookups = 0;
  std::size_t num_bag_starts = 0;
  bool weighted = false;
  bool scaled = false;  // some scale may be other than 1
};

Extent extent_of(std::span<const FeatureInput> features, bool mean) {
  Extent extent;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const FeatureInput& feature = features[f];
    extent.num_lookups += checked_num_ids(feature.bags, f);
    extent.num_bag_starts += feature.bags.num_bags + 1;
    extent.weighted |= feature.weights != nullptr;
    if (feature.bags.num_bags != 0 &&
        (max_count - feature.first_output) / std::max(feature.output_stride, 1u) < feature.bags.num_bags - 1) {
      throw std::length_error("plan_table: an output of " + std::to_string(feature.bags.num_bags) + " bags × " +
                              std::to_string(feature.output_stride) + " columns has offsets that do not fit 32 bits");
    }
  }
  extent.scaled = extent.weighted;
  if (mean && !extent.scaled) {
    for (const FeatureInput& feature : features) {
      extent.scaled |= with_offsets(feature.bags, [&](auto offsets) {
        bool other_than_one = false;
        for (std::size_t bag = 0; bag + 1 < offsets.size(); ++bag)
          other_than_one |= offsets[bag + 1] - offsets[bag] > 1;
        return other_than_one;
      });
    }
  }
  return extent;
}

void resize(const Extent& extent, TablePlan& plan) {
  plan.bag_start.resize(extent.num_bag_starts);
  plan.position.resize(extent.num_lookups);
  plan.gradient_offset.resize(extent.num_lookups);
  plan.scale.resize(extent.scaled ? extent.num_lookups : 0);
  plan.bag_scale.resize(extent.weighted ? extent.num_lookups : 0);
}

unsigned row_bits_of(std::uint64_t num_rows) {
  return static_cast<unsigned>(std::bit_width(num_rows == 0 ? 0 : num_rows - 1));
}

// How far left a row lies in a word that has a number below `count` beside it.
unsigned shift_of(std::size_t count, unsigned row_bits) {
  const unsigned shift = static_cast<unsigned>(std::bit_width(count));
  if (count > max_count || shift + row_bits > 64) {
    throw std::length_error("plan_table: " + std::to_string(count) + " lookups in rows of " + std::to_string(row_bits) +
                            " bits are more than a plan can number");
  }
  return shift;
}

// Of `count` ids from the one at `offset` on.
void fill_weights(const FeatureInput& feature, std::size_t offset, std::size_t count, float* weights) {
  if (feature.weights == nullptr) {
    std::fill_n(weights, count, 1.0f);
  } else {
    std::copy_n(feature.weights + offset, count, weights);
  }
}

void counts_to_starts(std::span<std::uint32_t> counts) {
  std::uint32_t sum = 0;
  for (std::uint32_t& count : counts) sum += std::exchange(count, sum);
}

// Puts words in order of one digit, which is counted, stably. Returns false, and does nothing, where all share it.
bool sort_by_digit(std::span<const std::uint64_t> words, unsigned shift, std::uint64_t mask,
                   Counters::value_type& counters, std::uint64_t* sorted) {
  if (words.empty() || counters[words[0] >> shift & mask] == words.size()) return false;
  counts_to_starts({counters.data(), mask + 1});
  for (const std::uint64_t word : words) sorted[counters[word >> shift & mask]++] = word;
  return true;
}

// Of a number that stands for a row: which row of the plan it is, and where its next lookup goes.
struct Place {
  std::uint32_t unique;
  std::uint32_t next;
};

// Puts lookups whose rows are known by numbers where they belong.
void place_lookups(std::span<const FeatureInput> features, const Extent& extent, bool mean,
                   std::span<const std::uint32_t> number_of, Place* places, TablePlan& plan) {
  std::uint32_t first = 0;
  std::uint32_t* bag_start = plan.bag_start.data();
  for (const FeatureInput& feature : features) {
    with_offsets(feature.bags, [&](auto offsets) {
      const auto fill = [&](auto has_scale) {
        const float* const weights = feature.weights == nullptr ? nullptr : feature.weights + offsets[0];
        std::uint32_t gradient_offset = feature.first_output;
        std::uint32_t p = first;
        for (std::size_t bag = 0; bag < feature.bags.num_bags; ++bag, gradient_offset += feature.output_stride) {
          bag_start[bag] = p;
          const std::uint32_t end = first + static_cast<std::uint32_t>(offsets[bag + 1] - offsets[0]);
          [[maybe_unused]] const float of_bag = bag_scale_of(feature, mean, bag, end - p);
          for (; p < end; ++p) {
            Place& place = places[number_of[p]];
            const std::uint32_t j = place.next++;
            plan.position[p] = place.unique;
            plan.gradient_offset[j] = gradient_offset;
            if constexpr (has_scale) plan.scale[j] = weights == nullptr ? of_bag : weights[p - first] * of_bag;
          }
        }
        bag_start[feature.bags.num_bags] = p;
      };
      extent.scaled ? fill(std::true_type{}) : fill(std::false_type{});
      const std::size_t count = static_cast<std::size_t>(offsets.back() - offsets[0]);
      if (extent.weighted) {
        fill_weights(feature, static_cast<std::size_t>(offsets[0]), count, plan.bag_scale.data() + first);
      }
      first += static_cast<std::uint32_t>(count);
    });
    bag_start += feature.bags.num_bags + 1;
  }
}

}  // namespace

void plan_table(std::span<const FeatureInput> features, std::uint64_t num_rows, Pooling pooling, TablePlan& plan) {
  const bool mean = pooling == Pooling::mean;
  const Extent extent = extent_of(features, mean);
  const std::size_t num_lookups = extent.num_lookups;
  const bool weighted = extent.weighted;
  const bool scaled = extent.scaled;
  const unsigned row_bits = row_bits_of(num_rows);
  const unsigned shift = shift_of(num_lookups, row_bits);

  // Two arrays of packed lookups, then gradient offsets and scales by position, half a word each. The thread's, not the
  // plan's: memory that the table before has just used is in the caches (30% of the time).
  static thread_local std::vector<std::uint64_t> scratch;
  if (scratch.size() < 3 * num_lookups) scratch.resize(3 * num_lookups);
  resize(extent, plan);
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
      if (weighted)
        fill_weights(feature, static_cast<std::size_t>(offsets[0]), ids.size(), plan.bag_scale.data() + first);
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
    if (sort_by_digit({packed, num_lookups}, digit_shift, digit_mask, counters[digit], other)) std::swap(packed, other);
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

void plan_numbered_table(std::span<const FeatureInput> features, const NumberedRows& numbered, Pooling pooling,
                         TablePlan& plan) {
  const bool mean = pooling == Pooling::mean;
  const Extent extent = extent_of(features, mean);
  const std::size_t num_unique = numbered.rows.size();
  std::uint64_t last_row = 0;
  for (const std::int64_t row : numbered.rows) last_row = std::max(last_row, static_cast<std::uint64_t>(row));
  const unsigned row_bits = row_bits_of(last_row + 1);
  const unsigned shift = shift_of(num_unique, row_bits);
  shift_of(extent.num_lookups, 0);
  resize(extent, plan);

  // (row, number), in order of rows; then each number's place.
  static thread_local std::vector<std::uint64_t> scratch;
  if (scratch.size() < 3 * num_unique) scratch.resize(3 * num_unique);
  std::uint64_t* packed = scratch.data();
  std::uint64_t* other = packed + num_unique;
  Place* const places = reinterpret_cast<Place*>(other + num_unique);
  const Digits digits = digits_of(row_bits);
  const std::uint64_t digit_mask = (std::uint64_t{1} << digits.bits) - 1;
  Counters counters;
  for (unsigned digit = 0; digit < digits.num; ++digit) std::fill_n(counters[digit].begin(), digit_mask + 1, 0u);
  for (std::size_t n = 0; n < num_unique; ++n) {
    std::uint64_t row = static_cast<std::uint64_t>(numbered.rows[n]);
    packed[n] = row << shift | n;
    for (unsigned digit = 0; digit < digits.num; ++digit, row >>= digits.bits) ++counters[digit][row & digit_mask];
  }
  for (unsigned digit = 0; digit < digits.num; ++digit) {
    const unsigned digit_shift = shift + digit * digits.bits;
    if (sort_by_digit({packed, num_unique}, digit_shift, digit_mask, counters[digit], other)) std::swap(packed, other);
  }
  plan.rows.resize(num_unique);
  plan.keys.resize(num_unique);
  plan.row_start.resize(num_unique + 1);
  std::uint32_t start = 0;
  for (std::size_t u = 0; u < num_unique; ++u) {
    const std::size_t n = packed[u] & ((std::uint64_t{1} << shift) - 1);
    plan.rows[u] = packed[u] >> shift;
    plan.keys[u] = static_cast<std::uint64_t>(numbered.keys[n]);
    plan.row_start[u] = start;
    places[n] = {static_cast<std::uint32_t>(u), start};
    start += numbered.counts[n];
  }
  plan.row_start[num_unique] = start;

  place_lookups(features, extent, mean, numbered.number_of, places, plan);
  plan.num_placed = num_unique;
}

void plan_ordered_table(std::span<const FeatureInput> features, std::span<const std::uint64_t> rows,
                        std::span<const std::uint32_t> counts, std::span<const std::uint32_t> number_of,
                        Pooling pooling, TablePlan& plan) {
  const bool mean = pooling == Pooling::mean;
  const Extent extent = extent_of(features, mean);
  shift_of(extent.num_lookups, 0);
  resize(extent, plan);
  static thread_local std::vector<Place> places;
  if (places.size() < rows.size()) places.resize(rows.size());
  plan.rows.assign(rows.begin(), rows.end());
  plan.keys.clear();
  plan.row_start.resize(rows.size() + 1);
  std::uint32_t start = 0;
  for (std::size_t u = 0; u < rows.size(); ++u) {
    plan.row_start[u] = start;
    places[u] = {static_cast<std::uint32_t>(u), start};
    start += counts[u];
  }
  plan.row_start[rows.size()] = start;
  place_lookups(features, extent, mean, number_of, places.data(), plan);
  plan.num_placed = rows.size();
}

}  // namespace holdfast

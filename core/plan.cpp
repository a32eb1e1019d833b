#include "plan.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <string_view>

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

template <class Offset>
std::span<const Offset> offsets_of(const FeatureInput& feature, std::size_t num_bags) {
  return {static_cast<const Offset*>(feature.offsets), num_bags + 1};
}

// Calls body(offsets) with the feature's offsets in their own type.
template <class Body>
auto with_offsets(const FeatureInput& feature, std::size_t num_bags, const Body& body) {
  return feature.offsets_are_int64 ? body(offsets_of<std::int64_t>(feature, num_bags))
                                   : body(offsets_of<std::int32_t>(feature, num_bags));
}

[[noreturn]] void throw_bad(std::string_view what, std::size_t feature, std::size_t bag, std::int64_t value) {
  throw BadId(std::string(what) + " " + std::to_string(value) + " (feature " + std::to_string(feature) + ", sample " +
                  std::to_string(bag) + ")",
              feature, bag, value);
}

// Number of ids between the feature's first and last offset.
std::size_t checked_num_ids(const FeatureInput& feature, std::size_t feature_index, std::size_t num_bags) {
  return with_offsets(feature, num_bags, [&](auto offsets) {
    bool bad = offsets[0] < 0;
    for (std::size_t bag = 0; bag < num_bags; ++bag) bad |= offsets[bag + 1] < offsets[bag];
    if (bad) {
      if (offsets[0] < 0) throw_bad("negative offset", feature_index, 0, offsets[0]);
      std::size_t bag = 0;
      while (offsets[bag + 1] >= offsets[bag]) ++bag;
      throw_bad("offsets decrease to", feature_index, bag, offsets[bag + 1]);
    }
    return static_cast<std::size_t>(offsets[num_bags]) - static_cast<std::size_t>(offsets[0]);
  });
}

[[noreturn]] void throw_first_bad_id(const FeatureInput& feature, std::size_t feature_index, std::size_t num_bags,
                                     std::uint64_t num_rows) {
  with_offsets(feature, num_bags, [&](auto offsets) {
    for (std::size_t bag = 0; bag < num_bags; ++bag) {
      for (auto i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        const std::int64_t id = feature.ids[i];
        if (static_cast<std::uint64_t>(id) >= num_rows) {
          throw_bad("id outside [0, " + std::to_string(num_rows) + "):", feature_index, bag, id);
        }
      }
    }
  });
  throw std::logic_error("plan_table: a bad id vanished while it was looked for");
}

// What the plan keeps per lookup in original order until it is put in order of rows.
struct Lookups {
  std::uint64_t* packed;            // row << shift | position
  std::uint32_t* gradient_offset;
  float* scale;                     // null when every scale is 1
};

// Fills one feature's lookups from position `first` on. Returns whether all of its ids are rows of the table.
template <class Offset>
bool pack_feature(const FeatureInput& feature, std::span<const Offset> offsets, std::size_t first,
                  std::uint64_t num_rows, unsigned shift, std::uint32_t output_width, bool mean,
                  std::uint32_t* bag_start, const Lookups& lookups) {
  const std::size_t num_bags = offsets.size() - 1;
  const std::size_t first_id = static_cast<std::size_t>(offsets[0]);
  const std::size_t num_ids = static_cast<std::size_t>(offsets[num_bags]) - first_id;

  const std::int64_t* ids = feature.ids + first_id;
  std::uint64_t* packed = lookups.packed + first;
  std::uint64_t largest = 0;
  for (std::size_t i = 0; i < num_ids; ++i) {
    const std::uint64_t id = static_cast<std::uint64_t>(ids[i]);  // a negative id becomes a huge one
    largest = std::max(largest, id);
    packed[i] = id << shift | (first + i);
  }
  if (num_ids != 0 && largest >= num_rows) return false;

  for (std::size_t bag = 0; bag <= num_bags; ++bag) {
    bag_start[bag] = static_cast<std::uint32_t>(first + static_cast<std::size_t>(offsets[bag]) - first_id);
  }
  std::uint32_t gradient_offset = feature.output_column;
  for (std::size_t bag = 0; bag < num_bags; ++bag, gradient_offset += output_width) {
    for (std::uint32_t p = bag_start[bag]; p < bag_start[bag + 1]; ++p) lookups.gradient_offset[p] = gradient_offset;
  }
  if (lookups.scale != nullptr) {
    const float* weights = feature.weights == nullptr ? nullptr : feature.weights + first_id;
    for (std::size_t bag = 0; bag < num_bags; ++bag) {
      const float per_bag = mean ? 1.0f / static_cast<float>(bag_start[bag + 1] - bag_start[bag]) : 1.0f;
      for (std::uint32_t p = bag_start[bag]; p < bag_start[bag + 1]; ++p) {
        lookups.scale[p] = weights == nullptr ? per_bag : weights[p - first] * per_bag;
      }
    }
  }
  return true;
}

// Sorts `num` packed lookups by their row bits, stably; returns where they are: `from` or `to`.
std::uint64_t* radix_sort(std::uint64_t* from, std::uint64_t* to, std::size_t num, unsigned shift, Digits digits) {
  std::array<std::array<std::uint32_t, std::size_t{1} << max_digit_bits>, max_passes> counters;
  const std::uint64_t mask = (std::uint64_t{1} << digits.bits) - 1;
  for (unsigned pass = 0; pass < digits.num; ++pass) std::fill_n(counters[pass].begin(), mask + 1, 0u);
  for (std::size_t i = 0; i < num; ++i) {
    std::uint64_t key = from[i] >> shift;
    for (unsigned pass = 0; pass < digits.num; ++pass, key >>= digits.bits) ++counters[pass][key & mask];
  }
  for (unsigned pass = 0; pass < digits.num; ++pass) {
    const unsigned pass_shift = shift + pass * digits.bits;
    auto& next = counters[pass];
    if (next[from[0] >> pass_shift & mask] == num) continue;  // all rows share this digit
    std::uint32_t sum = 0;
    for (std::size_t digit = 0; digit <= mask; ++digit) {
      const std::uint32_t count = next[digit];
      next[digit] = sum;
      sum += count;
    }
    for (std::size_t i = 0; i < num; ++i) to[next[from[i] >> pass_shift & mask]++] = from[i];
    std::swap(from, to);
  }
  return from;
}

}  // namespace

void plan_table(std::span<const FeatureInput> features, std::size_t num_bags, std::uint64_t num_rows, Pooling pooling,
                std::uint32_t output_width, TablePlan& plan) {
  const bool mean = pooling == Pooling::mean;
  std::size_t num_lookups = 0;
  bool weighted = false;
  std::uint32_t last_column = 0;
  for (std::size_t f = 0; f < features.size(); ++f) {
    num_lookups += checked_num_ids(features[f], f, num_bags);
    weighted |= features[f].weights != nullptr;
    last_column = std::max(last_column, features[f].output_column);
  }
  const unsigned shift = static_cast<unsigned>(std::bit_width(num_lookups));
  const unsigned row_bits = static_cast<unsigned>(std::bit_width(num_rows == 0 ? 0 : num_rows - 1));
  if (num_lookups > max_count || shift + row_bits > 64) {
    throw std::length_error("plan_table: " + std::to_string(num_lookups) + " lookups in " + std::to_string(num_rows) +
                            " rows are more than a plan can number");
  }
  if (num_bags != 0 && (max_count - last_column) / std::max(output_width, 1u) < num_bags - 1) {
    throw std::length_error("plan_table: an output of " + std::to_string(num_bags) + " bags × " +
                            std::to_string(output_width) + " columns has offsets that do not fit 32 bits");
  }

  // scratch: two arrays of packed lookups, then gradient offsets and scales by position, half a word each.
  if (plan.scratch.size() < 3 * num_lookups) plan.scratch.resize(3 * num_lookups);
  plan.bag_start.resize(features.size() * (num_bags + 1));
  bool scaled = weighted;
  if (mean && !scaled) {
    for (const FeatureInput& feature : features) {
      scaled |= with_offsets(feature, num_bags, [&](auto offsets) {
        bool other_than_one = false;
        for (std::size_t bag = 0; bag < num_bags; ++bag) other_than_one |= offsets[bag + 1] - offsets[bag] > 1;
        return other_than_one;
      });
    }
  }
  std::vector<std::uint32_t>& position = plan.position;
  position.resize(num_lookups);
  plan.gradient_offset.resize(num_lookups);
  plan.scale.resize(scaled ? num_lookups : 0);
  plan.bag_scale.resize(weighted ? num_lookups : 0);

  std::uint64_t* const packed = plan.scratch.data();
  std::uint64_t* const other = packed + num_lookups;
  const Lookups lookups{packed, reinterpret_cast<std::uint32_t*>(other + num_lookups),
                        scaled ? reinterpret_cast<float*>(other + num_lookups) + num_lookups : nullptr};
  std::size_t first = 0;
  for (std::size_t f = 0; f < features.size(); ++f) {
    const FeatureInput& feature = features[f];
    const bool good = with_offsets(feature, num_bags, [&](auto offsets) {
      return pack_feature(feature, offsets, first, num_rows, shift, output_width, mean,
                          plan.bag_start.data() + f * (num_bags + 1), lookups);
    });
    if (!good) throw_first_bad_id(feature, f, num_bags, num_rows);
    const std::size_t end = plan.bag_start[f * (num_bags + 1) + num_bags];
    if (weighted) {
      float* const bag_scale = plan.bag_scale.data();
      if (feature.weights == nullptr) {
        std::fill(bag_scale + first, bag_scale + end, 1.0f);
      } else {
        const std::size_t first_id =
            with_offsets(feature, num_bags, [](auto offsets) { return static_cast<std::size_t>(offsets[0]); });
        std::copy_n(feature.weights + first_id, end - first, bag_scale + first);
      }
    }
    first = end;
  }

  std::size_t num_unique = 0;
  const std::uint64_t* sorted = packed;
  if (num_lookups != 0) {
    sorted = radix_sort(packed, other, num_lookups, shift, digits_of(row_bits));
    num_unique = 1;
    for (std::size_t j = 1; j < num_lookups; ++j) num_unique += (sorted[j] ^ sorted[j - 1]) >> shift != 0;
  }
  plan.rows.resize(num_unique);
  plan.row_start.resize(num_unique + 1);

  const std::uint64_t position_mask = (std::uint64_t{1} << shift) - 1;
  std::uint64_t* const rows = plan.rows.data();
  std::uint32_t* const row_start = plan.row_start.data();
  std::uint64_t previous = ~std::uint64_t{0};
  std::uint32_t unique = std::numeric_limits<std::uint32_t>::max();  // the first lookup makes it 0
  for (std::size_t j = 0; j < num_lookups; ++j) {
    const std::uint64_t row = sorted[j] >> shift;
    const std::size_t p = sorted[j] & position_mask;
    if (row != previous) {
      ++unique;
      rows[unique] = row;
      row_start[unique] = static_cast<std::uint32_t>(j);
      previous = row;
    }
    position[p] = unique;
    plan.gradient_offset[j] = lookups.gradient_offset[p];
    if (scaled) plan.scale[j] = lookups.scale[p];
  }
  row_start[num_unique] = static_cast<std::uint32_t>(num_lookups);
}

}  // namespace holdfast

// Plan: a batch's unique rows per table and where each of them occurs. Needs only the ids, so it runs ahead.
//
// Invariants
// - rows are unique and ascending; occurrences of a row are in order of occurrence (feature by feature in the order
//   in which the features are given, then by position), so sums over them have one order.
// - A pure function of its input: no state, no randomness, no dependence on threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

namespace holdfast {

enum class Pooling : std::uint32_t { sum = 0, mean = 1 };

// A feature's ids for one batch: bag b holds ids[offsets[b]] .. ids[offsets[b + 1]] (offsets[0] need not be 0).
struct FeatureInput {
  const std::int64_t* ids;
  const void* offsets;          // [num_bags + 1], int32 or int64
  bool offsets_are_int64;
  const float* weights;         // per-sample weights, parallel to ids, or null
  std::uint32_t output_column;  // first column of this feature in the pooled output
};

// A bad id or offset. `feature` indexes the table's features; sample is the bag.
struct BadId : std::runtime_error {
  BadId(const std::string& what, std::size_t feature_, std::size_t sample_, std::int64_t value_)
      : std::runtime_error(what), feature(feature_), sample(sample_), value(value_) {}
  std::size_t feature;
  std::size_t sample;
  std::int64_t value;
};

// One table's part of a plan. Vectors keep their capacity from batch to batch.
struct TablePlan {
  std::vector<std::uint64_t> rows;              // [num_unique] ascending
  std::vector<std::uint32_t> row_start;         // [num_unique + 1]
  std::vector<std::uint32_t> gradient_offset;   // [num_lookups], by row: bag * output_width + output_column
  std::vector<float> scale;                     // [num_lookups], by row; empty when every scale is 1
  std::vector<std::uint32_t> position;          // [num_lookups], original order: index into rows
  std::vector<float> bag_scale;                 // [num_lookups], original order: per-sample weights; empty without
  std::vector<std::uint32_t> bag_start;  // [num_features * (num_bags + 1)]: per feature, indexes into position

  std::size_t num_unique() const { return rows.size(); }
  std::size_t num_lookups() const { return position.size(); }
};

// Plans one table: checks that 0 <= id < num_rows (BadId, before anything of `plan` is used), packs (row, position)
// into 64 bits, radix-sorts by row (stable) and cuts the runs. num_bags is the batch size, output_width the columns
// of the whole pooled output. Throws std::length_error when lookups or offsets do not fit 32 bits.
void plan_table(std::span<const FeatureInput> features, std::size_t num_bags, std::uint64_t num_rows, Pooling pooling,
                std::uint32_t output_width, TablePlan& plan);

}  // namespace holdfast

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
#include <vector>

#include "step/jagged.h"

namespace holdfast {

enum class Pooling : std::uint32_t { sum = 0, mean = 1 };

// A feature's ids for one batch, and where the sums of its bags go: bag b's is dim floats of the pooled output, from
// first_output + b * output_stride on.
struct FeatureInput {
  JaggedIds bags;
  const float* weights;  // per-sample weights, parallel to ids, or null
  std::uint32_t first_output;
  std::uint32_t output_stride;
  // Where the bags are parts of longer ones, whose mean is taken elsewhere: what a weighted bag's gradients are
  // multiplied with beside the weights, each bag's, or null.
  const float* bag_factor = nullptr;
};

// One table's part of a plan. Vectors keep their capacity from batch to batch.
struct TablePlan {
  std::vector<std::uint64_t> rows;              // [num_unique] ascending
  std::vector<std::uint32_t> row_start;         // [num_unique + 1]
  std::vector<std::uint32_t> gradient_offset;   // [num_lookups], by row: where its bag's sum begins in the output
  std::vector<float> scale;                     // [num_lookups], by row; empty when every scale is 1
  std::vector<std::uint32_t> position;          // [num_lookups], original order: index into rows
  std::vector<float> bag_scale;                 // [num_lookups], original order: per-sample weights; empty without
  std::vector<std::uint32_t> bag_start;  // per feature [its num_bags + 1]: indexes into position

  std::vector<std::uint64_t> keys;  // of a table with keys: [num_unique], the rows'; else empty
  // Where keys may have no rows, as an evaluation finds them: these come last, by numbers that no row has.
  std::size_t num_placed = 0;
  std::uint64_t planned_after = 0;  // of a table with keys: the step that was over when their rows were found

  std::size_t num_unique() const { return rows.size(); }
  std::size_t num_lookups() const { return position.size(); }
};

// Plans one table: checks that 0 <= id < num_rows (BadId, before anything of `plan` is used), packs (row, position)
// into 64 bits, radix-sorts by row (stable) and cuts the runs. Throws std::length_error when lookups or offsets do not
// fit 32 bits.
void plan_table(std::span<const FeatureInput> features, std::uint64_t num_rows, Pooling pooling, TablePlan& plan);

// Distinct ids, each by a number below rows.size(), and the rows that they have.
struct NumberedRows {
  std::span<const std::int64_t> keys;         // by number
  std::span<const std::int64_t> rows;         // by number; each its own
  std::span<const std::uint32_t> counts;      // by number: of its lookups
  std::span<const std::uint32_t> number_of;   // [num_lookups], original order
};

// The same plan of ids whose rows are known by their numbers: what is sorted is the rows, not the lookups. It fills in
// the rows' keys.
void plan_numbered_table(std::span<const FeatureInput> features, const NumberedRows& numbered, Pooling pooling,
                         TablePlan& plan);

// The same of rows that ascend and have no keys: nothing is sorted.
void plan_ordered_table(std::span<const FeatureInput> features, std::span<const std::uint64_t> rows,
                        std::span<const std::uint32_t> counts, std::span<const std::uint32_t> number_of,
                        Pooling pooling, TablePlan& plan);

}  // namespace holdfast

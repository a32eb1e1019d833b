// Gradients: what a step's captures sum to per row, and the gradient of per-sample weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "rows/row_table.h"
#include "step/capture.h"

namespace holdfast {

// Where each of `rows` is among `merged`; both ascend, and all of them are there.
std::vector<std::uint32_t> positions_among(const std::uint64_t* merged, const std::vector<std::uint64_t>& rows);

Occurrences occurrences_of(const TablePlan& plan);

// Sums the gradients of a step's captures, all of one collection, per row. Throws step where there are none, or where
// they are of several collections.
std::unique_ptr<SummedGradients> sum_gradients(const std::vector<RowTable>& tables,
                                               std::vector<RowGradients> gradients);

// d loss / d per-sample weights, in the order of the plan's lookups of feature f.
void scale_gradients(const std::vector<RowTable>& tables, const Capture& capture, std::size_t feature,
                     const float* grad, float* out);

}  // namespace holdfast

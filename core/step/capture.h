// Capture: one forward's rows, as lookup and update read them; and the gradients that come back for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "step/collection.h"

namespace holdfast {

struct Capture {
  virtual ~Capture() = default;

  std::shared_ptr<const Plan> plan;
  std::uint64_t pool = 0;  // whose it is: the number of the opened pool
  std::uint64_t step = 0;
  std::size_t bytes = 0;            // that it takes in the log
  std::uint64_t order = 0;          // captures of a pool, in the order in which they were made
  std::vector<WorkingRows> tables;  // one for each of the plan's
};

// A capture, and the gradient of its pooled output: float32 [num_bags, output_width], contiguous.
struct RowGradients {
  std::shared_ptr<const Capture> capture;
  const float* grad;
};

// Row gradients summed per unique row over one or more captures of a step.
struct SummedGradients {
  std::shared_ptr<const CollectionSpec> spec;
  std::vector<std::uint64_t> num_rows;  // per table
  std::vector<std::vector<float>> sums; // per table [num_rows, dim]
  std::vector<WorkingRows> merged;      // per table, of several captures
  std::vector<std::vector<std::byte>> storage;  // of `merged`
  std::vector<std::vector<std::uint64_t>> keys;  // likewise, of tables with keys
  std::vector<std::shared_ptr<const Capture>> captures;
  double sum_of_squares;  // over all elements, before any scaling

  // Per table, the rows before the step. Those of one capture lie where it has them now: its record may have moved.
  const std::vector<WorkingRows>& rows() const { return captures.size() == 1 ? captures.front()->tables : merged; }
};

}  // namespace holdfast

// Relaxed lookup: a batch pooled in two parts, the first of them while the step before it still computes.
//
// Invariants
// - A batch's rows are split by the rows of the batch before it: those that it has, too, are *shared*, the others *own*.
//   So the split is a function of the ids of both, and nothing else.
// - A bag is (the sum of its own rows) + (the sum of its shared rows), each from zero and in order of occurrence, and
//   divided last where it is a mean. A bag with rows of one kind has the bits of a plain lookup: no sum from zero is
//   -0.0, so adding the other sum, which is 0.0, changes nothing.
// - Own rows are the same before and after the update of the batch before.
#pragma once

#include <functional>
#include <vector>

#include "rows/row_table.h"
#include "step/collection.h"
#include "step/lookup.h"

namespace holdfast {

class RelaxedLookup {
 public:
  // Fills in the rows of a plan whose tables have rows and nothing else.
  using Read = std::function<void(const Plan& plan, const std::vector<WorkingRows>& rows)>;

  // Writes the sums of own rows into out [num_bags, output_width]; a mean is left to pool_shared.
  void pool_own(const Plan& next, const Plan& now, const std::vector<RowTable>& tables, const Read& read, float* out);

 private:
  RowScratch scratch_;
};

// Adds the sums of shared rows, from `rows`, the working rows of the tables of `next`, and takes the means.
void pool_shared(const Plan& next, const Plan& now, const std::vector<WorkingRows>& rows,
                 const std::vector<RowTable>& tables, float* out);

// Lookups of each table of a plan, and those of them that are of rows that `now` has.
std::vector<std::uint64_t> num_lookups(const Plan& plan);
std::vector<std::uint64_t> num_shared_lookups(const Plan& next, const Plan& now);

}  // namespace holdfast

// Relaxed lookup: a batch pooled in two parts, the first of them while the step before it still computes.
//
// Invariants
// - A batch's rows are split by the rows of the batch before it: those that it has, too, are *shared*, the others *own*.
//   So the split is a function of the ids of both, and nothing else.
// - A bag is (the sum of its own rows) + (the sum of its shared rows), each from zero and in order of occurrence, and
//   divided last where it is a mean. A bag with rows of one kind has the bits of a plain lookup: no sum from zero is
//   -0.0, so adding the other sum, which is 0.0, changes nothing.
// - Own rows are the same before and after the update of the batch before. Of a table that leaves keys behind, that step
//   may leave behind a key whose row was read before it. What was read says so: its record does not count any
//   more. Bags with such a row get their sums of own rows anew, from the capture, in the same order. So a
//   relaxed lookup reads of every key what a plain one reads, whatever became of the step before.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "keys/living_keys.h"
#include "rows/row_table.h"
#include "step/collection.h"
#include "step/lookup.h"

namespace holdfast {

class RelaxedLookup {
 public:
  // Fills in the rows of a plan whose tables have rows and nothing else.
  using Read = std::function<void(const Plan& plan, const std::vector<WorkingRows>& rows)>;
  // Of a table of the pool, by number: which records count.
  using LivingOf = std::function<const LivingKeys&(std::uint32_t number)>;

  // Writes the sums of own rows into out [num_bags, output_width]; a mean is left to pool_shared.
  void pool_own(const Plan& next, const Plan& now, const std::vector<RowTable>& tables, const Read& read, float* out);
  // Adds the sums of shared rows, from `rows`, the working rows of the tables of `next`, and takes the means. Throws step
  // where keys may have been left behind since, and the collection's last pool_own was of another plan.
  void pool_shared(const Plan& next, const Plan& now, const std::vector<WorkingRows>& rows,
                   const std::vector<RowTable>& tables, const LivingOf& living_of, float* out);

 private:
  // What was read of own rows. records: of each table that leaves keys behind, and of each unique row of it, the record
  // that counted; else one without updates.
  struct ReadAhead {
    std::shared_ptr<const CollectionSpec> spec;
    std::weak_ptr<const Plan> next;
    std::vector<std::vector<KeyRecord>> records;
  };
  // Of a collection.
  ReadAhead& read_ahead(const Plan& plan);

  RowScratch scratch_;
  std::vector<ReadAhead> read_ahead_;
};

// Lookups of each table of a plan, and those of them that are of rows that `now` has.
std::vector<std::uint64_t> num_lookups(const Plan& plan);
std::vector<std::uint64_t> num_shared_lookups(const Plan& next, const Plan& now);

}  // namespace holdfast

// Collection: which features read which tables, and the plan of a batch for all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "plan.h"

namespace holdfast {

struct CollectionSpec {
  struct Feature {
    std::uint32_t table;   // index into `tables`
    std::uint32_t column;  // first column of its sums in the pooled output
    std::string name;
  };
  struct Table {
    std::uint32_t number;  // in the pool
    std::uint64_t num_rows;
    std::uint32_t dim;
    Pooling pooling;
  };
  std::vector<Table> tables;
  std::vector<Feature> features;  // in the order of the output
  std::uint32_t output_width;     // columns: the sum of the features' dims
};

// A batch's ids as they come: bag b of the feature in block k holds ids[offsets[k * num_bags + b]] up to
// ids[offsets[k * num_bags + b + 1]]. `block_of[f]` says which block is feature f's.
struct BatchIds {
  const std::int64_t* ids;
  const void* offsets;
  bool offsets_are_int64;
  const float* weights;  // per id, or null
  std::size_t num_bags;
  std::vector<std::uint32_t> block_of;
};

// One batch's plan for a collection: a TablePlan for each of its tables. Whoever comes with the same plan from Python
// again comes with the same owner: an announced plan is known by it.
struct Plan : std::enable_shared_from_this<Plan> {
  std::shared_ptr<const CollectionSpec> spec;
  std::size_t num_bags = 0;
  bool weighted = false;
  std::vector<TablePlan> tables;
  std::vector<std::uint32_t> index_in_table;  // feature f is which of its table's features
  std::vector<std::pair<std::size_t, std::size_t>> spans;  // feature f's ids in the batch: [first, second)

  // Of feature f: bag b's positions in the table's plan are bag_start[b] up to bag_start[b + 1].
  const std::uint32_t* bag_start(std::size_t f) const {
    return tables[spec->features[f].table].bag_start.data() + index_in_table[f] * (num_bags + 1);
  }
  std::size_t num_unique() const;
  std::size_t num_lookups() const;
};

// Plans are handed out again when nobody holds them any more: their vectors keep their memory from batch to batch.
// Thread-safe.
class PlanPool : public std::enable_shared_from_this<PlanPool> {
 public:
  explicit PlanPool(std::shared_ptr<const CollectionSpec> spec) : spec_(std::move(spec)) {}
  std::shared_ptr<Plan> take();
  const std::shared_ptr<const CollectionSpec>& spec() const { return spec_; }

 private:
  std::shared_ptr<const CollectionSpec> spec_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Plan>> idle_;
};

// BadId names the feature; its `feature` is numbered as in the collection.
void plan_batch(const BatchIds& batch, bool parallel, Plan& plan);

}  // namespace holdfast

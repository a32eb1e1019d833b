// Collection: which features read which tables, and the plan of a batch for all of them.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/reuse_pool.h"
#include "keys/key_directory.h"
#include "rows/shards.h"
#include "step/plan.h"

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
    bool mean_elsewhere = false;  // the bags are parts of longer ones, whose mean is taken where these are whole
    std::shared_ptr<KeyDirectory> keys{};  // of a table whose ids are keys
    ShardLayout layout{};  // of one in shards, whose rows are known by their places

    // Of the ids as trainers send them: all are below.
    std::uint64_t end_id() const { return keys == nullptr ? num_rows : ~std::uint64_t{0}; }
  };
  std::vector<Table> tables;
  std::vector<Feature> features;  // in the order of the output
  std::uint32_t output_width;     // columns: the sum of the features' dims
};

// What a feature of a plan reads, and where the sums of its bags go.
struct PlanFeature {
  std::uint32_t table;   // index into the collection's tables
  std::size_t num_bags;
  std::size_t first_bag;  // its bags' starts, num_bags + 1 of them, are bag_start[first_bag] .. of the table's plan
  std::uint32_t first_output;
  std::uint32_t output_stride;
};

// One batch's plan for a collection: a TablePlan for each of its tables. Whoever comes with the same plan from Python
// again comes with the same owner: an announced plan is known by it.
//
// Its features are the collection's; in a routed plan (routed_plan.h), feature f of trainer m is the one at
// f * num_trainers + m. The pooled output is [num_bags, output_width], of a routed plan one row.
struct Plan : std::enable_shared_from_this<Plan> {
  std::shared_ptr<const CollectionSpec> spec;
  std::size_t num_bags = 0;
  std::size_t output_width = 0;
  bool weighted = false;  // some of its ids have per-sample weights
  bool reads_only = false;  // made to be evaluated: new keys have no rows
  std::vector<TablePlan> tables;
  std::vector<PlanFeature> features;
  // Feature f's ids in the batch: [first, second). A routed plan has none.
  std::vector<std::pair<std::size_t, std::size_t>> spans;
  std::vector<std::size_t> output_floats;  // of a routed plan: how much of the output each trainer gets, in order

  // Of feature f: bag b's positions in the table's plan are bag_start[b] up to bag_start[b + 1].
  const std::uint32_t* bag_start(std::size_t f) const {
    return tables[features[f].table].bag_start.data() + features[f].first_bag;
  }
  std::size_t num_lookups_of(std::size_t f) const { return bag_start(f)[features[f].num_bags] - bag_start(f)[0]; }
  std::size_t num_unique() const;
  std::size_t num_lookups() const;
};

// A collection's plans, whose memory is used again. Thread-safe.
class PlanPool {
 public:
  explicit PlanPool(std::shared_ptr<const CollectionSpec> spec) : spec_(std::move(spec)) {}
  std::shared_ptr<Plan> take() {
    auto plan = plans_->take();
    plan->spec = spec_;
    return plan;
  }
  const std::shared_ptr<const CollectionSpec>& spec() const { return spec_; }

 private:
  std::shared_ptr<const CollectionSpec> spec_;
  std::shared_ptr<ReusePool<Plan>> plans_ = std::make_shared<ReusePool<Plan>>();
};

// What is done with keys that have no rows yet: they get some, in order of occurrence; or none, and only their initial
// values are read.
enum class NewKeys { placed, unplaced };

// Plans a table whose ids are keys: the rows of those that are different are looked up first, in the order in which they
// come, feature by feature. Throws full where new keys find no rows, data where a key is of no shard that is here.
void plan_keyed_table(std::span<const FeatureInput> features, const CollectionSpec::Table& table, NewKeys new_keys,
                      TablePlan& plan);

// BadId names the feature; its `feature` is numbered as in the collection. Throws full where new keys find no rows.
void plan_batch(const BatchIds& batch, bool parallel, Plan& plan, NewKeys new_keys = NewKeys::placed);

}  // namespace holdfast

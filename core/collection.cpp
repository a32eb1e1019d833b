#include "collection.h"

#include "parallel.h"

namespace holdfast {

std::size_t Plan::num_unique() const {
  std::size_t sum = 0;
  for (const TablePlan& table : tables) sum += table.num_unique();
  return sum;
}

std::size_t Plan::num_lookups() const {
  std::size_t sum = 0;
  for (const TablePlan& table : tables) sum += table.num_lookups();
  return sum;
}

std::shared_ptr<Plan> PlanPool::take() {
  std::unique_ptr<Plan> plan;
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      plan = std::move(idle_.back());
      idle_.pop_back();
    }
  }
  if (!plan) plan = std::make_unique<Plan>();
  plan->spec = spec_;
  return {plan.release(), [pool = weak_from_this()](Plan* used) {
            std::unique_ptr<Plan> owned(used);
            if (const auto alive = pool.lock()) {
              const std::lock_guard lock(alive->mutex_);
              alive->idle_.push_back(std::move(owned));
            }
          }};
}

void plan_batch(const BatchIds& batch, bool parallel, Plan& plan) {
  const CollectionSpec& spec = *plan.spec;
  plan.num_bags = batch.num_bags;
  plan.weighted = batch.weights != nullptr;
  plan.tables.resize(spec.tables.size());
  plan.index_in_table.assign(spec.features.size(), 0);
  plan.spans.assign(spec.features.size(), {});

  std::vector<std::vector<FeatureInput>> inputs(spec.tables.size());
  std::vector<std::vector<std::uint32_t>> features_of(spec.tables.size());
  for (std::uint32_t f = 0; f < spec.features.size(); ++f) {
    const auto& feature = spec.features[f];
    const std::size_t first = std::size_t{batch.block_of[f]} * batch.num_bags;
    const void* offsets = batch.offsets_are_int64
                              ? static_cast<const void*>(static_cast<const std::int64_t*>(batch.offsets) + first)
                              : static_cast<const void*>(static_cast<const std::int32_t*>(batch.offsets) + first);
    const auto offset_at = [&](std::size_t i) {
      return static_cast<std::size_t>(batch.offsets_are_int64 ? static_cast<const std::int64_t*>(batch.offsets)[i]
                                                              : static_cast<const std::int32_t*>(batch.offsets)[i]);
    };
    plan.spans[f] = {offset_at(first), offset_at(first + batch.num_bags)};
    plan.index_in_table[f] = static_cast<std::uint32_t>(inputs[feature.table].size());
    inputs[feature.table].push_back({batch.ids, offsets, batch.offsets_are_int64, batch.weights, feature.column});
    features_of[feature.table].push_back(f);
  }
  const auto plan_one = [&](std::size_t t) {
    const auto& table = spec.tables[t];
    try {
      plan_table(inputs[t], batch.num_bags, table.num_rows, table.pooling, spec.output_width, plan.tables[t]);
    } catch (const BadId& bad) {
      const std::uint32_t f = features_of[t][bad.feature];
      throw BadId("feature '" + spec.features[f].name + "': " + bad.what(), f, bad.sample, bad.value);
    }
  };
  if (parallel) {
    parallel_for(spec.tables.size(), plan_one);
  } else {
    for (std::size_t t = 0; t < spec.tables.size(); ++t) plan_one(t);
  }
}

}  // namespace holdfast

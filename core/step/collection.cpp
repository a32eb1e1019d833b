#include "step/collection.h"

#include <algorithm>
#include <cstdint>
#include <span>

#include "base/float_mode.h"
#include "base/parallel.h"
#include "step/distinct_keys.h"

namespace holdfast {

void plan_keyed_table(std::span<const FeatureInput> features, const CollectionSpec::Table& table, NewKeys new_keys,
                      TablePlan& plan) {
  static thread_local DistinctKeys distinct;
  static thread_local std::vector<std::int64_t> rows;
  std::size_t num_ids = 0;
  for (std::size_t f = 0; f < features.size(); ++f) num_ids += checked_num_ids(features[f].bags, f);
  distinct.begin(table.keys->seed(), num_ids);
  for (const FeatureInput& feature : features) distinct.add(all_ids(feature.bags));
  rows.resize(distinct.keys().size());
  std::uint64_t num_unplaced = 0;
  if (new_keys == NewKeys::placed) {
    plan.planned_after = table.keys->place(distinct.keys(), rows.data());
  } else {
    table.keys->find(distinct.keys(), rows.data());
    for (std::int64_t& row : rows) {
      if (row == KeyDirectory::no_row) row = static_cast<std::int64_t>(table.num_rows + num_unplaced++);
    }
  }
  plan_numbered_table(features, {distinct.keys(), rows, distinct.counts(), distinct.number_of()}, table.pooling, plan);
  plan.num_placed = plan.num_unique() - num_unplaced;
}

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

void plan_batch(const BatchIds& batch, bool parallel, Plan& plan, NewKeys new_keys) {
  const CollectionSpec& spec = *plan.spec;
  plan.num_bags = batch.num_bags;
  plan.output_width = spec.output_width;
  plan.weighted = batch.weights != nullptr;
  plan.reads_only = new_keys == NewKeys::unplaced;
  plan.tables.resize(spec.tables.size());
  plan.features.clear();
  plan.spans.clear();
  plan.output_floats.clear();

  std::vector<std::vector<FeatureInput>> inputs(spec.tables.size());
  std::vector<std::vector<std::uint32_t>> features_of(spec.tables.size());
  for (std::uint32_t f = 0; f < spec.features.size(); ++f) {
    const auto& feature = spec.features[f];
    const JaggedIds ids = ids_of(batch, f, 0, batch.num_bags);
    with_offsets(ids, [&](auto offsets) {
      plan.spans.emplace_back(static_cast<std::size_t>(offsets.front()), static_cast<std::size_t>(offsets.back()));
    });
    plan.features.push_back({feature.table, batch.num_bags, inputs[feature.table].size() * (batch.num_bags + 1),
                             feature.column, spec.output_width});
    inputs[feature.table].push_back({ids, batch.weights, feature.column, spec.output_width});
    features_of[feature.table].push_back(f);
  }
  const auto plan_one = [&](std::size_t t) {
    const DefaultFloatMode mode;  // of what lookups are multiplied with
    const auto& table = spec.tables[t];
    try {
      if (table.keys != nullptr) {
        plan_keyed_table(inputs[t], table, new_keys, plan.tables[t]);
      } else {
        plan_table(inputs[t], table.num_rows, table.pooling, plan.tables[t]);
      }
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

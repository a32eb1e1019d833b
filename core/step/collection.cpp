#include "step/collection.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <unordered_map>

#include "base/parallel.h"

namespace holdfast {
namespace {

// Rows of keys that have none: each its own, from `first_row` on. Returns how many.
std::uint64_t number_unplaced(std::span<const std::int64_t> keys, std::span<std::int64_t> rows,
                              std::uint64_t first_row) {
  std::unordered_map<std::int64_t, std::int64_t> unplaced;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    if (rows[i] != KeyDirectory::no_row) continue;
    rows[i] = unplaced.try_emplace(keys[i], static_cast<std::int64_t>(first_row + unplaced.size())).first->second;
  }
  return unplaced.size();
}

// Plans a table whose ids are keys: their rows are looked up first, feature by feature, in order of occurrence.
void plan_keyed_table(std::vector<FeatureInput> features, const CollectionSpec::Table& table, NewKeys new_keys,
                      TablePlan& plan) {
  static thread_local std::vector<std::int64_t> keys;
  static thread_local std::vector<std::int64_t> rows;
  keys.clear();
  std::vector<std::size_t> first_of;
  for (std::size_t f = 0; f < features.size(); ++f) {
    checked_num_ids(features[f].bags, f);
    const auto ids = all_ids(features[f].bags);
    first_of.push_back(keys.size());
    keys.insert(keys.end(), ids.begin(), ids.end());
  }
  rows.resize(keys.size());
  std::uint64_t num_unplaced = 0;
  if (new_keys == NewKeys::placed) {
    plan.planned_after = table.keys->place(keys, rows.data());
  } else {
    table.keys->find(keys, rows.data());
    num_unplaced = number_unplaced(keys, rows, table.num_rows);
  }
  for (std::size_t f = 0; f < features.size(); ++f) {
    // What the offsets point to begins where the feature's rows do.
    const std::int64_t first = with_offsets(features[f].bags, [](auto offsets) { return std::int64_t{offsets[0]}; });
    features[f].bags.ids = rows.data() + (static_cast<std::int64_t>(first_of[f]) - first);
  }
  plan_table(features, num_unplaced == 0 ? table.keys->end_row() : table.num_rows + num_unplaced, table.pooling, plan);
  plan.keys.resize(plan.num_unique());
  for (std::size_t p = 0; p < keys.size(); ++p) plan.keys[plan.position[p]] = static_cast<std::uint64_t>(keys[p]);
  plan.num_placed = plan.num_unique() - num_unplaced;
}

}  // namespace

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

#include "binding/plans.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <optional>
#include <utility>

#include "binding/arrays.h"
#include "binding/module.h"
#include "routing/routed_plan.h"
#include "rows/row_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using Words = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Plan> plan_of(Collection& collection, const Ids& ids, const Offsets& offsets,
                              const std::optional<ConstFloatVector>& weights,
                              const std::vector<std::uint32_t>& block_of, std::size_t num_blocks, bool parallel,
                              bool evaluates) {
  const BatchIds batch = batch_of(ids, offsets, weights, block_of, num_blocks, collection.spec->features.size());
  auto plan = collection.plans->take();
  const nb::gil_scoped_release unlocked;
  plan_batch(batch, parallel, *plan, evaluates ? NewKeys::unplaced : NewKeys::placed);
  return plan;
}

std::shared_ptr<Plan> routed_plan_of(Collection& collection, const CountMatrix& counts, const Words& messages,
                                     bool parallel, bool evaluates) {
  if (counts.shape(1) != collection.spec->features.size() || counts.shape(2) != 2) {
    throw nb::value_error("expected counts [num_trainers, num_features, 2]");
  }
  auto plan = collection.plans->take();
  const std::vector<BagCounts> of_trainers = counts_in(counts);
  const nb::gil_scoped_release unlocked;
  plan_routed({of_trainers.data(), counts.shape(0), {messages.data(), messages.size()}}, parallel, *plan,
              evaluates ? NewKeys::unplaced : NewKeys::placed);
  return plan;
}

}  // namespace

Collection make_collection(const std::vector<format::TableRecord>& records, const std::vector<std::uint32_t>& tables,
                           const std::vector<std::tuple<std::string, std::uint32_t>>& features,
                           const std::function<std::shared_ptr<KeyDirectory>(std::uint32_t)>& keys_of) {
  auto spec = std::make_shared<CollectionSpec>();
  for (const std::uint32_t number : tables) {
    const format::TableRecord& record = records.at(number);
    const auto layout = shard_layout_of(record);
    // Of a split table an owner has a part of each bag: the mean is taken where the whole bag is known (router.h).
    const bool is_split = layout && layout->is_split();
    const Pooling pooling = static_cast<Pooling>(record.pooling);
    spec->tables.push_back({number, layout ? layout->end_place() : record.num_embeddings, record.embedding_dim,
                            is_split ? Pooling::sum : pooling, is_split && pooling == Pooling::mean, keys_of(number),
                            layout.value_or(ShardLayout{})});
  }
  spec->output_width = 0;
  for (const auto& [name, table] : features) {
    spec->features.push_back({table, spec->output_width, name});
    spec->output_width += spec->tables.at(table).dim;
  }
  auto plans = std::make_shared<PlanPool>(spec);
  return {std::move(spec), std::move(plans)};
}

void bind_plans(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "A batch's unique rows per table and where they occur.")
      .def_ro("num_bags", &Plan::num_bags)
      .def_prop_ro("num_unique", &Plan::num_unique)
      .def_prop_ro("num_lookups", &Plan::num_lookups)
      .def_prop_ro("output_width", [](const Plan& plan) { return plan.output_width; })
      .def(
          "rows", [](const Plan& plan, std::size_t table) { return plan.tables.at(table).rows; }, "table"_a,
          "The unique rows of one of the collection's tables, ascending.")
      .def(
          "keys", [](const Plan& plan, std::size_t table) { return plan.tables.at(table).keys; }, "table"_a,
          "Of a table whose ids are keys: those of its rows, as 64 bits without a sign; else nothing.")
      .def_ro("spans", &Plan::spans, "Per feature, which of the batch's ids are its: (begin, end).")
      .def_ro("output_floats", &Plan::output_floats, "Of a routed plan: how much of the output each trainer gets.");

  nb::class_<Collection>(m, "Collection", "Which features read which tables of a pool.")
      .def_prop_ro("output_width", [](const Collection& c) { return c.spec->output_width; })
      .def_prop_ro(
          "takes_mean",
          [](const Collection& c) {
            std::vector<bool> of_tables;
            for (const auto& table : c.spec->tables) of_tables.push_back(table.pooling == Pooling::mean);
            return of_tables;
          },
          "Of each table: whether its lookups divide a bag's sum by the bag's length. An owner's of a split table do "
          "not: "
          "it has parts of bags.")
      .def("plan", &plan_of, "ids"_a, "offsets"_a, "weights"_a.none(), "block_of"_a, "num_blocks"_a, "parallel"_a,
           "evaluates"_a = false,
           "Plans a batch; ids int64, offsets int32 or int64 [num_blocks * batch_size + 1]. evaluates: it is only "
           "looked up, so new keys get no rows. Raises IdError, PoolFull.")
      .def(
          "plan_routed", &routed_plan_of, "counts"_a, "messages"_a, "parallel"_a, "evaluates"_a = false,
          "Plans what trainers sent, their messages one after the other; counts int64 [num_trainers, num_features, 2], "
          "as their routes say for this owner. The output is [1, output_width], trainer by trainer. evaluates: it is "
          "only "
          "looked up, so new keys get no rows. Raises DataError, PoolFull.");
}

}  // namespace holdfast

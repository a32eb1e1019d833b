// Router and Route, for the module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/arrays.h"
#include "binding/module.h"
#include "keys/key_shards.h"
#include "routing/router.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

// (num_embeddings, embedding_dim, pooling, first_shard, is_split, (pool seed, table's number) where its ids are keys).
using TableTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, bool,
                              std::optional<std::tuple<std::uint64_t, std::uint64_t>>>;

RouterSpec spec_of(const std::vector<TableTuple>& tables,
                   const std::vector<std::tuple<std::string, std::uint32_t>>& features,
                   const std::vector<std::uint32_t>& owner_of_shard, std::uint32_t num_owners, bool numbers_ids) {
  RouterSpec spec;
  const std::uint32_t num_shards = static_cast<std::uint32_t>(owner_of_shard.size());
  for (const auto& [num_rows, dim, pooling, shard, is_split, keys] : tables) {
    const ShardLayout layout =
        is_split ? ShardLayout::split(num_rows, num_shards, shard) : ShardLayout::whole(num_rows, shard);
    const std::uint64_t key_seed = keys ? key_shard_seed(std::get<0>(*keys), std::get<1>(*keys)) : 0;
    spec.tables.push_back({layout, dim, static_cast<Pooling>(pooling), keys.has_value(), key_seed});
  }
  for (const auto& [name, table] : features) spec.features.push_back({name, table});
  spec.owner_of_shard = owner_of_shard;
  spec.num_owners = num_owners;
  spec.numbers_ids = numbers_ids;
  return spec;
}

template <class T>
auto view_of(std::vector<T>& values) {
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(values.data(), {values.size()});
}

template <class Matrix, class Vector>
void check_shapes(const Route& route, const Matrix& pooled, const Vector& blocks) {
  if (pooled.shape(0) != route.num_bags || pooled.shape(1) != route.spec->output_width) {
    throw nb::value_error("expected [num_bags, output_width]");
  }
  if (blocks.shape(0) != route.num_floats()) throw nb::value_error("expected as many floats as block_floats add up to");
}

}  // namespace

void bind_routing(nb::module_& m) {
  nb::class_<Route>(m, "Route", "Where one batch's ids went. Its arrays are views of it.")
      .def_ro("num_bags", &Route::num_bags)
      .def_prop_ro(
          "counts",
          [](Route& route) {
            const std::size_t num_features = route.spec->features.size();
            return nb::ndarray<nb::numpy, std::int64_t, nb::ndim<3>>(&route.counts.data()->bags,
                                                                     {route.spec->num_owners, num_features, 2});
          },
          nb::rv_policy::reference_internal,
          "int64 [num_owners, num_features, 2]: bags; ids, and 2^32 more where they have per-sample weights, and 2^33 "
          "for each distinct place where they are numbered.")
      .def_prop_ro(
          "message", [](Route& route) { return view_of(route.message); }, nb::rv_policy::reference_internal,
          "What the owners are told, one after the other.")
      .def_prop_ro(
          "message_words", [](Route& route) { return view_of(route.message_words); }, nb::rv_policy::reference_internal,
          "Of each owner.")
      .def_prop_ro(
          "block_floats", [](Route& route) { return view_of(route.block_floats); }, nb::rv_policy::reference_internal,
          "Of each owner: how many floats of vectors it sends back, and of gradients it gets.")
      .def(
          "combine",
          [](const Route& route, const ConstFloatVector& blocks, const FloatMatrix& out) {
            check_shapes(route, out, blocks);
            const nb::gil_scoped_release unlocked;
            route.combine(blocks.data(), out.data());
          },
          "blocks"_a, "out"_a, "Pools the owners' blocks, one after the other, into out [num_bags, output_width].")
      .def(
          "spread",
          [](const Route& route, const ConstFloatMatrix& grad, const FloatVector& blocks) {
            check_shapes(route, grad, blocks);
            const nb::gil_scoped_release unlocked;
            route.spread(grad.data(), blocks.data());
          },
          "grad"_a, "blocks"_a, "The owners' blocks of gradients, from grad [num_bags, output_width].")
      .def(
          "gather_weights",
          [](const Route& route, const ConstFloatVector& blocks, const FloatVector& out) {
            if (blocks.shape(0) != route.weight_source.size()) {
              throw nb::value_error("expected a float for each id that has a weight");
            }
            for (const auto& [begin, end] : route.spans) {
              if (end > out.shape(0)) throw nb::value_error("expected a float for each of the batch's ids");
            }
            const nb::gil_scoped_release unlocked;
            route.gather_weights(blocks.data(), out.data());
          },
          "blocks"_a, "out"_a,
          "The gradients of per-sample weights, from what the owners sent of each of their ids, into out, parallel to "
          "the batch's ids.");

  nb::class_<Router>(m, "Router", "Cuts a trainer's ids among the owners of their rows, and joins what comes back.")
      .def(
          "__init__",
          [](Router* self, const std::vector<TableTuple>& tables,
             const std::vector<std::tuple<std::string, std::uint32_t>>& features,
             const std::vector<std::uint32_t>& owner_of_shard, std::uint32_t num_owners, bool numbers_ids) {
            new (self) Router(spec_of(tables, features, owner_of_shard, num_owners, numbers_ids));
          },
          "tables"_a, "features"_a, "owner_of_shard"_a, "num_owners"_a, "numbers_ids"_a = false,
          "tables: (num_embeddings, embedding_dim, pooling, first_shard, whether it is split, (pool seed, the table's "
          "number) where its ids are keys, else None). numbers_ids: trainers sort for the owners, where messages do "
          "not "
          "get longer by it.")
      .def_prop_ro("output_width", [](const Router& router) { return router.spec().output_width; })
      .def(
          "message_words",
          [](const Router& router, const CountMatrix& counts) {
            if (counts.shape(1) != router.spec().features.size() || counts.shape(2) != 2) {
              throw nb::value_error("expected counts [num_messages, num_features, 2]");
            }
            const std::vector<BagCounts> found = counts_in(counts);
            std::vector<std::uint64_t> words;
            for (std::size_t i = 0; i < counts.shape(0); ++i) {
              words.push_back(router.words_of(found.data() + i * counts.shape(1)));
            }
            return words;
          },
          "counts"_a, "Of the messages with these counts: int64 [num_messages, num_features, 2].")
      .def(
          "route",
          [](const Router& router, const Ids& ids, const Offsets& offsets,
             const std::optional<ConstFloatVector>& weights, const std::vector<std::uint32_t>& block_of,
             std::size_t num_blocks, std::size_t begin, std::size_t end) {
            const BatchIds batch = batch_of(ids, offsets, weights, block_of, num_blocks, router.spec().features.size());
            if (begin > end || end > batch.num_bags) throw nb::value_error("the batch does not have these samples");
            const nb::gil_scoped_release unlocked;
            return router.route(batch, begin, end - begin);
          },
          "ids"_a, "offsets"_a, "weights"_a.none(), "block_of"_a, "num_blocks"_a, "begin"_a, "end"_a,
          "Routes samples begin .. end of a batch, whose arrays are as Collection.plan takes them. Raises IdError.");
}

}  // namespace holdfast

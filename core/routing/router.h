// Router: cuts a trainer's ids among the owners of their rows, and joins what comes back.
//
// Invariants
// - A pure function of the ids, the shards and their owners. Every id goes to one owner, and an owner gets them in order
//   of occurrence: feature by feature, sample by sample. Bags of which an owner has no row are not told of.
// - Owners sum a split table's bags, each its own part; the parts are added here in ascending order of owners, and a
//   mean is taken here, where the whole bag's length is known. Of a whole table the one owner's pooled vectors are
//   copied. So with one owner the bits are those of a collection without shards.
// - spread gives each owner the gradients of the vectors that combine took from it, in the same order. Where ids have
//   per-sample weights, the owner multiplies by weight / length, as one process does; else a mean's is in them.
// - Whether ids are numbered, the ids alone decide; the owner's plan is the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/reuse_pool.h"
#include "routing/route_message.h"
#include "rows/shards.h"
#include "step/jagged.h"
#include "step/plan.h"

namespace holdfast {

struct RouterSpec {
  struct Table {
    ShardLayout layout;
    std::uint32_t dim;
    Pooling pooling;
    bool has_keys = false;  // its ids are keys, which travel as they are
    std::uint64_t key_seed = 0;  // then: of their shards (key_shards.h)

    // Of the ids as they travel: all are below.
    std::uint64_t end_id() const { return has_keys ? ~std::uint64_t{0} : layout.end_place(); }
  };
  struct Feature {
    std::string name;
    std::uint32_t table;  // index into `tables`
    std::uint32_t column = 0;  // first column of its sums in the output: set by Router
  };
  bool takes_mean(std::size_t f) const {  // of owners' parts of bags
    const Table& table = tables[features[f].table];
    return table.layout.is_split() && table.pooling == Pooling::mean;
  }
  std::vector<Table> tables;
  std::vector<Feature> features;  // in the order of the output
  std::vector<std::uint32_t> owner_of_shard;
  std::uint32_t num_owners;
  bool numbers_ids = false;  // sorts for the owners, where the message does not get longer by it
  std::size_t output_width = 0;  // set by Router
};

// Where one batch's ids went. Vectors keep their memory from batch to batch.
struct Route {
  std::shared_ptr<const RouterSpec> spec;
  std::size_t num_bags = 0;
  std::vector<BagCounts> counts;  // [num_owners][num_features]
  std::vector<std::int32_t> message;  // the owners', one after the other (route_message.h)
  std::vector<std::int64_t> message_words;  // of each owner
  std::vector<std::int64_t> block_floats;  // of each owner: vectors that come back, gradients that go
  std::vector<std::uint32_t> bag_of;  // of each vector: its bag, and adds_bit where another one came before it
  std::vector<std::size_t> first_vector;  // [num_owners][num_features]: in bag_of
  std::vector<std::size_t> first_float;  // [num_owners][num_features]: in the blocks, one after the other
  std::vector<std::uint32_t> empty_bags;  // feature by feature
  std::vector<std::size_t> first_empty;  // [num_features + 1]: in empty_bags
  std::vector<float> scale;  // 1 / length of the bags of features whose mean is taken here
  std::vector<std::size_t> first_scale;  // [num_features]: in scale, or no_scale
  bool weighted = false;
  // Of a weighted batch's ids, feature by feature: which of the floats that the owners send of all their ids is its
  // weight's gradient, and what is multiplied with it.
  std::vector<std::uint32_t> weight_source;
  std::vector<float> weight_factor;
  std::vector<std::pair<std::size_t, std::size_t>> spans;  // feature f's ids in the batch: [first, second)

  static constexpr std::uint32_t adds_bit = std::uint32_t{1} << 31;
  static constexpr std::size_t no_scale = ~std::size_t{0};

  std::size_t num_floats() const;  // of all blocks
  // Pools what the owners sent, their blocks one after the other, into out [num_bags, output_width].
  void combine(const float* blocks, float* out) const;
  // The gradients of what they sent, from grad [num_bags, output_width].
  void spread(const float* grad, float* blocks) const;
  // The gradients of the weights, from what the owners sent of each of their ids, into out, parallel to the batch's.
  void gather_weights(const float* blocks, float* out) const;
};

class Router {
 public:
  // Throws config where the spec does not fit together.
  explicit Router(RouterSpec spec);

  const RouterSpec& spec() const { return *spec_; }

  // Routes samples [first, first + count) of a batch. BadId names the feature. Throws std::length_error where there are
  // more ids than 32 bits number. Thread-safe.
  std::shared_ptr<Route> route(const BatchIds& batch, std::size_t first, std::size_t count) const;

  // Of the message that comes with the counts of a trainer for an owner.
  std::uint64_t words_of(const BagCounts* counts) const;

 private:
  std::shared_ptr<const RouterSpec> spec_;
  std::vector<std::uint32_t> number_in_table_;  // feature f is which of its table's features
  std::shared_ptr<ReusePool<Route>> routes_ = std::make_shared<ReusePool<Route>>();
};

}  // namespace holdfast

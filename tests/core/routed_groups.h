// Groups that are drawn: tables, features, who owns what, and a batch that is cut among trainers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "draws.h"
#include "keys/key_directory.h"
#include "routing/routed_plan.h"
#include "routing/router.h"

namespace holdfast {

inline float random_float(Random& random) { return std::normal_distribution<float>()(random); }

// A global batch of a random group: tables, features, who owns what, and how samples are cut among trainers.
struct Group {
  RouterSpec spec;
  std::size_t num_samples = 0;
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> offsets{0};  // [num_features * num_samples + 1]
  std::vector<std::int32_t> narrow_offsets;
  bool wide_offsets = false;
  std::vector<std::size_t> first_sample;  // [num_trainers + 1]
  std::vector<float> weights;  // of each id; not every trainer's samples need have them
  bool weighted = false;

  std::size_t num_trainers() const { return first_sample.size() - 1; }
  const RouterSpec::Table& table_of(std::size_t f) const { return spec.tables[spec.features[f].table]; }

  BatchIds batch() const {
    std::vector<std::uint32_t> block_of;
    for (std::uint32_t f = 0; f < spec.features.size(); ++f) block_of.push_back(f);
    return {ids.data(),   wide_offsets ? static_cast<const void*>(offsets.data()) : narrow_offsets.data(),
            wide_offsets, weighted ? weights.data() : nullptr,
            num_samples,  block_of};
  }

  // The keys that an owner may have rows for; of one process: all.
  std::shared_ptr<KeyDirectory> keys_of(const RouterSpec::Table& table, std::optional<std::uint32_t> owner) const {
    if (!table.has_keys) return nullptr;
    const ShardLayout& layout = table.layout;
    if (!owner) return std::make_shared<KeyDirectory>("t", KeyShards::whole(layout.num_rows), 1);
    KeyShards shards{{}, {}, table.key_seed};
    for (std::uint32_t s = 0; s < (layout.is_split() ? layout.num_shards() : 1); ++s) {
      const std::uint32_t shard = layout.is_split() ? s : layout.first_shard;
      const bool is_here = spec.owner_of_shard[shard] == *owner;
      shards.piece_of.push_back(is_here ? static_cast<std::uint32_t>(shards.pieces.size()) : KeyShards::not_here);
      if (is_here) shards.pieces.push_back({layout.first_place(shard), layout.rows_in(shard)});
    }
    return std::make_shared<KeyDirectory>("t", shards, 2);
  }

  // Of one process (own rows), or of an owner (places).
  std::shared_ptr<CollectionSpec> collection(std::optional<std::uint32_t> owner) const {
    auto collection = std::make_shared<CollectionSpec>();
    for (std::uint32_t t = 0; t < spec.tables.size(); ++t) {
      const auto& [layout, dim, pooling, has_keys, key_seed] = spec.tables[t];
      collection->tables.push_back({t, owner ? layout.end_place() : layout.num_rows, dim,
                                    owner && layout.is_split() ? Pooling::sum : pooling,
                                    owner && layout.is_split() && pooling == Pooling::mean,
                                    keys_of(spec.tables[t], owner), owner ? layout : ShardLayout{}});
    }
    collection->output_width = 0;
    for (const RouterSpec::Feature& feature : spec.features) {
      collection->features.push_back({feature.table, collection->output_width, feature.name});
      collection->output_width += spec.tables[feature.table].dim;
    }
    return collection;
  }
};

inline Group random_group(Random& random) {
  Group group;
  const std::uint32_t num_shards = std::uint32_t{1} << below(random, 5);
  group.spec.num_owners = 1 + static_cast<std::uint32_t>(one_in(random, 4) ? 0 : below(random, 5));
  for (std::uint32_t s = 0; s < num_shards; ++s) {
    group.spec.owner_of_shard.push_back(static_cast<std::uint32_t>(below(random, group.spec.num_owners)));
  }
  for (std::size_t t = 1 + below(random, 3); t > 0; --t) {
    const bool has_keys = one_in(random, 3);
    const std::uint64_t num_rows = 1 + (has_keys            ? std::uint64_t{num_shards} * 4000
                                        : one_in(random, 5) ? below(random, std::uint64_t{1} << 40)
                                        : one_in(random, 3) ? below(random, 4)
                                                            : below(random, 3000));
    const std::uint32_t shard = static_cast<std::uint32_t>(below(random, num_shards));
    constexpr std::uint32_t dims[] = {1, 4, 5, 16, 32};
    group.spec.tables.push_back(
        {one_in(random, 2) ? ShardLayout::whole(num_rows, shard) : ShardLayout::split(num_rows, num_shards, shard),
         dims[below(random, std::size(dims))], one_in(random, 2) ? Pooling::sum : Pooling::mean, has_keys,
         key_shard_seed(1, t)});
  }
  const std::size_t num_features = one_in(random, 10) ? 0 : 1 + below(random, 5);
  group.num_samples = one_in(random, 10) ? 0 : 1 + below(random, 60);
  for (std::size_t f = 0; f < num_features; ++f) {
    const std::uint32_t table = static_cast<std::uint32_t>(below(random, group.spec.tables.size()));
    group.spec.features.push_back({"f" + std::to_string(f), table});
    const std::uint64_t num_rows = group.spec.tables[table].layout.num_rows;
    const std::uint64_t hot = 1 + below(random, one_in(random, 3) ? std::min<std::uint64_t>(num_rows, 3) : num_rows);
    const bool has_keys = group.spec.tables[table].has_keys;
    const std::uint64_t kind = below(random, 5);  // no ids, one for each sample, or any number
    for (std::size_t sample = 0; sample < group.num_samples; ++sample) {
      const std::uint64_t length = kind == 0 ? 0 : kind < 3 ? 1 : one_in(random, 3) ? 0 : below(random, 12);
      for (std::uint64_t i = 0; i < length; ++i) {
        const std::uint64_t id = below(random, hot);
        group.ids.push_back(static_cast<std::int64_t>(has_keys ? counter_rng::mix64(id) : id));
      }
      group.offsets.push_back(static_cast<std::int64_t>(group.ids.size()));
    }
  }
  group.narrow_offsets.assign(group.offsets.begin(), group.offsets.end());
  group.wide_offsets = one_in(random, 2);
  group.weighted = one_in(random, 2);
  group.spec.numbers_ids = one_in(random, 2);
  for (std::size_t i = 0; i < group.ids.size(); ++i) {
    group.weights.push_back(one_in(random, 8) ? 0.0f : random_float(random));
  }
  group.first_sample = {0, group.num_samples};
  for (std::size_t cut = below(random, 4); cut > 0; --cut)
    group.first_sample.push_back(below(random, group.num_samples + 1));
  std::sort(group.first_sample.begin(), group.first_sample.end());
  check::context = std::to_string(num_shards) + " shards, " + std::to_string(group.spec.num_owners) + " owners, " +
                   std::to_string(group.num_trainers()) + " trainers, " + std::to_string(num_features) + " features, " +
                   std::to_string(group.num_samples) + " samples" + (group.weighted ? ", weighted" : "");
  return group;
}

// The plan that an owner makes of what the trainers sent it. Its plans come from one pool, as in production.
inline std::shared_ptr<Plan> plan_of_owner(const Group& group, PlanPool& plans,
                                           const std::vector<std::shared_ptr<const Route>>& routes, std::uint32_t owner,
                                           bool parallel) {
  std::vector<BagCounts> counts;
  std::vector<std::int32_t> messages;
  const std::size_t num_features = group.spec.features.size();
  for (const auto& route : routes) {
    counts.insert(counts.end(), route->counts.begin() + static_cast<std::ptrdiff_t>(owner * num_features),
                  route->counts.begin() + static_cast<std::ptrdiff_t>((owner + 1) * num_features));
    auto begin = route->message.begin();
    for (std::uint32_t o = 0; o < owner; ++o) begin += route->message_words[o];
    messages.insert(messages.end(), begin, begin + route->message_words[owner]);
  }
  auto plan = plans.take();
  plan_routed({counts.data(), routes.size(), messages}, parallel, *plan);
  return plan;
}

}  // namespace holdfast

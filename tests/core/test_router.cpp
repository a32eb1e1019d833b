// Routes and routed plans: trainers and owners together give what one process gives, and what is sent is what a plain
// loop says. Messages that say something impossible are refused.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "draws.h"
#include "keys/key_directory.h"
#include "routing/routed_plan.h"
#include "routing/router.h"
#include "step/gradients.h"
#include "step/lookup.h"
#include "thrown.h"

namespace holdfast {
namespace {

float random_float(Random& random) { return std::normal_distribution<float>()(random); }

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
      collection->tables.push_back(
          {t, owner ? layout.end_place() : layout.num_rows, dim, owner && layout.is_split() ? Pooling::sum : pooling,
           owner && layout.is_split() && pooling == Pooling::mean, keys_of(spec.tables[t], owner)});
    }
    collection->output_width = 0;
    for (const RouterSpec::Feature& feature : spec.features) {
      collection->features.push_back({feature.table, collection->output_width, feature.name});
      collection->output_width += spec.tables[feature.table].dim;
    }
    return collection;
  }
};

Group random_group(Random& random) {
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

// Ids told by numbers, from what tells them one by one.
std::vector<std::int32_t> numbered_words(const std::vector<std::int32_t>& places, bool wide, const BagCounts& counts) {
  std::vector<std::uint64_t> ids;
  for (std::size_t i = 0; i < places.size(); i += wide ? 2 : 1) {
    const std::uint64_t high = wide ? static_cast<std::uint32_t>(places[i + 1]) : 0;
    ids.push_back(static_cast<std::uint32_t>(places[i]) | high << 32);
  }
  std::map<std::uint64_t, std::uint32_t> number_of;
  for (const std::uint64_t id : ids) number_of[id] = 0;
  if (counts.distinct != 0) CHECK(counts.distinct == number_of.size());
  std::vector<std::int32_t> words;
  std::uint32_t next = 0;
  for (auto& [id, number] : number_of) {
    number = next++;
    words.push_back(static_cast<std::int32_t>(id));
    if (wide) words.push_back(static_cast<std::int32_t>(id >> 32));
  }
  const bool in_halves = number_of.size() <= 65536;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint32_t number = number_of[ids[i]];
    if (in_halves && i % 2 == 1) {
      words.back() |= static_cast<std::int32_t>(number << 16);
    } else {
      words.push_back(static_cast<std::int32_t>(number));
    }
  }
  return words;
}

// What a route must say, one id at a time.
void check_route(const Group& group, const Route& route, std::size_t first, std::size_t end) {
  const std::size_t num_features = group.spec.features.size();
  std::vector<std::int32_t> message;
  std::vector<std::uint32_t> bag_of;
  for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
    const std::size_t words_before = message.size();
    std::int64_t floats = 0;
    for (std::size_t f = 0; f < num_features; ++f) {
      const ShardLayout& layout = group.table_of(f).layout;
      std::vector<std::int32_t> lengths, places, weights, factors;
      std::int64_t num_ids = 0;
      for (std::size_t sample = first; sample < end; ++sample) {
        std::int32_t length = 0;
        const std::size_t bag = f * group.num_samples + sample;
        for (std::int64_t i = group.offsets[bag]; i < group.offsets[bag + 1]; ++i) {
          const RouterSpec::Table& table = group.table_of(f);
          const std::uint64_t id = static_cast<std::uint64_t>(group.ids[static_cast<std::size_t>(i)]);
          const std::uint64_t place = table.has_keys ? id : layout.place_of(id);
          const std::uint64_t shard = !layout.is_split() ? layout.first_shard
                                      : table.has_keys   ? key_shard(table.key_seed, id, layout.num_shards())
                                                         : layout.shard_of(place);
          if (group.spec.owner_of_shard[shard] != o) continue;
          ++length;
          places.push_back(static_cast<std::int32_t>(place));
          if (table.has_keys || layout.end_place() > std::uint64_t{1} << 32)
            places.push_back(static_cast<std::int32_t>(place >> 32));
          weights.push_back(std::bit_cast<std::int32_t>(group.weights[static_cast<std::size_t>(i)]));
        }
        if (length == 0) continue;
        lengths.push_back(length);
        factors.push_back(
            std::bit_cast<std::int32_t>(1.0f / static_cast<float>(group.offsets[bag + 1] - group.offsets[bag])));
        num_ids += length;
        bag_of.push_back(static_cast<std::uint32_t>(sample - first));
      }
      const BagCounts& counts = route.counts[o * num_features + f];
      CHECK(counts.bags == static_cast<std::int64_t>(lengths.size()) && counts.ids == num_ids);
      const bool wide = group.table_of(f).has_keys || layout.end_place() > std::uint64_t{1} << 32;
      const std::vector<std::int32_t> numbered = numbered_words(places, wide, counts);
      const bool may_be_numbered = group.spec.numbers_ids && !group.table_of(f).has_keys && counts.has_lengths();
      CHECK((counts.distinct != 0) == (may_be_numbered && !places.empty() && numbered.size() <= places.size()));
      if (counts.distinct != 0) places = numbered;
      CHECK(counts.weighted == (group.batch().weights != nullptr));
      if (counts.has_lengths()) message.insert(message.end(), lengths.begin(), lengths.end());
      message.insert(message.end(), places.begin(), places.end());
      if (group.weighted) message.insert(message.end(), weights.begin(), weights.end());
      if (group.weighted && layout.is_split() && group.table_of(f).pooling == Pooling::mean) {
        message.insert(message.end(), factors.begin(), factors.end());
      }
      floats += counts.bags * group.table_of(f).dim;
    }
    CHECK(route.message_words[o] == static_cast<std::int64_t>(message.size() - words_before));
    CHECK(Router(group.spec).words_of(route.counts.data() + o * num_features) == message.size() - words_before);
    CHECK(route.block_floats[o] == floats);
  }
  CHECK(route.message == message);
  CHECK(route.bag_of.size() == bag_of.size());
  for (std::size_t v = 0; v < bag_of.size(); ++v) CHECK((route.bag_of[v] & ~Route::adds_bit) == bag_of[v]);
}

// The rows of a plan, whose weights are a function of table and row, or key. Of an owner's plan they are known by place.
class Rows {
 public:
  Rows(const Group& group, const Plan& plan, bool places) {
    for (std::size_t t = 0; t < group.spec.tables.size(); ++t) {
      const auto& table = group.spec.tables[t];
      tables_.push_back({{table.dim, RowDtype::f32, RowOptimizer::sgd, 0, 1, t, 0, 0}, table.layout.num_rows});
      numbers_.emplace_back();
      weights_.emplace_back();
      for (std::size_t u = 0; u < plan.tables[t].num_unique(); ++u) {
        const std::uint64_t number = plan.tables[t].rows[u];
        const std::uint64_t row = table.has_keys ? plan.tables[t].keys[u]
                                  : places       ? table.layout.row_of(number)
                                                 : number;
        numbers_.back().push_back(row);
        Random random(row * 8 + t);
        for (std::uint32_t k = 0; k < table.dim; ++k) weights_.back().push_back(random_float(random));
      }
    }
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      working_.push_back({numbers_[t].data(), reinterpret_cast<std::byte*>(weights_[t].data()), nullptr});
    }
  }

  std::vector<float> pool(const Plan& plan) const {
    std::vector<float> out(plan.num_bags * plan.output_width, NAN);
    pool_features(plan, working_, tables_, out.data());
    return out;
  }

  // The gradients of the weights of a plan's lookups, feature by feature.
  std::vector<float> weight_gradients(const std::shared_ptr<Plan>& plan, const float* grad) const {
    Capture capture;
    capture.plan = plan;
    capture.tables = working_;
    std::vector<float> out;
    for (std::size_t f = 0; f < plan->features.size(); ++f) {
      std::vector<float> of_feature(plan->num_lookups_of(f));
      scale_gradients(tables_, capture, f, grad, of_feature.data());
      out.insert(out.end(), of_feature.begin(), of_feature.end());
    }
    return out;
  }

  // Each row's gradient, by table and the row's own number.
  void add_gradients(const Plan& plan, const float* grad,
                     std::map<std::pair<std::size_t, std::uint64_t>, std::vector<float>>& sums) const {
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      const std::uint32_t dim = tables_[t].spec.dim;
      std::vector<float> of_table(plan.tables[t].num_unique() * dim);
      best_kernels().sum_gradients(dim, occurrences_of(plan.tables[t]), grad, nullptr, false, of_table.data(), 0,
                                   plan.tables[t].num_unique());
      for (std::size_t u = 0; u < numbers_[t].size(); ++u) {
        const auto at = of_table.begin() + static_cast<std::ptrdiff_t>(u * dim);
        CHECK(sums.emplace(std::pair(t, numbers_[t][u]), std::vector<float>(at, at + dim)).second);
      }
    }
  }

 private:
  std::vector<RowTable> tables_;
  std::vector<std::vector<std::uint64_t>> numbers_;
  std::vector<std::vector<float>> weights_;
  std::vector<WorkingRows> working_;
};

bool same_bits(const float* a, const float* b, std::size_t count) {
  return count == 0 || std::memcmp(a, b, count * sizeof(float)) == 0;
}

void check_pooled(const Group& group, const std::vector<float>& one_process, const std::vector<float>& out,
                  std::size_t first_sample) {
  const std::size_t width = group.collection(std::nullopt)->output_width;
  for (std::size_t sample = 0; sample * width < out.size(); ++sample) {
    std::size_t column = 0;
    for (std::size_t f = 0; f < group.spec.features.size(); ++f) {
      const auto& [layout, dim, pooling, has_keys, key_seed] = group.table_of(f);
      const float* const mine = out.data() + sample * width + column;
      const float* const theirs = one_process.data() + (first_sample + sample) * width + column;
      if (!layout.is_split() || group.spec.num_owners == 1) {
        CHECK(same_bits(mine, theirs, dim));
      } else {
        for (std::uint32_t k = 0; k < dim; ++k) CHECK(std::abs(mine[k] - theirs[k]) < 1e-5f);
      }
      column += dim;
    }
  }
}

// The plan that an owner makes of what the trainers sent it. Its plans come from one pool, as in production.
std::shared_ptr<Plan> plan_of_owner(const Group& group, PlanPool& plans,
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

void a_group_does_what_one_process_does(Random& random) {
  for (int i = 0; i < 600; ++i) {
    Group group = random_group(random);
    const Router router(group.spec);
    std::vector<std::unique_ptr<PlanPool>> plans;
    for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
      plans.push_back(std::make_unique<PlanPool>(group.collection(o)));
    }
    const auto of_all = group.collection(std::nullopt);
    for (int batch = 0; batch < 2; ++batch) {
      if (batch == 1) group.weighted = !group.weighted;
      const auto of_one_process = std::make_shared<Plan>();
      Plan& one_plan = *of_one_process;
      one_plan.spec = of_all;
      plan_batch(group.batch(), false, one_plan);
      const Rows one_rows(group, one_plan, false);
      const std::vector<float> pooled = one_rows.pool(one_plan);
      std::vector<std::shared_ptr<const Route>> routes;
      for (std::size_t m = 0; m < group.num_trainers(); ++m) {
        const std::size_t first = group.first_sample[m], end = group.first_sample[m + 1];
        routes.push_back(router.route(group.batch(), first, end - first));
        check_route(group, *routes.back(), first, end);
      }

      std::vector<std::shared_ptr<Plan>> owner_plans;
      std::vector<std::vector<float>> received(routes.size());
      for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
        owner_plans.push_back(plan_of_owner(group, *plans[o], routes, o, one_in(random, 2)));
        const Plan& plan = *owner_plans.back();
        const std::vector<float> out = Rows(group, plan, true).pool(plan);
        auto next = out.begin();
        for (std::size_t m = 0; m < routes.size(); ++m) {
          CHECK(static_cast<std::int64_t>(plan.output_floats[m]) == routes[m]->block_floats[o]);
          const auto end = next + static_cast<std::ptrdiff_t>(plan.output_floats[m]);
          received[m].insert(received[m].end(), next, end);
          next = end;
        }
        CHECK(next == out.end());
      }

      std::vector<float> grad;
      for (std::size_t k = 0; k < pooled.size(); ++k) grad.push_back(random_float(random));
      std::vector<std::vector<float>> owner_grad(group.spec.num_owners);
      const std::size_t width = one_plan.output_width;
      for (std::size_t m = 0; m < routes.size(); ++m) {
        std::vector<float> out(routes[m]->num_bags * width, NAN);
        CHECK(received[m].size() == routes[m]->num_floats());
        routes[m]->combine(received[m].data(), out.data());
        check_pooled(group, pooled, out, group.first_sample[m]);
        std::vector<float> blocks(routes[m]->num_floats(), NAN);
        routes[m]->spread(grad.data() + group.first_sample[m] * width, blocks.data());
        auto next = blocks.begin();
        for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
          owner_grad[o].insert(owner_grad[o].end(), next, next + routes[m]->block_floats[o]);
          next += routes[m]->block_floats[o];
        }
      }

      std::map<std::pair<std::size_t, std::uint64_t>, std::vector<float>> one_sums, sums;
      one_rows.add_gradients(one_plan, grad.data(), one_sums);
      for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
        Rows(group, *owner_plans[o], true).add_gradients(*owner_plans[o], owner_grad[o].data(), sums);
      }
      CHECK(sums.size() == one_sums.size());
      for (const auto& [row, sum] : one_sums) CHECK(same_bits(sums.at(row).data(), sum.data(), sum.size()));
      if (!group.weighted) continue;
      // What an owner sends a trainer lies feature by feature, in an owner's plan all trainers' of a feature together.
      std::vector<std::vector<float>> sent(routes.size());
      for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
        const Plan& plan = *owner_plans[o];
        const std::vector<float> found = Rows(group, plan, true).weight_gradients(owner_plans[o], owner_grad[o].data());
        for (std::size_t f = 0, at = 0; f < plan.features.size(); at += plan.num_lookups_of(f++)) {
          const auto begin = found.begin() + static_cast<std::ptrdiff_t>(at);
          auto& to = sent[f % routes.size()];
          to.insert(to.end(), begin, begin + static_cast<std::ptrdiff_t>(plan.num_lookups_of(f)));
        }
      }
      std::vector<float> of_weights(group.ids.size(), NAN);
      for (std::size_t m = 0; m < routes.size(); ++m) {
        CHECK(sent[m].size() == routes[m]->weight_source.size());
        routes[m]->gather_weights(sent[m].data(), of_weights.data());
      }
      const std::vector<float> of_one = one_rows.weight_gradients(of_one_process, grad.data());
      CHECK(same_bits(of_weights.data(), of_one.data(), of_one.size()));
    }
  }
}

template <class Work>
std::string bad_id_of(const Work& work) {
  try {
    work();
  } catch (const BadId& bad) {
    return bad.what() + (" " + std::to_string(bad.feature)) + " " + std::to_string(bad.sample);
  }
  check::fail(__FILE__, __LINE__, "no bad id was found");
}

void bad_ids_are_named_as_one_process_names_them(Random& random) {
  for (int i = 0; i < 300; ++i) {
    Group group = random_group(random);
    if (group.ids.empty()) continue;
    const std::size_t at = below(random, group.ids.size());
    const std::size_t bag = static_cast<std::size_t>(
        std::upper_bound(group.offsets.begin(), group.offsets.end(), static_cast<std::int64_t>(at)) -
        group.offsets.begin() - 1);
    if (group.table_of(bag / group.num_samples).has_keys) continue;  // of which any id is one
    const std::uint64_t num_rows = group.table_of(bag / group.num_samples).layout.num_rows;
    group.ids[at] = one_in(random, 2) ? -1 - static_cast<std::int64_t>(random() >> 1)
                                      : static_cast<std::int64_t>(num_rows + (random() >> 20));
    Plan plan;
    plan.spec = group.collection(std::nullopt);
    const Router router(group.spec);
    const std::size_t first = below(random, bag % group.num_samples + 1);
    CHECK(bad_id_of([&] { plan_batch(group.batch(), false, plan); }) ==
          bad_id_of([&] { router.route(group.batch(), first, group.num_samples - first); }));
  }
}

void what_does_not_fit_together_is_refused() {
  check::context = "refused specs";
  RouterSpec good;
  good.tables = {{ShardLayout::split(10, 4), 4, Pooling::sum}, {ShardLayout::whole(10, 3), 4, Pooling::sum}};
  good.features = {{"a", 0}, {"b", 1}};
  good.owner_of_shard = {0, 1, 1, 0};
  good.num_owners = 2;
  const auto refused = [&](const auto& change) {
    RouterSpec spec = good;
    change(spec);
    CHECK(kind_thrown_by([&] { const Router router(spec); }) == ErrorKind::config);
  };
  refused([](RouterSpec& spec) { spec.owner_of_shard = {}; });
  refused([](RouterSpec& spec) { spec.owner_of_shard = {0, 1, 1}; });
  refused([](RouterSpec& spec) { spec.owner_of_shard = {0, 1}; });
  refused([](RouterSpec& spec) { spec.owner_of_shard.resize(2 * max_shards); });
  refused([](RouterSpec& spec) { spec.num_owners = 1; });
  refused([](RouterSpec& spec) { spec.tables[1].layout.first_shard = 4; });
  refused([](RouterSpec& spec) { spec.features[0].table = 2; });
}

// A message that is good, of two trainers for an owner of two tables, the second one with places of two words.
struct Message {
  std::vector<BagCounts> counts{{2, 3, 0, 0}, {1, 1, 0, 0}, {0, 0, 0, 0}, {2, 2, 0, 0}};
  std::vector<std::int32_t> words{2, 1, 7, 7, 9, 5, 1, /**/ 6, 0, 8, 1};

  std::shared_ptr<const CollectionSpec> spec() const {
    auto spec = std::make_shared<CollectionSpec>();
    spec->tables = {{0, 10, 4, Pooling::sum}, {1, std::uint64_t{1} << 33, 2, Pooling::mean}};
    spec->features = {{0, 0, "narrow"}, {1, 4, "wide"}};
    spec->output_width = 6;
    return spec;
  }
  void plan_into(Plan& plan, bool parallel) const {
    plan.spec = spec();
    plan_routed({counts.data(), 2, words}, parallel, plan);
  }
};

void a_routed_plan_lies_trainer_by_trainer() {
  check::context = "a plan by hand";
  Plan plan;
  Message().plan_into(plan, false);
  CHECK(plan.num_bags == 1 && plan.output_width == 14);
  CHECK((plan.output_floats == std::vector<std::size_t>{10, 4}));
  CHECK((plan.tables[0].rows == std::vector<std::uint64_t>{7, 9}));
  CHECK((plan.tables[0].gradient_offset == std::vector<std::uint32_t>{0, 0, 4}));
  CHECK((plan.tables[1].rows == std::vector<std::uint64_t>{6, (1ull << 32) + 5, (1ull << 32) + 8}));
  CHECK((plan.tables[1].gradient_offset == std::vector<std::uint32_t>{10, 8, 12}));
}

void check_same_plan(const Plan& one, const Plan& other) {
  CHECK(one.output_floats == other.output_floats && one.output_width == other.output_width);
  CHECK(one.tables.size() == other.tables.size());
  for (std::size_t t = 0; t < one.tables.size(); ++t) {
    const TablePlan& a = one.tables[t];
    const TablePlan& b = other.tables[t];
    CHECK(a.rows == b.rows && a.row_start == b.row_start && a.gradient_offset == b.gradient_offset);
    CHECK(a.scale == b.scale && a.position == b.position && a.bag_scale == b.bag_scale && a.bag_start == b.bag_start);
    CHECK(a.keys == b.keys && a.num_placed == b.num_placed);
  }
}

// Numbers take half a word, or a whole one where there are more than 65,536 of them.
void an_owner_plans_numbered_ids_as_the_ids_themselves(Random& random) {
  struct Case {
    std::uint64_t num_rows;
    std::uint64_t hot;
    std::size_t times;  // that each of them comes
    bool is_shorter;
  };
  for (const Case& of : {Case{1000, 1000, 12, true}, Case{70000, 70000, 2, false}, Case{1ull << 33, 1000, 6, true},
                         Case{1ull << 33, 150000, 8, true}}) {
    check::context = std::to_string(of.hot) + " of " + std::to_string(of.num_rows) + " rows, numbered or not";
    Group group;
    const std::uint64_t num_rows = of.num_rows;
    const std::size_t num_ids = of.hot * of.times;
    group.num_samples = 7;
    group.spec.tables = {{ShardLayout::split(num_rows, 2, 0), 4, Pooling::mean}};
    group.spec.features = {{"a", 0}, {"b", 0}};
    group.spec.owner_of_shard = {0, 1};
    group.spec.num_owners = 2;
    for (std::size_t f = 0; f < 2; ++f) {
      const std::size_t before = group.ids.size();
      for (std::size_t i = 0; i < num_ids; ++i) group.ids.push_back(static_cast<std::int64_t>(i % of.hot));
      std::shuffle(group.ids.begin() + static_cast<std::ptrdiff_t>(before), group.ids.end(), random);
      for (std::size_t sample = 1; sample <= group.num_samples; ++sample) {
        group.offsets.push_back(static_cast<std::int64_t>(before + num_ids * sample / group.num_samples));
      }
    }
    group.wide_offsets = true;
    group.first_sample = {0, 3, 7};
    const auto routes_of = [&](bool numbers_ids) {
      group.spec.numbers_ids = numbers_ids;
      std::vector<std::shared_ptr<const Route>> routes;
      for (std::size_t m = 0; m < 2; ++m) {
        const std::size_t first = group.first_sample[m];
        routes.push_back(Router(group.spec).route(group.batch(), first, group.first_sample[m + 1] - first));
      }
      return routes;
    };
    const auto plain = routes_of(false), numbered = routes_of(true);
    std::size_t shorter = 0;
    for (std::uint32_t o = 0; o < 2; ++o) {
      PlanPool plans(group.collection(o));
      check_same_plan(*plan_of_owner(group, plans, plain, o, false), *plan_of_owner(group, plans, numbered, o, false));
      // One of the trainers numbers, the other does not.
      check_same_plan(*plan_of_owner(group, plans, plain, o, false),
                      *plan_of_owner(group, plans, {plain[0], numbered[1]}, o, false));
      for (std::size_t m = 0; m < 2; ++m) {
        CHECK(numbered[m]->message_words[o] <= plain[m]->message_words[o]);
        shorter += numbered[m]->message_words[o] < plain[m]->message_words[o];
      }
    }
    CHECK((shorter > 0) == of.is_shorter);
  }
}

// The same message, its first part numbered.
struct NumberedMessage : Message {
  NumberedMessage() {
    counts[0].distinct = 2;
    words = {2, 1, 7, 9, 0, 1, 5, 1, /**/ 6, 0, 8, 1};
  }
};

// Whether the message is planned: into rows of its two tables. Else it is refused as data.
bool is_planned(const Message& message, Plan& plan) {
  try {
    message.plan_into(plan, false);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::data);
    return false;
  }
  for (std::size_t t = 0; t < 2; ++t) {
    for (const std::uint64_t row : plan.tables[t].rows) CHECK(row < plan.spec->tables[t].num_rows);
  }
  return true;
}

void malformed_numbers_are_refused(Random& random) {
  check::context = "malformed numbers";
  Plan plan, same;
  NumberedMessage().plan_into(plan, false);
  Message().plan_into(same, false);
  check_same_plan(plan, same);
  const auto refused = [&](const auto& change) {
    NumberedMessage message;
    change(message);
    Plan none;
    CHECK(kind_thrown_by([&] { message.plan_into(none, false); }) == ErrorKind::data);
  };
  refused([](Message& m) { m.counts[0].distinct = 4; });
  refused([](Message& m) { m.counts[0].distinct = 1; });
  refused([](Message& m) { m.words[2] = 9; });
  refused([](Message& m) { m.words[3] = 10; });
  refused([](Message& m) { m.words[3] = -1; });
  refused([](Message& m) { m.words[4] = 2; });
  refused([](Message& m) { m.words[4] = -1; });
  refused([](Message& m) { m.words[4] = 0, m.words[5] = 0; });  // nobody has place 9
  for (int i = 0; i < 20000; ++i) {
    NumberedMessage message;
    for (std::uint64_t n = 1 + below(random, 3); n > 0; --n) {
      auto& word = message.words[below(random, message.words.size())];
      word = static_cast<std::int32_t>(one_in(random, 2) ? random() : below(random, 12));
      if (one_in(random, 6)) message.counts[below(random, 4)].distinct = below(random, 4) & max_distinct;
    }
    if (!is_planned(message, plan)) continue;
    for (std::size_t t = 0; t < 2; ++t) {
      for (const std::uint32_t position : plan.tables[t].position) CHECK(position < plan.tables[t].rows.size());
    }
  }
}

void malformed_messages_are_refused(Random& random) {
  check::context = "malformed messages";
  const auto refused = [&](const auto& change, ErrorKind kind = ErrorKind::data) {
    Message message;
    change(message);
    for (const bool parallel : {false, true}) {
      Plan plan;
      CHECK(kind_thrown_by([&] { message.plan_into(plan, parallel); }) == kind);
    }
  };
  refused([](Message& m) { m.counts[0].bags = -1; });
  refused([](Message& m) { m.counts[0].ids = UINT32_MAX; });
  refused([](Message& m) { m.counts[1] = {2, 1, 0, 0}; });
  refused([](Message& m) { m.counts[2] = {0, 1, 0, 0}; });
  refused([](Message& m) { m.counts[3].distinct = 3; });
  refused([](Message& m) { m.counts[3].weighted = 1; });
  refused([](Message& m) { m.counts[3] = {INT64_MAX, UINT32_MAX, 1, 0}; });
  refused([](Message& m) { m.counts[3].ids = 3; });
  refused([](Message& m) { m.words.pop_back(); });
  refused([](Message& m) { m.words.push_back(0); });
  refused([](Message& m) { m.words.clear(); });
  refused([](Message& m) { m.words[0] = 3; });
  refused([](Message& m) { m.words[1] = -1; });
  refused([](Message& m) { m.words[0] = 3, m.words[1] = 0; });
  refused([](Message& m) { m.words[2] = 10; });
  refused([](Message& m) { m.words[3] = -7; });
  refused([](Message& m) { m.words[6] = 2; });
  refused([](Message& m) { m.words[6] = -1; });
  for (int i = 0; i < 20000; ++i) {
    Message message;
    Plan plan;
    for (std::uint64_t n = 1 + below(random, 3); n > 0; --n) {
      auto& count = message.counts[below(random, message.counts.size())];
      const std::uint64_t number = one_in(random, 3) ? random() : below(random, 5);
      if (one_in(random, 6)) count.bags = static_cast<std::int64_t>(number);
      if (one_in(random, 6)) count.ids = static_cast<std::uint32_t>(number);
      if (one_in(random, 6)) count.weighted = number % 2;
      if (one_in(random, 3)) count.distinct = number & max_distinct;
      if (one_in(random, 3)) message.words.resize(below(random, 14));
      if (message.words.empty()) continue;
      auto& word = message.words[below(random, message.words.size())];
      if (one_in(random, 2)) word = static_cast<std::int32_t>(one_in(random, 2) ? random() : below(random, 12));
    }
    if (!is_planned(message, plan)) continue;
    for (std::size_t t = 0; t < 2; ++t) {
      for (const std::uint32_t offset : plan.tables[t].gradient_offset) {
        CHECK(offset + plan.spec->tables[t].dim <= plan.output_width);
      }
    }
  }
}

void an_output_beyond_32_bits_is_refused() {
  check::context = "a large output";
  auto spec = std::make_shared<CollectionSpec>();
  spec->tables = {{0, 10, 1u << 20, Pooling::sum}};
  spec->features = {{0, 0, "f"}};
  spec->output_width = 1u << 20;
  const std::vector<std::int32_t> words(4097);
  const BagCounts counts{4097, 4097, 0, 0};
  Plan plan;
  plan.spec = spec;
  CHECK(kind_thrown_by([&] { plan_routed({&counts, 1, words}, false, plan); }) == ErrorKind::batch_too_large);
}

void routes_keep_their_memory(Random& random) {
  Group group = random_group(random);
  while (group.ids.empty()) group = random_group(random);
  const Router router(group.spec);
  auto route = router.route(group.batch(), 0, group.num_samples);
  const auto* const message = route->message.data();
  route.reset();
  route = router.route(group.batch(), 0, group.num_samples);
  CHECK(route->message.data() == message);
  CHECK(router.route(group.batch(), 0, group.num_samples)->message.data() != message);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  a_group_does_what_one_process_does(random);
  bad_ids_are_named_as_one_process_names_them(random);
  what_does_not_fit_together_is_refused();
  a_routed_plan_lies_trainer_by_trainer();
  malformed_messages_are_refused(random);
  an_owner_plans_numbered_ids_as_the_ids_themselves(random);
  malformed_numbers_are_refused(random);
  an_output_beyond_32_bits_is_refused();
  routes_keep_their_memory(random);
  return check::passed();
}

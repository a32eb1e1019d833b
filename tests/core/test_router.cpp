// Routes: trainers and owners together give what one process gives, and what is sent is what a plain loop says.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "draws.h"
#include "routed_groups.h"
#include "routing/router.h"
#include "step/gradients.h"
#include "step/lookup.h"
#include "thrown.h"

namespace holdfast {
namespace {

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
  routes_keep_their_memory(random);
  return check::passed();
}

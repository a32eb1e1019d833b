// plan_table against a std::map, and what it refuses.
#include <cstring>
#include <limits>
#include <map>
#include <vector>

#include "check.h"
#include "draws.h"
#include "step/distinct_keys.h"
#include "step/plan.h"

namespace holdfast {
namespace {

// A feature's arrays in both offset types, with junk before the first offset where it is not 0.
struct Feature {
  std::vector<std::int64_t> ids;
  std::vector<std::int64_t> offsets;
  std::vector<std::int32_t> narrow_offsets;
  std::vector<float> weights;
  bool weighted = false;
  bool wide = false;
  std::uint32_t first_output = 0;
  std::uint32_t output_stride = 64;

  std::size_t num_bags() const { return offsets.size() - 1; }

  FeatureInput input() const {
    return {{ids.data(), wide ? static_cast<const void*>(offsets.data()) : narrow_offsets.data(), wide, num_bags()},
            weighted ? weights.data() : nullptr,
            first_output,
            output_stride};
  }
};

std::vector<FeatureInput> inputs_of(const std::vector<Feature>& features) {
  std::vector<FeatureInput> inputs;
  for (const Feature& feature : features) inputs.push_back(feature.input());
  return inputs;
}

// Features of one batch, whose sums are columns of one matrix; or, ragged, each with a number of bags and a place of the
// output of its own.
std::vector<Feature> random_features(Random& random, std::size_t num_bags, std::uint64_t num_rows, bool single_hot,
                                     bool ragged = false) {
  std::vector<Feature> features(one_in(random, 10) ? 0 : 1 + below(random, 3));
  const std::uint32_t output_width = 48 + static_cast<std::uint32_t>(below(random, 100));
  std::uint32_t first_output = 0;
  for (Feature& feature : features) {
    const std::size_t bags = ragged ? below(random, num_bags + 1) : num_bags;
    feature.first_output = first_output;
    feature.output_stride = ragged ? 16 : output_width;
    first_output += ragged ? 16 * static_cast<std::uint32_t>(bags) : 16;
    feature.weighted = one_in(random, 3);
    feature.wide = one_in(random, 2);
    const std::int64_t first = one_in(random, 3) ? static_cast<std::int64_t>(below(random, 50)) : 0;
    feature.ids.assign(static_cast<std::size_t>(first), -5);
    feature.offsets.push_back(first);
    const std::uint64_t hot = one_in(random, 2) ? 1 + below(random, num_rows) : num_rows;
    for (std::size_t bag = 0; bag < bags; ++bag) {
      const std::uint64_t length = single_hot ? 1 : one_in(random, 3) ? 0 : below(random, 20);
      for (std::uint64_t i = 0; i < length; ++i) {
        feature.ids.push_back(
            static_cast<std::int64_t>(one_in(random, 2) ? below(random, hot) : num_rows - 1 - below(random, hot)));
      }
      feature.offsets.push_back(static_cast<std::int64_t>(feature.ids.size()));
    }
    feature.narrow_offsets.assign(feature.offsets.begin(), feature.offsets.end());
    feature.weights.reserve(feature.ids.size() + 1);  // never null
    for (std::size_t i = 0; i < feature.ids.size(); ++i) {
      feature.weights.push_back(static_cast<float>(below(random, 1000)) / 128);
    }
  }
  return features;
}

void check_plan(const TablePlan& plan, const std::vector<Feature>& features, Pooling pooling) {
  struct Occurrence {
    std::uint32_t position;
    std::uint32_t gradient_offset;
    float scale;
  };
  std::map<std::uint64_t, std::vector<Occurrence>> rows;
  std::vector<std::uint32_t> bag_start;
  std::vector<float> bag_scale;
  bool weighted = false, all_ones = true;
  std::uint32_t position = 0;
  for (const Feature& feature : features) weighted |= feature.weighted;
  for (const Feature& feature : features) {
    for (std::size_t bag = 0; bag < feature.num_bags(); ++bag) {
      bag_start.push_back(position);
      const std::int64_t length = feature.offsets[bag + 1] - feature.offsets[bag];
      for (std::int64_t i = feature.offsets[bag]; i < feature.offsets[bag + 1]; ++i, ++position) {
        const float weight = feature.weighted ? feature.weights[static_cast<std::size_t>(i)] : 1.0f;
        const float scale = pooling == Pooling::mean ? weight * (1.0f / static_cast<float>(length)) : weight;
        all_ones &= pooling == Pooling::sum || length == 1;
        bag_scale.push_back(weight);
        rows[static_cast<std::uint64_t>(feature.ids[static_cast<std::size_t>(i)])].push_back(
            {position, feature.first_output + static_cast<std::uint32_t>(bag) * feature.output_stride, scale});
      }
    }
    bag_start.push_back(position);
  }
  CHECK(plan.num_unique() == rows.size());
  CHECK(plan.num_lookups() == position);
  CHECK(plan.bag_start == bag_start);
  CHECK(plan.row_start.size() == rows.size() + 1);
  CHECK(plan.gradient_offset.size() == position);
  CHECK(plan.bag_scale == (weighted ? bag_scale : std::vector<float>{}));
  CHECK(plan.scale.size() == (weighted || !all_ones ? position : 0));
  std::size_t u = 0, j = 0;
  for (const auto& [row, occurrences] : rows) {
    CHECK(plan.rows[u] == row);
    CHECK(plan.row_start[u] == j);
    for (const Occurrence& occurrence : occurrences) {
      CHECK(plan.position[occurrence.position] == u);
      CHECK(plan.gradient_offset[j] == occurrence.gradient_offset);
      if (!plan.scale.empty()) CHECK(std::memcmp(&plan.scale[j], &occurrence.scale, 4) == 0);
      ++j;
    }
    ++u;
  }
  CHECK(plan.row_start[u] == j);
}

void plan_is_what_a_map_says(Random& random) {
  TablePlan plan;  // one plan for all batches, as in production
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t num_rows = 1 + (one_in(random, 4)   ? below(random, 4)
                                        : one_in(random, 3) ? below(random, std::uint64_t{1} << 45)
                                                            : below(random, 100000));
    const std::size_t num_bags = below(random, one_in(random, 10) ? 2000 : 60);
    const bool single_hot = one_in(random, 3);
    const auto features = random_features(random, num_bags, num_rows, single_hot, one_in(random, 3));
    const Pooling pooling = one_in(random, 2) ? Pooling::sum : Pooling::mean;
    check::context = "rows " + std::to_string(num_rows) + " bags " + std::to_string(num_bags);
    plan_table(inputs_of(features), num_rows, pooling, plan);
    check_plan(plan, features, pooling);
  }
}

// Keys are numbers of 64 bits, among them the ends of the range; their rows are the ids that a plan by rows has.
void plan_by_numbers_is_the_one_by_rows(Random& random) {
  const auto key_of = [](std::int64_t row) {
    return row < 2 ? std::numeric_limits<std::int64_t>::min() + row
                   : static_cast<std::int64_t>(static_cast<std::uint64_t>(row) * 0x9e3779b97f4a7c15u);
  };
  TablePlan plan;
  DistinctKeys distinct;  // one for all batches, as in production
  for (int i = 0; i < 2000; ++i) {
    const std::uint64_t num_rows = 2 + (one_in(random, 4)   ? below(random, 4)
                                        : one_in(random, 3) ? below(random, std::uint64_t{1} << 45)
                                                            : below(random, 100000));
    const std::size_t num_bags = below(random, one_in(random, 10) ? 2000 : 60);
    const auto features = random_features(random, num_bags, num_rows, one_in(random, 3), one_in(random, 3));
    auto keyed = features;
    std::map<std::int64_t, std::int64_t> row_of;
    std::size_t num_ids = 0;
    for (Feature& feature : keyed) {
      feature.weights.reserve(feature.weights.size() + 1);  // never null, which a copy of none would be
      for (std::size_t at = static_cast<std::size_t>(feature.offsets[0]); at < feature.ids.size(); ++at, ++num_ids) {
        const std::int64_t row = feature.ids[at];
        row_of[feature.ids[at] = key_of(row)] = row;
      }
    }
    distinct.begin(random(), num_ids);
    for (const FeatureInput& input : inputs_of(keyed)) distinct.add(all_ids(input.bags));
    CHECK(distinct.keys().size() == row_of.size() && distinct.number_of().size() == num_ids);
    std::vector<std::int64_t> rows;
    std::size_t counted = 0;
    for (const std::uint32_t number : distinct.number_of()) {  // in the order in which they come first
      CHECK(number <= rows.size());
      if (number == rows.size()) rows.push_back(row_of.at(distinct.keys()[number]));
    }
    for (const std::uint32_t count : distinct.counts()) counted += count;
    CHECK(rows.size() == row_of.size() && counted == num_ids);
    const Pooling pooling = one_in(random, 2) ? Pooling::sum : Pooling::mean;
    plan_numbered_table(inputs_of(keyed), {distinct.keys(), rows, distinct.counts(), distinct.number_of()}, pooling,
                        plan);
    check_plan(plan, features, pooling);
    for (std::size_t u = 0; u < plan.num_unique(); ++u) {
      CHECK(static_cast<std::int64_t>(plan.keys[u]) == key_of(static_cast<std::int64_t>(plan.rows[u])));
    }
  }
}

void vectors_keep_their_memory(Random& random) {
  TablePlan plan;
  const auto features = random_features(random, 500, 1000, true);
  plan_table(inputs_of(features), 1000, Pooling::mean, plan);
  const auto* const rows = plan.rows.data();
  const auto* const position = plan.position.data();
  plan_table(inputs_of(features), 1000, Pooling::mean, plan);
  CHECK(plan.rows.data() == rows && plan.position.data() == position);
}

template <class Exception, class Body>
Exception caught(const Body& body) {
  try {
    body();
  } catch (const Exception& exception) {
    return exception;
  }
  check::fail(__FILE__, __LINE__, "the expected exception was not thrown");
}

void bad_ids_are_named(Random& random) {
  TablePlan plan;
  for (int i = 0; i < 300; ++i) {
    const std::uint64_t num_rows = 1 + below(random, 1000);
    const std::size_t num_bags = 1 + below(random, 40);
    auto features = random_features(random, num_bags, num_rows, true);
    if (features.empty()) continue;
    const std::size_t f = below(random, features.size());
    const std::size_t bag = below(random, num_bags);
    const std::int64_t bad = one_in(random, 3) ? -1 - static_cast<std::int64_t>(random() >> 1)
                                               : static_cast<std::int64_t>(num_rows + (random() >> 20));
    features[f].ids[static_cast<std::size_t>(features[f].offsets[bag])] = bad;
    const BadId error = caught<BadId>([&] { plan_table(inputs_of(features), num_rows, Pooling::sum, plan); });
    CHECK(error.feature == f && error.sample == bag && error.value == bad);
  }
}

void bad_offsets_are_named() {
  TablePlan plan;
  const std::vector<std::int64_t> ids{1, 2, 3};
  const std::vector<std::int64_t> decreasing{0, 2, 1, 3};
  const std::vector<std::int64_t> negative{-1, 0, 1, 2};
  const auto plan_with = [&](const std::vector<std::int64_t>& offsets) {
    const FeatureInput input{{ids.data(), offsets.data(), true, 3}, nullptr, 0, 16};
    plan_table({&input, 1}, 10, Pooling::sum, plan);
  };
  const BadId first = caught<BadId>([&] { plan_with(decreasing); });
  CHECK(first.feature == 0 && first.sample == 1 && first.value == 1);
  const BadId second = caught<BadId>([&] { plan_with(negative); });
  CHECK(second.feature == 0 && second.sample == 0 && second.value == -1);
}

void sizes_beyond_32_bits_are_refused() {
  TablePlan plan;
  const std::int64_t id = 0;
  const std::vector<std::int64_t> many{0, std::int64_t{1} << 32};
  const FeatureInput lookups{{&id, many.data(), true, 1}, nullptr, 0, 16};
  caught<std::length_error>([&] { plan_table({&lookups, 1}, 10, Pooling::sum, plan); });
  const std::vector<std::int32_t> none(70001);
  const FeatureInput wide{{&id, none.data(), false, 70000}, nullptr, 0, 70000};
  caught<std::length_error>([&] { plan_table({&wide, 1}, 10, Pooling::sum, plan); });
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  plan_is_what_a_map_says(random);
  plan_by_numbers_is_the_one_by_rows(random);
  vectors_keep_their_memory(random);
  bad_ids_are_named(random);
  bad_offsets_are_named();
  sizes_beyond_32_bits_are_refused();
  return check::passed();
}

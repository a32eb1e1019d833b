// Routed plans: an owner plans what trainers sent it, with ids by number or one by one, and packs the plan for slots of a
// device. Messages that say something impossible are refused.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "device/device_plan.h"
#include "draws.h"
#include "routed_groups.h"
#include "routing/routed_plan.h"
#include "routing/router.h"
#include "thrown.h"

namespace holdfast {
namespace {

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

// A device knows the packed arrays alone: which row each of a bag's lookups reads, and where in the output its sum goes.
void a_device_is_told_what_the_plan_says(Random& random) {
  for (int i = 0; i < 60; ++i) {
    const Group group = random_group(random);
    std::vector<std::shared_ptr<const Route>> routes;
    for (std::size_t m = 0; m < group.num_trainers(); ++m) {
      const std::size_t first = group.first_sample[m];
      routes.push_back(Router(group.spec).route(group.batch(), first, group.first_sample[m + 1] - first));
    }
    for (std::uint32_t o = 0; o < group.spec.num_owners; ++o) {
      PlanPool plans(group.collection(o));
      const auto plan = plan_of_owner(group, plans, routes, o, false);
      for (std::uint32_t t = 0; t < plan->tables.size(); ++t) {
        SlotDirectory directory(plan->spec, {t}, 4000, true);
        const auto admission = directory.admit(plan);
        const DevicePlan layout = device_plan_of(*admission);
        std::vector<std::uint64_t> packed(layout.bytes / 8);
        pack(*admission, layout, reinterpret_cast<std::byte*>(packed.data()));
        const auto* const bytes = reinterpret_cast<const std::byte*>(packed.data());
        const auto words = [&](const PackedArray& array) {
          const auto* const first = reinterpret_cast<const std::uint32_t*>(bytes + array.offset);
          return std::vector<std::uint32_t>(first, first + array.count);
        };
        const auto* const rows = reinterpret_cast<const std::uint64_t*>(bytes + layout.rows.offset);
        const auto slot_of_lookup = words(layout.lookup_slot), bag_start = words(layout.bag_start);
        const auto columns = words(layout.columns);
        CHECK(columns.size() + 1 == bag_start.size());
        std::size_t bag = 0;
        for (std::size_t f = 0; f < plan->features.size(); ++f) {
          const PlanFeature& feature = plan->features[f];
          if (feature.table != t) continue;
          for (std::size_t b = 0; b < feature.num_bags; ++b, ++bag) {
            CHECK(columns[bag] == feature.first_output + b * feature.output_stride);
            std::uint32_t lookup = bag_start[bag];
            for (std::uint32_t p = plan->bag_start(f)[b]; p < plan->bag_start(f)[b + 1]; ++p, ++lookup) {
              const std::uint32_t unique = plan->tables[t].position[p];
              CHECK(slot_of_lookup[lookup] == admission->slots()[unique]);
              CHECK(rows[unique] == group.spec.tables[t].layout.row_of(plan->tables[t].rows[unique]));
            }
            CHECK(lookup == bag_start[bag + 1]);
          }
        }
        CHECK(bag == columns.size());
      }
    }
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

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  a_routed_plan_lies_trainer_by_trainer();
  malformed_messages_are_refused(random);
  an_owner_plans_numbered_ids_as_the_ids_themselves(random);
  a_device_is_told_what_the_plan_says(random);
  malformed_numbers_are_refused(random);
  an_output_beyond_32_bits_is_refused();
  return check::passed();
}

#include "routing/routed_plan.h"

#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/float_mode.h"
#include "base/parallel.h"
#include "routing/numbered_ids.h"

namespace holdfast {
namespace {

constexpr std::uint64_t max_count = std::numeric_limits<std::uint32_t>::max();

// What one trainer's message says of one feature.
struct Part {
  std::size_t trainer;
  std::uint32_t feature;
  BagCounts counts;
  const std::int32_t* words;
};

[[noreturn]] void refuse(const CollectionSpec& spec, std::size_t trainer, std::size_t feature,
                         const std::string& what) {
  throw Error(ErrorKind::data, "the message of trainer " + std::to_string(trainer) + ", feature '" +
                                   spec.features[feature].name + "': " + what);
}

std::uint64_t word(std::int32_t bits) { return static_cast<std::uint32_t>(bits); }

// A table's parts as plan_table takes them. The vectors keep their memory.
class Decoded {
 public:
  void reserve(std::span<const Part> parts) {
    std::size_t num_ids = 0, num_offsets = 0, num_floats = 0;
    for (const Part& part : parts) {
      num_ids += part.counts.ids;
      num_offsets += static_cast<std::size_t>(part.counts.bags) + 1;
      if (part.counts.weighted != 0) num_floats += part.counts.ids + static_cast<std::size_t>(part.counts.bags);
    }
    if (ids_.size() < num_ids) ids_.resize(num_ids);
    if (offsets_.size() < num_offsets) offsets_.resize(num_offsets);
    if (floats_.size() < num_floats) floats_.resize(num_floats);
    next_float_ = floats_.data();
    next_id_ = ids_.data();
    next_offset_ = offsets_.data();
  }

  // The part's bags, with weights where it has them. ids: the places; null where these are known by numbers.
  FeatureInput add(const CollectionSpec& spec, const Part& part, const PlanFeature& feature, bool with_ids) {
    const auto& table = spec.tables[feature.table];
    const bool wide = words_of_place(table.end_id()) == 2;
    const std::size_t num_bags = static_cast<std::size_t>(part.counts.bags);
    const std::size_t num_ids = part.counts.ids;
    const JaggedIds bags{next_id_, next_offset_, true, num_bags};
    const std::int32_t* words = part.words;
    if (!part.counts.has_lengths()) {
      std::iota(next_offset_, next_offset_ + num_bags + 1, std::int64_t{0});
    } else {
      std::uint64_t sum = 0;
      bool has_empty = false;
      next_offset_[0] = 0;
      for (std::size_t bag = 0; bag < num_bags; ++bag) {
        has_empty |= words[bag] == 0;
        sum += word(words[bag]);
        next_offset_[bag + 1] = static_cast<std::int64_t>(sum);
      }
      if (has_empty) refuse(spec, part.trainer, part.feature, "a bag without ids");
      if (sum != num_ids) {
        refuse(spec, part.trainer, part.feature,
               "bags of " + std::to_string(sum) + " ids, where " + std::to_string(num_ids) + " were counted");
      }
      words += num_bags;
    }
    if (with_ids) take_ids(part, words, wide, table.num_rows, spec);
    next_offset_ += num_bags + 1;
    FeatureInput input{bags, nullptr, feature.first_output, feature.output_stride};
    if (part.counts.weighted != 0) {
      const std::size_t num_floats = num_ids + (table.mean_elsewhere ? num_bags : 0);
      words += words_of_ids(part.counts, table.end_id());
      if (num_floats > 0) std::memcpy(next_float_, words, num_floats * sizeof(float));
      input.weights = next_float_;
      if (table.mean_elsewhere) input.bag_factor = next_float_ + num_ids;
      next_float_ += num_floats;
    }
    return input;
  }

 private:
  void take_ids(const Part& part, const std::int32_t* words, bool wide, std::uint64_t num_rows,
                const CollectionSpec& spec) {
    const std::size_t num_ids = part.counts.ids;
    if (part.counts.distinct != 0) {
      const NumberedPart numbered{part.counts, words};
      joined_.join({&numbered, 1}, num_rows,
                   [&](std::size_t, const std::string& what) { refuse(spec, part.trainer, part.feature, what); });
      for (std::size_t i = 0; i < num_ids; ++i) {
        next_id_[i] = static_cast<std::int64_t>(joined_.rows()[joined_.number_of()[i]]);
      }
    } else {
      for (std::size_t i = 0; i < num_ids; ++i) {
        next_id_[i] =
            static_cast<std::int64_t>(wide ? word(words[2 * i]) | word(words[2 * i + 1]) << 32 : word(words[i]));
      }
    }
    next_id_ += num_ids;
  }

  JoinedNumbers joined_;
  std::vector<std::int64_t> ids_;
  std::vector<std::int64_t> offsets_;
  std::vector<float> floats_;
  float* next_float_ = nullptr;
  std::int64_t* next_id_ = nullptr;
  std::int64_t* next_offset_ = nullptr;
};

void check_counts(const CollectionSpec& spec, std::size_t trainer, std::size_t feature, const BagCounts& counts) {
  const bool has_keys = spec.tables[spec.features[feature].table].keys != nullptr;
  if (counts.bags < 0 || std::int64_t{counts.ids} < counts.bags || (counts.bags == 0 && counts.ids != 0) ||
      counts.distinct > counts.ids || (counts.distinct != 0 && has_keys)) {
    refuse(spec, trainer, feature,
           "impossible counts: " + std::to_string(counts.ids) + " ids in " + std::to_string(counts.bags) + " bags");
  }
}

// Whether all of a table's parts number their ids, so that there is nothing to sort.
bool are_numbered(std::span<const Part> parts) {
  std::uint64_t num_ids = 0;
  for (const Part& part : parts) {
    if (part.counts.ids != 0 && part.counts.distinct == 0) return false;
    num_ids += part.counts.ids;
  }
  return num_ids != 0;
}

const std::int32_t* words_of_ids_in(const Part& part) {
  return part.counts.has_lengths() ? part.words + part.counts.bags : part.words;
}

void plan_numbered_parts(const CollectionSpec& spec, std::span<const Part> parts, std::span<const FeatureInput> inputs,
                         std::uint32_t t, TablePlan& plan) {
  static thread_local JoinedNumbers joined;
  std::vector<NumberedPart> numbered;
  for (const Part& part : parts) numbered.push_back({part.counts, words_of_ids_in(part)});
  joined.join(numbered, spec.tables[t].num_rows,
              [&](std::size_t p, const std::string& what) { refuse(spec, parts[p].trainer, parts[p].feature, what); });
  plan_ordered_table(inputs, joined.rows(), joined.counts(), joined.number_of(), spec.tables[t].pooling, plan);
}

}  // namespace

void plan_routed(const RoutedIds& routed, bool parallel, Plan& plan, NewKeys new_keys) {
  const CollectionSpec& spec = *plan.spec;
  const std::size_t num_features = spec.features.size();
  plan.num_bags = 1;
  plan.weighted = false;
  plan.reads_only = new_keys == NewKeys::unplaced;
  plan.tables.resize(spec.tables.size());
  plan.features.assign(num_features * routed.num_trainers, {});
  plan.spans.clear();
  plan.output_floats.assign(routed.num_trainers, 0);

  std::vector<const std::int32_t*> words_of(plan.features.size());
  std::uint64_t num_words = 0;
  std::uint64_t num_floats = 0;
  for (std::size_t m = 0; m < routed.num_trainers; ++m) {
    for (std::size_t f = 0; f < num_features; ++f) {
      const auto& table = spec.tables[spec.features[f].table];
      const BagCounts& counts = routed.counts[m * num_features + f];
      check_counts(spec, m, f, counts);
      plan.weighted |= counts.weighted != 0;
      const std::uint64_t words = message_words(counts, table.end_id(), table.mean_elsewhere);
      if (words > routed.messages.size() - num_words) {
        refuse(spec, m, f,
               "ends before its ids do: it needs " + std::to_string(num_words + words) + " words, and there are " +
                   std::to_string(routed.messages.size()));
      }
      const std::uint64_t floats = static_cast<std::uint64_t>(counts.bags) * table.dim;
      if (floats > max_count - num_floats) {
        throw Error(ErrorKind::batch_too_large,
                    "the vectors that trainers ask for are more than 2^32 floats: make batch_size smaller");
      }
      words_of[f * routed.num_trainers + m] = routed.messages.data() + num_words;
      plan.features[f * routed.num_trainers + m] = {spec.features[f].table, static_cast<std::size_t>(counts.bags), 0,
                                                    static_cast<std::uint32_t>(num_floats), table.dim};
      plan.output_floats[m] += floats;
      num_words += words;
      num_floats += floats;
    }
  }
  if (num_words != routed.messages.size()) {
    throw Error(ErrorKind::data, "the trainers' messages have " + std::to_string(routed.messages.size()) +
                                     " words, where their counts say " + std::to_string(num_words));
  }
  plan.output_width = num_floats;

  std::vector<std::vector<Part>> parts(spec.tables.size());
  std::vector<std::size_t> num_bag_starts(spec.tables.size());
  for (std::size_t i = 0; i < plan.features.size(); ++i) {
    PlanFeature& feature = plan.features[i];
    const std::size_t f = i / routed.num_trainers;
    const std::size_t m = i % routed.num_trainers;
    feature.first_bag = num_bag_starts[feature.table];
    num_bag_starts[feature.table] += feature.num_bags + 1;
    parts[feature.table].push_back(
        {m, static_cast<std::uint32_t>(f), routed.counts[m * num_features + f], words_of[i]});
  }
  const auto plan_one = [&](std::size_t t) {
    const DefaultFloatMode mode;  // of what lookups are multiplied with
    static thread_local Decoded decoded;
    const auto& table = spec.tables[t];
    decoded.reserve(parts[t]);
    const bool numbered = are_numbered(parts[t]);
    std::vector<FeatureInput> inputs;
    for (const Part& part : parts[t]) {
      const PlanFeature& feature = plan.features[part.feature * routed.num_trainers + part.trainer];
      inputs.push_back(decoded.add(spec, part, feature, !numbered));
    }
    if (numbered) {
      return plan_numbered_parts(spec, parts[t], inputs, static_cast<std::uint32_t>(t), plan.tables[t]);
    }
    if (table.keys != nullptr) return plan_keyed_table(inputs, table, new_keys, plan.tables[t]);
    try {
      plan_table(inputs, table.num_rows, table.pooling, plan.tables[t]);
    } catch (const BadId& bad) {
      const Part& part = parts[t][bad.feature];
      refuse(spec, part.trainer, part.feature,
             "place " + std::to_string(static_cast<std::uint64_t>(bad.value)) + " is not below the table's " +
                 std::to_string(table.num_rows));
    }
  };
  if (parallel) {
    parallel_for(spec.tables.size(), plan_one);
  } else {
    for (std::size_t t = 0; t < spec.tables.size(); ++t) plan_one(t);
  }
}

}  // namespace holdfast

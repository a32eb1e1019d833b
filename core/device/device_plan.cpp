#include "device/device_plan.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"

namespace holdfast {
namespace {

constexpr std::size_t alignment = 128;
constexpr std::uint64_t end_offset = std::uint64_t{1} << 31;
constexpr std::size_t elements_per_chunk = 16384;
constexpr std::size_t elements_for_one_thread = 65536;  // fewer are packed before other threads have begun

// Where one table's rows and occurrences begin among those of all tables.
struct TablePlace {
  std::uint32_t table;  // of the plan's
  std::size_t first_row;
  std::size_t first_occurrence;
};

struct FeaturePlace {
  std::size_t feature;  // of the plan's
  std::size_t first_row;  // of its table
  std::size_t first_bag;
  std::size_t first_lookup;
};

struct Places {
  explicit Places(const Admission& admission)
      : plan(*admission.plan()), is_routed(!plan.output_floats.empty()), has_gradient_scale(plan.weighted) {
    std::vector<std::size_t> first_row(plan.tables.size());
    for (const std::uint32_t t : admission.tables()) {
      tables.push_back({t, num_rows, num_lookups});
      first_row[t] = num_rows;
      num_rows += plan.tables[t].num_unique();
      num_lookups += plan.tables[t].num_lookups();
      has_keys = has_keys || plan.spec->tables[t].keys != nullptr;
      is_split = is_split || plan.spec->tables[t].layout.is_split();
      has_gradient_scale = has_gradient_scale || !plan.tables[t].scale.empty();
    }
    std::size_t first_lookup = 0;
    for (std::size_t f = 0; f < plan.features.size(); ++f) {
      const PlanFeature& feature = plan.features[f];
      if (!std::ranges::binary_search(admission.tables(), feature.table)) continue;
      features.push_back({f, first_row[feature.table], num_bags, first_lookup});
      num_bags += feature.num_bags;
      first_lookup += plan.num_lookups_of(f);
    }
  }

  const Plan& plan;
  const bool is_routed;
  bool has_gradient_scale;
  bool has_keys = false;
  bool is_split = false;
  std::vector<TablePlace> tables;
  std::vector<FeaturePlace> features;
  std::size_t num_rows = 0;
  std::size_t num_lookups = 0;
  std::size_t num_bags = 0;  // of all features
};

class Packing {
 public:
  Packing(const Admission& admission, const DevicePlan& layout, std::byte* out)
      : places_(admission), slots_(admission.slots()), layout_(layout), out_(out) {}

  void run(std::span<const std::uint32_t> missing) const {
    copy(layout_.missing, 0, missing.data(), missing.size());
    at<std::uint32_t>(layout_.row_start)[places_.num_rows] = static_cast<std::uint32_t>(places_.num_lookups);
    at<std::uint32_t>(layout_.bag_start)[places_.num_bags] = static_cast<std::uint32_t>(places_.num_lookups);
    if (!places_.is_routed) {
      for (std::size_t i = 0; i < places_.features.size(); ++i) {
        at<std::uint32_t>(layout_.columns)[i] = places_.plan.features[places_.features[i].feature].first_output;
      }
    }
    std::vector<Chunk> chunks;
    const auto split = [&](What what, std::size_t of, std::size_t count) {
      for (std::size_t begin = 0; begin < count; begin += elements_per_chunk) {
        chunks.push_back({what, of, begin, std::min(begin + elements_per_chunk, count)});
      }
    };
    for (std::size_t i = 0; i < places_.tables.size(); ++i) {
      const TablePlan& table = places_.plan.tables[places_.tables[i].table];
      split(What::rows, i, table.num_unique());
      split(What::occurrences, i, table.num_lookups());
    }
    for (std::size_t i = 0; i < places_.features.size(); ++i) {
      const std::size_t f = places_.features[i].feature;
      split(What::bags, i, places_.plan.features[f].num_bags);
      split(What::lookups, i, places_.plan.num_lookups_of(f));
    }
    const auto run_one = [&](std::size_t i) { run_chunk(chunks[i]); };
    if (places_.num_rows + 2 * places_.num_lookups + places_.num_bags > elements_for_one_thread) {
      parallel_for(chunks.size(), run_one);
    } else {
      for (std::size_t i = 0; i < chunks.size(); ++i) run_one(i);
    }
  }

 private:
  enum class What { rows, occurrences, bags, lookups };
  struct Chunk {
    What what;
    std::size_t of;  // table or feature
    std::size_t begin;
    std::size_t end;
  };

  void run_chunk(const Chunk& chunk) const {
    switch (chunk.what) {
      case What::rows: return pack_rows(places_.tables[chunk.of], chunk.begin, chunk.end);
      case What::occurrences: return pack_occurrences(places_.tables[chunk.of], chunk.begin, chunk.end);
      case What::bags: return pack_bags(places_.features[chunk.of], chunk.begin, chunk.end);
      case What::lookups: return pack_lookups(places_.features[chunk.of], chunk.begin, chunk.end);
    }
  }

  void pack_rows(const TablePlace& place, std::size_t begin, std::size_t end) const {
    const TablePlan& table = places_.plan.tables[place.table];
    const std::size_t to = place.first_row + begin;
    const std::size_t count = end - begin;
    copy(layout_.slots, to, slots_.data() + to, count);
    const ShardLayout& layout = places_.plan.spec->tables[place.table].layout;
    std::uint64_t* const rows = at<std::uint64_t>(layout_.rows) + to;
    std::transform(table.rows.begin() + static_cast<std::ptrdiff_t>(begin),
                   table.rows.begin() + static_cast<std::ptrdiff_t>(end), rows,
                   [&](std::uint64_t row) { return layout.row_of(row); });
    if (layout_.places) copy(*layout_.places, to, table.rows.data() + begin, count);
    if (layout_.keys) copy(*layout_.keys, to, table.keys.data() + begin, count);
    if (layout_.shards) {
      std::uint32_t* const shards = at<std::uint32_t>(*layout_.shards) + to;
      for (std::size_t i = 0; i < count; ++i) {
        shards[i] = layout.is_split() ? layout.shard_of(table.rows[begin + i]) : 0;
      }
    }
    std::fill_n(at<std::uint32_t>(layout_.tables) + to, count, places_.plan.spec->tables[place.table].number);
    offset_by(place.first_occurrence, layout_.row_start, to, table.row_start.data() + begin, count);
  }

  void pack_occurrences(const TablePlace& place, std::size_t begin, std::size_t end) const {
    const TablePlan& table = places_.plan.tables[place.table];
    const std::size_t to = place.first_occurrence + begin;
    copy(layout_.gradient_offset, to, table.gradient_offset.data() + begin, end - begin);
    if (layout_.gradient_scale) pack_scale(*layout_.gradient_scale, to, table.scale, begin, end);
  }

  void pack_bags(const FeaturePlace& place, std::size_t begin, std::size_t end) const {
    const std::uint32_t* bag_start = places_.plan.bag_start(place.feature);
    offset_by(place.first_lookup - bag_start[0], layout_.bag_start, place.first_bag + begin, bag_start + begin,
              end - begin);
    if (!places_.is_routed) return;
    const PlanFeature& feature = places_.plan.features[place.feature];
    std::uint32_t* const columns = at<std::uint32_t>(layout_.columns) + place.first_bag;
    for (std::size_t bag = begin; bag < end; ++bag) {
      columns[bag] = feature.first_output + static_cast<std::uint32_t>(bag) * feature.output_stride;
    }
  }

  // Lookups [begin, end) of the feature.
  void pack_lookups(const FeaturePlace& place, std::size_t begin, std::size_t end) const {
    const TablePlan& table = places_.plan.tables[places_.plan.features[place.feature].table];
    const std::size_t from = places_.plan.bag_start(place.feature)[0];
    const std::uint32_t* const slots = slots_.data() + place.first_row;
    std::uint32_t* const lookup_slot = at<std::uint32_t>(layout_.lookup_slot) + place.first_lookup;
    for (std::size_t p = begin; p < end; ++p) lookup_slot[p] = slots[table.position[from + p]];
    if (!layout_.lookup_scale) return;
    pack_scale(*layout_.lookup_scale, place.first_lookup + begin, table.bag_scale, from + begin, from + end);
  }

  template <class T>
  T* at(const PackedArray& array) const {
    return reinterpret_cast<T*>(out_ + array.offset);
  }
  template <class T>
  void copy(const PackedArray& array, std::size_t to, const T* from, std::size_t count) const {
    std::copy_n(from, count, at<T>(array) + to);
  }
  void offset_by(std::size_t offset, const PackedArray& array, std::size_t to, const std::uint32_t* from,
                 std::size_t count) const {
    std::uint32_t* const out = at<std::uint32_t>(array) + to;
    const std::uint32_t added = static_cast<std::uint32_t>(offset);  // modulo 2^32, as the sums: these fit
    for (std::size_t i = 0; i < count; ++i) out[i] = from[i] + added;
  }
  // A table whose scales are all 1 has none.
  void pack_scale(const PackedArray& array, std::size_t to, const std::vector<float>& scale, std::size_t begin,
                  std::size_t end) const {
    if (!scale.empty()) return copy(array, to, scale.data() + begin, end - begin);
    std::fill_n(at<float>(array) + to, end - begin, 1.0f);
  }

  const Places places_;
  const std::span<const std::uint32_t> slots_;
  const DevicePlan& layout_;
  std::byte* const out_;
};

}  // namespace

DevicePlan device_plan_of(const Admission& admission) {
  const Places places(admission);
  const Plan& plan = places.plan;
  if (plan.output_width != 0 && plan.num_bags > (end_offset - 1) / plan.output_width) {
    throw Error(ErrorKind::config, "a pooled output of " + std::to_string(plan.num_bags) + " samples × " +
                                       std::to_string(plan.output_width) +
                                       " columns is too large for a device, whose kernels count to 2^31: make the "
                                       "batch smaller");
  }
  if (places.num_lookups >= end_offset || places.num_bags >= end_offset) {
    throw Error(ErrorKind::config, "a batch of " + std::to_string(places.num_lookups) + " lookups in " +
                                       std::to_string(places.num_bags) +
                                       " bags is too large for a device, whose kernels count to 2^31: make it smaller");
  }
  DevicePlan layout{};
  const auto add = [&](std::size_t count, std::size_t element_bytes) {
    const PackedArray array{layout.bytes, count};
    layout.bytes += (count * element_bytes + alignment - 1) / alignment * alignment;
    return array;
  };
  layout.slots = add(places.num_rows, 4);
  layout.rows = add(places.num_rows, 8);
  if (places.is_split) layout.places = add(places.num_rows, 8);
  layout.tables = add(places.num_rows, 4);
  if (places.has_keys) layout.keys = add(places.num_rows, 8);
  if (places.has_keys && places.is_split) layout.shards = add(places.num_rows, 4);
  layout.missing = add(admission.missing().size(), 4);
  layout.row_start = add(places.num_rows + 1, 4);
  layout.gradient_offset = add(places.num_lookups, 4);
  if (places.has_gradient_scale) layout.gradient_scale = add(places.num_lookups, 4);
  layout.lookup_slot = add(places.num_lookups, 4);
  layout.bag_start = add(places.num_bags + 1, 4);
  if (plan.weighted) layout.lookup_scale = add(places.num_lookups, 4);
  layout.columns = add(places.is_routed ? places.num_bags : places.features.size(), 4);
  return layout;
}

void pack(const Admission& admission, const DevicePlan& layout, std::byte* out) {
  admission.check_held();
  Packing(admission, layout, out).run(admission.missing());
}

}  // namespace holdfast

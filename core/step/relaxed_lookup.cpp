#include "step/relaxed_lookup.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "step/key_rows.h"

namespace holdfast {
namespace {

constexpr std::uint32_t elsewhere = std::numeric_limits<std::uint32_t>::max();

// Of each unique row of a table: which of the rows of a part it is, or `elsewhere`.
using Places = std::vector<std::uint32_t>;

// Calls body(u, shared) for every u of `next`; both ascend.
template <class Body>
void for_split(const std::vector<std::uint64_t>& next, const std::vector<std::uint64_t>& now, const Body& body) {
  std::size_t v = 0;
  for (std::size_t u = 0; u < next.size(); ++u) {
    while (v < now.size() && now[v] < next[u]) ++v;
    body(u, v < now.size() && now[v] == next[u]);
  }
}

// The lookups of some bags that are in a part, in order.
struct PartOfBags {
  std::vector<std::uint32_t> position;
  std::vector<float> scale;
  std::vector<std::uint32_t> bag_start;

  // scale: null where there are none.
  void take(std::span<const std::uint32_t> starts, const std::uint32_t* from, const float* from_scale,
            const Places& places) {
    const std::size_t num_lookups = starts.back() - starts.front();
    if (position.size() < num_lookups) position.resize(num_lookups);
    if (from_scale != nullptr && scale.size() < num_lookups) scale.resize(num_lookups);
    bag_start.assign(1, 0);
    std::uint32_t taken = 0;
    for (std::size_t bag = 0; bag + 1 < starts.size(); ++bag) {
      for (std::size_t j = starts[bag]; j < starts[bag + 1]; ++j) {
        const std::uint32_t place = places[from[j]];
        position[taken] = place;
        if (from_scale != nullptr) scale[taken] = from_scale[j];
        taken += place == elsewhere ? 0 : 1;  // no branch: which of them it is cannot be predicted
      }
      bag_start.push_back(taken);
    }
  }
};

enum class Part { own, shared };

// Which bags are pooled: all, or those with one of these rows. Of each table, of each unique row; none where a table's
// are none of these.
using Chosen = std::vector<std::vector<bool>>;

void pool_part(Part part, const Plan& plan, const std::vector<Places>& places, const std::vector<WorkingRows>& rows,
               const std::vector<RowTable>& tables, float* out, const Chosen* chosen = nullptr) {
  const Kernels& kernels = best_kernels();
  for_bags(plan, [&](std::size_t f, std::size_t begin, std::size_t end) {
    if (chosen != nullptr && (*chosen)[plan.features[f].table].empty()) return;
    const PlanFeature& feature = plan.features[f];
    const auto& table = plan.spec->tables[feature.table];
    const TablePlan& of_table = plan.tables[feature.table];
    const std::uint32_t* const whole = plan.bag_start(f) + begin;
    const bool weighted = !of_table.bag_scale.empty();
    thread_local PartOfBags bags;
    bags.take({whole, end - begin + 1}, of_table.position.data(), weighted ? of_table.bag_scale.data() : nullptr,
              places[feature.table]);
    const PoolSpec pooling{.weights = rows[feature.table].weights,
                           .dim = table.dim,
                           .dtype = tables[table.number].spec.dtype,
                           .position = bags.position.data(),
                           .bag_start = bags.bag_start.data(),
                           .scale = weighted ? bags.scale.data() : nullptr,
                           .mean = part == Part::shared && table.pooling == Pooling::mean,
                           .out = out + feature.first_output + begin * feature.output_stride,
                           .out_stride = feature.output_stride,
                           .whole_bag_start = part == Part::shared ? whole : nullptr};
    if (chosen == nullptr) return kernels.pool_bags(pooling, 0, end - begin);
    const std::vector<bool>& is_chosen = (*chosen)[feature.table];
    for (std::size_t bag = 0; bag < end - begin; ++bag) {
      const auto position = std::span(of_table.position).subspan(whole[bag], whole[bag + 1] - whole[bag]);
      if (std::ranges::any_of(position, [&](std::uint32_t u) { return is_chosen[u]; })) {
        kernels.pool_bags(pooling, bag, bag + 1);
      }
    }
  });
}

}  // namespace

void RelaxedLookup::pool_own(const Plan& next, const Plan& now, const std::vector<RowTable>& tables, const Read& read,
                             float* out) {
  Plan own;
  own.spec = next.spec;
  own.tables.resize(next.tables.size());
  std::vector<Places> places(next.tables.size());
  parallel_for(next.tables.size(), [&](std::size_t t) {
    const auto& of_next = next.tables[t].rows;
    auto& rows = own.tables[t].rows;
    auto& keys = own.tables[t].keys;
    const auto& keys_of_next = next.tables[t].keys;
    rows.reserve(of_next.size());
    places[t].resize(of_next.size());
    for_split(of_next, now.tables[t].rows, [&](std::size_t u, bool shared) {
      places[t][u] = shared ? elsewhere : static_cast<std::uint32_t>(rows.size());
      if (shared) return;
      rows.push_back(of_next[u]);
      if (!keys_of_next.empty()) keys.push_back(keys_of_next[u]);
    });
    own.tables[t].num_placed = rows.size();
  });
  const std::vector<WorkingRows> rows = scratch_.rows_for(own, tables);
  read(own, rows);
  ReadAhead& ahead = read_ahead(next);
  ahead.next = next.weak_from_this();
  ahead.records.assign(next.tables.size(), {});
  parallel_for(next.tables.size(), [&](std::size_t t) {
    const RowTable& table = tables[next.spec->tables[t].number];
    if (!table.key_policy.leaves_keys()) return;
    std::vector<KeyRecord>& records = ahead.records[t];
    records.assign(places[t].size(), {});
    for (std::size_t u = 0; u < records.size(); ++u) {
      if (places[t][u] != elsewhere) records[u] = key_record(table, rows[t], places[t][u]);
    }
  });
  pool_part(Part::own, next, places, rows, tables, out);
}

RelaxedLookup::ReadAhead& RelaxedLookup::read_ahead(const Plan& plan) {
  const auto of_collection = std::ranges::find(read_ahead_, plan.spec, &ReadAhead::spec);
  if (of_collection != read_ahead_.end()) return *of_collection;
  return read_ahead_.emplace_back(ReadAhead{plan.spec, {}, {}});
}

void RelaxedLookup::pool_shared(const Plan& next, const Plan& now, const std::vector<WorkingRows>& rows,
                                const std::vector<RowTable>& tables, const LivingOf& living_of, float* out) {
  const bool leaves_keys = std::ranges::any_of(next.spec->tables, [&](const CollectionSpec::Table& table) {
    return tables[table.number].key_policy.leaves_keys();
  });
  if (leaves_keys) {
    const ReadAhead& ahead = read_ahead(next);
    if (ahead.next.lock().get() != &next) {
      throw Error(ErrorKind::step,
                  "the rest of a relaxed lookup, whose first part was not the last of its collection's");
    }
    // Of the rows that were read, those whose keys were left behind since.
    Chosen lost(next.tables.size());
    std::vector<Places> places(next.tables.size());
    parallel_for(next.tables.size(), [&](std::size_t t) {
      const std::vector<KeyRecord>& records = ahead.records[t];
      if (records.empty()) return;
      const LivingKeys& living = living_of(next.spec->tables[t].number);
      std::vector<bool> is_lost(records.size());
      bool any = false;
      for (std::size_t u = 0; u < records.size(); ++u) {
        is_lost[u] = records[u].updates != 0 && !living.count(next.tables[t].rows[u], records[u]);
        any |= is_lost[u];
      }
      if (!any) return;
      lost[t] = std::move(is_lost);
      places[t].resize(records.size());
      for_split(next.tables[t].rows, now.tables[t].rows,
                [&](std::size_t u, bool shared) { places[t][u] = shared ? elsewhere : static_cast<std::uint32_t>(u); });
    });
    pool_part(Part::own, next, places, rows, tables, out, &lost);
  }
  std::vector<Places> places(next.tables.size());
  parallel_for(next.tables.size(), [&](std::size_t t) {
    places[t].resize(next.tables[t].num_unique());
    for_split(next.tables[t].rows, now.tables[t].rows,
              [&](std::size_t u, bool shared) { places[t][u] = shared ? static_cast<std::uint32_t>(u) : elsewhere; });
  });
  pool_part(Part::shared, next, places, rows, tables, out);
}

std::vector<std::uint64_t> num_lookups(const Plan& plan) {
  std::vector<std::uint64_t> counts;
  for (const TablePlan& table : plan.tables) counts.push_back(table.num_lookups());
  return counts;
}

std::vector<std::uint64_t> num_shared_lookups(const Plan& next, const Plan& now) {
  std::vector<std::uint64_t> counts(next.tables.size());
  parallel_for(next.tables.size(), [&](std::size_t t) {
    const TablePlan& table = next.tables[t];
    for_split(table.rows, now.tables[t].rows, [&](std::size_t u, bool shared) {
      if (shared) counts[t] += table.row_start[u + 1] - table.row_start[u];
    });
  });
  return counts;
}

}  // namespace holdfast

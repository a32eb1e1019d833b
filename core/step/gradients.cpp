#include "step/gradients.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/parallel.h"
#include "step/lookup.h"

namespace holdfast {
namespace {

// Rows of one table that several captures have, once each.
struct Merged {
  std::vector<std::uint64_t> rows;                   // ascending, without fresh bits
  std::vector<std::vector<std::uint32_t>> position;  // of each capture's rows among them
};

Merged merge_rows(const std::vector<RowGradients>& gradients, std::size_t t) {
  Merged merged;
  for (const RowGradients& part : gradients) {
    const auto& rows = part.capture->plan->tables[t].rows;
    std::vector<std::uint64_t> both;
    std::set_union(merged.rows.begin(), merged.rows.end(), rows.begin(), rows.end(), std::back_inserter(both));
    merged.rows.swap(both);
  }
  for (const RowGradients& part : gradients) {
    merged.position.push_back(positions_among(merged.rows.data(), part.capture->plan->tables[t].rows));
  }
  return merged;
}

// Captures of one step hold the same bytes of a row that they share: no update came between them.
void copy_rows(const RowTable& table, const WorkingRows& from, const std::vector<std::uint32_t>& position,
               const WorkingRows& to) {
  for (std::size_t u = 0; u < position.size(); ++u) {
    const std::size_t at = position[u];
    to.rows[at] = from.rows[u];
    std::memcpy(to.weights + at * table.weight_bytes(), from.weights + u * table.weight_bytes(), table.weight_bytes());
    if (table.state_bytes() == 0) continue;
    std::memcpy(to.state + at * table.spec.state_floats, from.state + u * table.spec.state_floats, table.state_bytes());
  }
}

}  // namespace

std::vector<std::uint32_t> positions_among(const std::uint64_t* merged, const std::vector<std::uint64_t>& rows) {
  std::vector<std::uint32_t> positions(rows.size());
  std::uint32_t at = 0;
  for (std::size_t u = 0; u < rows.size(); ++u) {
    while (merged[at] != rows[u]) ++at;
    positions[u] = at;
  }
  return positions;
}

Occurrences occurrences_of(const TablePlan& plan) {
  return {plan.row_start.data(), plan.gradient_offset.data(), plan.scale.empty() ? nullptr : plan.scale.data()};
}

std::unique_ptr<SummedGradients> sum_gradients(const std::vector<RowTable>& tables,
                                               std::vector<RowGradients> gradients) {
  if (gradients.empty()) throw Error(ErrorKind::step, "there are no row gradients: no backward pass in this step");
  // Occurrences are in order of the forward passes, whatever the order of the backward passes.
  std::sort(gradients.begin(), gradients.end(),
            [](const RowGradients& a, const RowGradients& b) { return a.capture->order < b.capture->order; });
  const Kernels& kernels = best_kernels();
  auto summed = std::make_unique<SummedGradients>();
  const auto& spec_pointer = gradients.front().capture->plan->spec;
  const CollectionSpec& spec = *spec_pointer;
  summed->spec = spec_pointer;
  const std::size_t num_tables = spec.tables.size();
  summed->num_rows.resize(num_tables);
  summed->merged.resize(num_tables);
  summed->sums.resize(num_tables);
  summed->storage.resize(num_tables);
  summed->keys.resize(num_tables);
  for (const RowGradients& part : gradients) {
    if (part.capture->plan->spec != spec_pointer) {
      throw Error(ErrorKind::step, "row gradients of different collections cannot be summed together");
    }
    summed->captures.push_back(part.capture);
  }
  std::vector<double> squares(num_tables);
  parallel_for(num_tables, [&](std::size_t t) {
    const std::uint32_t dim = spec.tables[t].dim;
    if (gradients.size() == 1) {
      const Capture& capture = *gradients.front().capture;
      const TablePlan& plan = capture.plan->tables[t];
      summed->num_rows[t] = plan.num_unique();
      summed->sums[t].resize(plan.num_unique() * dim);
      kernels.sum_gradients(dim, occurrences_of(plan), gradients.front().grad, nullptr, false, summed->sums[t].data(),
                            0, plan.num_unique());
    } else {
      const Merged merged = merge_rows(gradients, t);
      const RowTable& table = tables[spec.tables[t].number];
      std::size_t bytes = 0;
      const format::RecordSection section = place_section(table, spec.tables[t].number, merged.rows.size(), bytes);
      summed->storage[t].resize(bytes + format::line_bytes);
      summed->merged[t] = rows_of(section, line_aligned(summed->storage[t]));
      if (table.has_keys()) {
        summed->keys[t].resize(merged.rows.size());
        summed->merged[t].keys = summed->keys[t].data();
      }
      summed->num_rows[t] = merged.rows.size();
      summed->sums[t].assign(merged.rows.size() * dim, 0.0f);
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        const Capture& capture = *gradients[i].capture;
        const TablePlan& plan = capture.plan->tables[t];
        copy_rows(table, capture.tables[t], merged.position[i], summed->merged[t]);
        for (std::size_t u = 0; u < plan.keys.size(); ++u) summed->keys[t][merged.position[i][u]] = plan.keys[u];
        kernels.sum_gradients(dim, occurrences_of(plan), gradients[i].grad, merged.position[i].data(), true,
                              summed->sums[t].data(), 0, plan.num_unique());
      }
    }
    squares[t] = kernels.sum_of_squares(summed->sums[t].data(), summed->sums[t].size());
  });
  summed->sum_of_squares = 0;
  for (const double square : squares) summed->sum_of_squares += square;
  return summed;
}

void scale_gradients(const std::vector<RowTable>& tables, const Capture& capture, std::size_t f, const float* grad,
                     float* out) {
  const Plan& plan = *capture.plan;
  const PlanFeature& feature = plan.features[f];
  const auto& table = plan.spec->tables[feature.table];
  const TablePlan& part = plan.tables[feature.table];
  const std::uint32_t* bag_start = plan.bag_start(f);
  const std::size_t first = bag_start[0];
  const std::size_t count = plan.num_lookups_of(f);
  std::vector<std::uint32_t> bag_of(count);
  for (std::size_t bag = 0; bag < feature.num_bags; ++bag) {
    std::fill(bag_of.begin() + static_cast<std::ptrdiff_t>(bag_start[bag] - first),
              bag_of.begin() + static_cast<std::ptrdiff_t>(bag_start[bag + 1] - first),
              static_cast<std::uint32_t>(bag));
  }
  const PoolSpec pooling{capture.tables[feature.table].weights, table.dim, tables[table.number].spec.dtype,
                         part.position.data() + first,          bag_start, nullptr,
                         table.pooling == Pooling::mean,        nullptr,   0};
  best_kernels().scale_gradients(pooling, bag_of.data(), grad + feature.first_output, feature.output_stride, out, 0,
                                 count);
}

}  // namespace holdfast

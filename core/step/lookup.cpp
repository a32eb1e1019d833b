#include "step/lookup.h"

#include <cstdint>
#include <string>

#include "base/error.h"

namespace holdfast {

void require_own_rows(std::span<const std::uint64_t> rows, const RowTable& table) {
  const auto foreign = table.first_foreign(rows);
  if (!foreign) return;
  const std::string of_table = " of table '" + table.name + "'";
  if (!table.layout || !table.layout->is_place(*foreign)) {
    throw Error(ErrorKind::config, "place " + std::to_string(*foreign) + of_table + " is no row's");
  }
  throw Error(ErrorKind::config, "row " + std::to_string(table.layout->row_of(*foreign)) + of_table + " is of shard " +
                                     std::to_string(table.layout->shard_of(*foreign)) +
                                     ", which this writer does not own");
}

void require_own_rows(const Plan& plan, const std::vector<RowTable>& tables) {
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const TablePlan& table = plan.tables[t];
    require_own_rows(std::span(table.rows).first(table.num_placed), tables.at(plan.spec->tables[t].number));
  }
}

void pool_features(const Plan& plan, const std::vector<WorkingRows>& rows, const std::vector<RowTable>& tables,
                   float* out) {
  const Kernels& kernels = best_kernels();
  for_bags(plan, [&](std::size_t f, std::size_t begin, std::size_t end) {
    const PlanFeature& feature = plan.features[f];
    const auto& table = plan.spec->tables[feature.table];
    const TablePlan& part = plan.tables[feature.table];
    const PoolSpec pooling{rows[feature.table].weights,
                           table.dim,
                           tables[table.number].spec.dtype,
                           part.position.data(),
                           plan.bag_start(f),
                           part.bag_scale.empty() ? nullptr : part.bag_scale.data(),
                           table.pooling == Pooling::mean,
                           out + feature.first_output,
                           feature.output_stride};
    kernels.pool_bags(pooling, begin, end);
  });
}

std::vector<WorkingRows> RowScratch::rows_for(const Plan& plan, const std::vector<RowTable>& tables) {
  const CollectionSpec& spec = *plan.spec;
  std::size_t bytes = 0;
  std::vector<format::RecordSection> sections;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const std::uint32_t number = spec.tables[t].number;
    sections.push_back(place_section(tables[number], number, plan.tables[t].num_unique(), bytes));
  }
  if (memory_.size() < bytes + format::line_bytes) memory_.resize(bytes + format::line_bytes);
  std::byte* data = line_aligned(memory_);
  std::vector<WorkingRows> rows;
  for (const format::RecordSection& section : sections) rows.push_back(rows_of(section, data));
  name_keys(plan, rows);
  return rows;
}

void name_keys(const Plan& plan, std::vector<WorkingRows>& rows) {
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    if (!plan.tables[t].keys.empty()) rows[t].keys = plan.tables[t].keys.data();
  }
}

void Evaluator::pool(const Plan& plan, const std::vector<RowTable>& tables, const Read& read, float* out) {
  const std::vector<WorkingRows> rows = scratch_.rows_for(plan, tables);
  read(rows);
  pool_features(plan, rows, tables, out);
}

}  // namespace holdfast

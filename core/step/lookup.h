// Lookup: pooling a plan's features, from a capture's working set or, for evaluation, straight from home.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "base/format.h"
#include "base/parallel.h"
#include "rows/row_table.h"
#include "step/collection.h"

namespace holdfast {

// How the rows of one table lie in a record, or in scratch memory laid out like one: row numbers, weights and state
// behind one another, each from a line of its own. Moves `offset` past them.
inline format::RecordSection place_section(const RowTable& table, std::uint32_t number, std::size_t num_rows,
                                           std::size_t& offset) {
  format::RecordSection section{};
  section.table = number;
  section.num_rows = num_rows;
  section.rows_offset = offset;
  offset += format::line_up(num_rows * 8);
  section.weights_offset = offset;
  offset += format::line_up(num_rows * table.weight_bytes());
  section.state_offset = offset;
  offset += format::line_up(num_rows * table.state_bytes());
  return section;
}

// The first byte of `memory` that begins a line: up to line_bytes - 1 bytes are skipped.
inline std::byte* line_aligned(std::vector<std::byte>& memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
  return memory.data() + (format::line_up(address) - address);
}

inline WorkingRows rows_of(const format::RecordSection& section, std::byte* data) {
  return {reinterpret_cast<std::uint64_t*>(data + section.rows_offset), data + section.weights_offset,
          reinterpret_cast<float*>(data + section.state_offset)};
}

inline constexpr std::size_t row_chunk_bytes = 128 * 1024;  // of weights: what one index of a parallel_for works on

struct RowChunk {
  std::size_t table;
  std::size_t begin;
  std::size_t end;
};

// Where ranges of a table's rows may begin.
struct AtAnyRow {
  std::size_t operator()(std::size_t) const { return 1; }
};

// Runs body(table, begin, end) over ranges of the rows of several tables, on all threads. Ranges begin at multiples of
// unit(table).
template <class NumRows, class Body, class Unit = AtAnyRow>
void for_rows(const CollectionSpec& spec, const NumRows& num_rows, const Body& body, const Unit& unit = {}) {
  std::vector<RowChunk> chunks;
  for (std::size_t t = 0; t < spec.tables.size(); ++t) {
    const std::size_t rows = num_rows(t);
    const std::size_t wanted = std::max<std::size_t>(64, row_chunk_bytes / (std::size_t{spec.tables[t].dim} * 4));
    const std::size_t step = std::max<std::size_t>(1, wanted / unit(t)) * unit(t);
    for (std::size_t begin = 0; begin < rows; begin += step) chunks.push_back({t, begin, std::min(begin + step, rows)});
  }
  parallel_for(chunks.size(), [&](std::size_t i) { body(chunks[i].table, chunks[i].begin, chunks[i].end); });
}

template <class Body>
void for_rows(const Plan& plan, const Body& body) {
  for_rows(*plan.spec, [&](std::size_t t) { return plan.tables[t].num_unique(); }, body);
}

constexpr std::size_t bags_per_chunk = 256;  // what one index of a parallel_for pools

// Runs body(feature, begin, end) over ranges of the bags of a plan's features, on all threads.
template <class Body>
void for_bags(const Plan& plan, const Body& body) {
  struct Chunk {
    std::size_t feature;
    std::size_t begin;
  };
  std::vector<Chunk> chunks;
  for (std::size_t f = 0; f < plan.features.size(); ++f) {
    for (std::size_t bag = 0; bag < plan.features[f].num_bags; bag += bags_per_chunk) chunks.push_back({f, bag});
  }
  parallel_for(chunks.size(), [&](std::size_t i) {
    const auto [f, begin] = chunks[i];
    body(f, begin, std::min(begin + bags_per_chunk, plan.features[f].num_bags));
  });
}

// Throws config where a row of the plan is none that this writer has; names the row and its shard.
void require_own_rows(const Plan& plan, const std::vector<RowTable>& tables);
// The same of one table's rows, ascending.
void require_own_rows(std::span<const std::uint64_t> rows, const RowTable& table);

// Pools every feature of `plan` from `rows`, the working rows of its tables, into out [num_bags, output_width].
void pool_features(const Plan& plan, const std::vector<WorkingRows>& rows, const std::vector<RowTable>& tables,
                   float* out);

// Puts the plan's row numbers into `rows`, one for each of its tables, and runs fill(table, rows of it, begin, end) over
// ranges of them, on all threads.
template <class Fill>
void fill_rows(const Plan& plan, const std::vector<WorkingRows>& rows, const Fill& fill) {
  for_rows(plan, [&](std::size_t t, std::size_t begin, std::size_t end) {
    const std::uint64_t* numbers = plan.tables[t].rows.data();
    std::copy(numbers + begin, numbers + end, rows[t].rows + begin);
    fill(plan.spec->tables[t].number, rows[t], begin, end);
  });
}

// Has `rows`, one for each of the plan's tables, say whose they are.
void name_keys(const Plan& plan, std::vector<WorkingRows>& rows);

// Memory for a plan's rows outside of any log, kept from one use to the next.
class RowScratch {
 public:
  // One WorkingRows for each of the plan's tables; they hold until the next call.
  std::vector<WorkingRows> rows_for(const Plan& plan, const std::vector<RowTable>& tables);

 private:
  std::vector<std::byte> memory_;
};

// Pools without a capture: copies the plan's rows into scratch memory first, so that a bag reads compact rows here too.
class Evaluator {
 public:
  // `read` fills in the plan's rows, one WorkingRows for each of its tables.
  using Read = std::function<void(const std::vector<WorkingRows>& rows)>;
  void pool(const Plan& plan, const std::vector<RowTable>& tables, const Read& read, float* out);

 private:
  RowScratch scratch_;
};

}  // namespace holdfast

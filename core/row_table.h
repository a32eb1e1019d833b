// Row table: what a pool's rows are, whatever keeps them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "format.h"
#include "kernels/kernels.h"

namespace holdfast {

struct RowTable {
  RowSpec spec;
  std::uint64_t num_rows;
  std::string name{};

  std::size_t weight_bytes() const { return std::size_t{spec.dim} * bytes_of(spec.dtype); }
  std::size_t state_bytes() const { return std::size_t{spec.state_floats} * 4; }
};

// The tables of a pool, by number.
inline std::vector<RowTable> row_tables_of(const std::vector<format::TableRecord>& records, std::uint64_t seed) {
  std::vector<RowTable> tables;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const format::TableRecord& record = records[i];
    tables.push_back(
        {{record.embedding_dim, static_cast<RowDtype>(record.dtype), static_cast<RowOptimizer>(record.optimizer),
          record.state_floats, seed, i, record.init_low, record.init_high},
         record.num_embeddings,
         record.name});
  }
  return tables;
}

}  // namespace holdfast

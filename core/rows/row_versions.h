// Row versions: one version each of some rows of a pool's tables, in memory.
//
// Invariants
// - It takes memory for the rows that it holds, once each, however often they come.
// - Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/kernels.h"
#include "rows/row_index.h"
#include "rows/row_table.h"
#include "rows/row_values.h"

namespace holdfast {

class RowVersions {
 public:
  explicit RowVersions(const std::vector<RowTable>& tables);

  bool has(std::uint32_t table, std::uint64_t row) const { return tables_[table].index.find(row).has_value(); }
  // Takes those of rows [0, num_rows) that are not there yet, whatever their fresh bits.
  void keep_first(std::uint32_t table, const WorkingRows& rows, std::size_t num_rows);
  // Takes a row, weights and behind them state, in place of what is there.
  void replace(std::uint32_t table, std::uint64_t row, const std::byte* image);

  // The rows at or after `first`, ascending, `count` at most, into `out`; returns how many.
  std::size_t read(std::uint32_t table, std::uint64_t first, const RowValues& out, std::size_t count);

 private:
  struct Table {
    std::size_t weight_bytes;
    std::size_t state_bytes;
    std::size_t block_rows;
    RowIndex index;  // row → place
    std::vector<std::unique_ptr<std::byte[]>> blocks;
    std::vector<std::uint64_t> sorted;  // the index's rows, where it has as many

    std::byte* at(std::uint64_t place) const {
      return blocks[place / block_rows].get() + place % block_rows * (weight_bytes + state_bytes);
    }
  };

  static std::byte* add(Table& table, std::uint64_t row);

  std::vector<Table> tables_;
};

}  // namespace holdfast

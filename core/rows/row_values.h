// Row values: rows on their way out of a pool, or into one. A row's values are its weights, and behind them its state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "rows/row_table.h"

namespace holdfast {

inline std::size_t value_bytes(const RowTable& table) { return table.weight_bytes() + table.state_bytes(); }

// Room for rows, one row's values behind another's.
struct RowValues {
  std::uint64_t* rows;
  std::byte* values;
};

// Rows that come from elsewhere, in any order, each once.
class ImportedRows {
 public:
  // Weights and state apart; state is zeros where it is empty. Both throw config where the arrays do not fit the table.
  static ImportedRows apart(const RowTable& table, std::span<const std::uint64_t> rows,
                            std::span<const std::byte> weights, std::span<const float> state);
  static ImportedRows together(const RowTable& table, std::span<const std::uint64_t> rows,
                               std::span<const std::byte> values);

  std::span<const std::uint64_t> rows() const { return rows_; }
  // Writes weights and state of the one at `i`, which have so many bytes.
  void put(std::size_t i, std::size_t weight_bytes, std::byte* weights, std::size_t state_bytes,
           std::byte* state) const;
  ImportedRows part(std::size_t begin, std::size_t count) const;

 private:
  ImportedRows() = default;

  std::span<const std::uint64_t> rows_;
  const std::byte* weights_ = nullptr;
  const std::byte* state_ = nullptr;
  std::size_t weight_stride_ = 0;
  std::size_t state_stride_ = 0;
};

// Writes the weights that rows have before any update; their state is zeros then.
void initial_weights(const RowTable& table, std::span<const std::uint64_t> rows, std::byte* weights);

// Which of the rows is the first by number, which the second, and so on; of rows that are there twice, the one before.
void ascending_order(std::span<const std::uint64_t> rows, std::span<std::int64_t> order);

// Copies the pieces of `data` that `order` names, piece_bytes each, to `out`, one behind another.
void take_pieces(const std::byte* data, std::size_t piece_bytes, std::span<const std::int64_t> order, std::byte* out);

}  // namespace holdfast

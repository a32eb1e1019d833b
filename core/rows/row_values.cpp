#include "rows/row_values.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "base/error.h"

namespace holdfast {
namespace {

[[noreturn]] void refuse(const RowTable& table) {
  throw Error(ErrorKind::config, "imported rows do not fit table '" + table.name + "'");
}

constexpr unsigned digit_bits = 11;
constexpr std::size_t num_digits = std::size_t{1} << digit_bits;

// By the upper half of each, whose lowest `bits` may differ; least significant digit first.
void sort_by_upper_half(std::vector<std::uint64_t>& pairs, unsigned bits) {
  std::vector<std::uint64_t> sorted(pairs.size());
  for (unsigned shift = 32; shift < 32 + bits; shift += digit_bits) {
    std::array<std::size_t, num_digits> begin{};
    const auto digit = [shift](std::uint64_t pair) { return pair >> shift & (num_digits - 1); };
    for (const std::uint64_t pair : pairs) ++begin[digit(pair)];
    std::exclusive_scan(begin.begin(), begin.end(), begin.begin(), std::size_t{0});
    for (const std::uint64_t pair : pairs) sorted[begin[digit(pair)]++] = pair;
    pairs.swap(sorted);
  }
}

}  // namespace

ImportedRows ImportedRows::apart(const RowTable& table, std::span<const std::uint64_t> rows,
                                 std::span<const std::byte> weights, std::span<const float> state) {
  if (weights.size() != rows.size() * table.weight_bytes()) refuse(table);
  if (!state.empty() && state.size() != rows.size() * table.spec.state_floats) refuse(table);
  ImportedRows imported;
  imported.rows_ = rows;
  imported.weights_ = weights.data();
  imported.weight_stride_ = table.weight_bytes();
  imported.state_ = state.empty() ? nullptr : std::as_bytes(state).data();
  imported.state_stride_ = table.state_bytes();
  return imported;
}

ImportedRows ImportedRows::together(const RowTable& table, std::span<const std::uint64_t> rows,
                                    std::span<const std::byte> values) {
  if (values.size() != rows.size() * value_bytes(table)) refuse(table);
  ImportedRows imported;
  imported.rows_ = rows;
  imported.weights_ = values.data();
  imported.weight_stride_ = imported.state_stride_ = value_bytes(table);
  if (table.state_bytes() != 0 && !rows.empty()) imported.state_ = values.data() + table.weight_bytes();
  return imported;
}

void ImportedRows::put(std::size_t i, std::size_t weight_bytes, std::byte* weights, std::size_t state_bytes,
                       std::byte* state) const {
  std::memcpy(weights, weights_ + i * weight_stride_, weight_bytes);
  if (state_bytes == 0) return;
  if (state_ != nullptr) {
    std::memcpy(state, state_ + i * state_stride_, state_bytes);
  } else {
    std::memset(state, 0, state_bytes);
  }
}

ImportedRows ImportedRows::part(std::size_t begin, std::size_t count) const {
  ImportedRows part = *this;
  part.rows_ = rows_.subspan(begin, count);
  part.weights_ += begin * weight_stride_;
  if (state_ != nullptr) part.state_ += begin * state_stride_;
  return part;
}

void initial_weights(const RowTable& table, std::span<const std::uint64_t> rows, std::byte* weights) {
  for (std::size_t i = 0; i < rows.size(); ++i) {
    best_kernels().initial_row(table.spec, rows[i], weights + i * table.weight_bytes());
  }
}

void ascending_order(std::span<const std::uint64_t> rows, std::span<std::int64_t> order) {
  constexpr std::uint64_t half = std::numeric_limits<std::uint32_t>::max();
  if (rows.empty()) return;
  const auto [least, most] = std::ranges::minmax(rows);
  if (rows.size() > half || most - least > half) {
    std::iota(order.begin(), order.end(), std::int64_t{0});
    std::ranges::stable_sort(order, {}, [&](std::int64_t i) { return rows[static_cast<std::size_t>(i)]; });
    return;
  }
  std::vector<std::uint64_t> pairs(rows.size());
  for (std::size_t i = 0; i < rows.size(); ++i) pairs[i] = (rows[i] - least) << 32 | i;
  sort_by_upper_half(pairs, static_cast<unsigned>(std::bit_width(most - least)));
  for (std::size_t i = 0; i < pairs.size(); ++i) order[i] = static_cast<std::int64_t>(pairs[i] & half);
}

// Each piece is somewhere else: what is wanted next is on its way meanwhile.
void take_pieces(const std::byte* data, std::size_t piece_bytes, std::span<const std::int64_t> order, std::byte* out) {
  constexpr std::size_t ahead = 12;
  constexpr std::size_t line = 64;
  const auto piece = [&](std::size_t i) { return data + static_cast<std::size_t>(order[i]) * piece_bytes; };
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (i + ahead < order.size()) {
      for (std::size_t at = 0; at < piece_bytes; at += line) __builtin_prefetch(piece(i + ahead) + at);
    }
    std::memcpy(out + i * piece_bytes, piece(i), piece_bytes);
  }
}

}  // namespace holdfast

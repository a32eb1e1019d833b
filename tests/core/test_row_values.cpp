// Rows on their way out of a pool and into one: their order, and their values together and apart.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "rows/row_values.h"
#include "thrown.h"

namespace holdfast {
namespace {

std::vector<std::int64_t> ordered(const std::vector<std::uint64_t>& rows) {
  std::vector<std::int64_t> order(rows.size(), -1);
  ascending_order(rows, order);
  return order;
}

void the_order_is_that_of_a_stable_sort(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  // Ranges of no bit, of a digit and of one more, of half the bits and of one more, and of all.
  for (const unsigned bits : {0u, 1u, 11u, 12u, 22u, 32u, 33u, 48u, 64u}) {
    for (const std::size_t count : {0u, 1u, 2u, 3u, 100u, 5000u}) {
      check::context = std::to_string(count) + " rows of " + std::to_string(bits) + " bits";
      const std::uint64_t least = bits == 64 ? 0 : random() % (std::uint64_t{1} << 40);
      std::vector<std::uint64_t> rows(count);
      for (std::uint64_t& row : rows) row = least + (bits == 0 ? 0 : random() >> (64 - bits));
      std::vector<std::int64_t> expected(count);
      std::iota(expected.begin(), expected.end(), std::int64_t{0});
      std::ranges::stable_sort(expected, {}, [&](std::int64_t i) { return rows[static_cast<std::size_t>(i)]; });
      CHECK(ordered(rows) == expected);
    }
  }
}

void pieces_are_taken_whole(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const std::size_t piece_bytes : {1u, 6u, 64u, 260u}) {
    check::context = "pieces of " + std::to_string(piece_bytes);
    std::vector<std::byte> data(50 * piece_bytes);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    std::vector<std::int64_t> order(70);
    for (std::int64_t& place : order) place = static_cast<std::int64_t>(random() % 50);
    std::vector<std::byte> out(order.size() * piece_bytes);
    take_pieces(data.data(), piece_bytes, order, out.data());
    for (std::size_t i = 0; i < order.size(); ++i) {
      const auto piece = out.begin() + static_cast<std::ptrdiff_t>(i * piece_bytes);
      const auto from = data.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(order[i]) * piece_bytes);
      CHECK(std::equal(piece, piece + static_cast<std::ptrdiff_t>(piece_bytes), from));
    }
  }
}

RowTable table_of(std::uint32_t dim, RowDtype dtype, RowOptimizer optimizer) {
  return {{dim, dtype, optimizer, state_floats_of(optimizer, dim), 1, 0, 0, 0}, 1000, "table"};
}

// Rows of half precision may have a state that no float's alignment fits.
void values_together_and_apart_are_the_same_rows(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const RowOptimizer optimizer : {RowOptimizer::sgd, RowOptimizer::rowwise_adagrad, RowOptimizer::adam}) {
    for (const RowDtype dtype : {RowDtype::f32, RowDtype::bf16}) {
      const RowTable table = table_of(3, dtype, optimizer);
      check::context = std::to_string(value_bytes(table)) + " bytes a row";
      const std::vector<std::uint64_t> rows = {7, 3, 900, 4};
      std::vector<std::byte> weights(rows.size() * table.weight_bytes());
      for (std::byte& byte : weights) byte = static_cast<std::byte>(random());
      std::vector<float> state(rows.size() * table.spec.state_floats);
      for (float& value : state) value = static_cast<float>(random() % 1000);
      for (const bool has_state : {true, false}) {
        if (!has_state) std::ranges::fill(state, 0.0f);
        const std::span<const float> given = has_state ? std::span<const float>(state) : std::span<const float>();
        const ImportedRows apart = ImportedRows::apart(table, rows, weights, given);
        std::vector<std::byte> values(rows.size() * value_bytes(table), std::byte{0x5a});
        const auto put = [&](const ImportedRows& imported, std::size_t i, std::byte* to) {
          imported.put(i, table.weight_bytes(), to, table.state_bytes(), to + table.weight_bytes());
        };
        for (std::size_t i = 0; i < rows.size(); ++i) put(apart, i, values.data() + i * value_bytes(table));
        const ImportedRows last = ImportedRows::together(table, rows, values).part(1, 3);
        CHECK(std::ranges::equal(last.rows(), std::span(rows).subspan(1)));
        for (std::size_t i = 0; i < last.rows().size(); ++i) {
          std::vector<std::byte> row(value_bytes(table));
          put(last, i, row.data());
          const auto weights_of = std::span(weights).subspan((i + 1) * table.weight_bytes(), table.weight_bytes());
          const auto state_of =
              std::as_bytes(std::span(state)).subspan((i + 1) * table.state_bytes(), table.state_bytes());
          CHECK(std::ranges::equal(std::span(row).first(table.weight_bytes()), weights_of));
          CHECK(std::ranges::equal(std::span(row).subspan(table.weight_bytes()), state_of));
        }
        const auto short_of_one = std::span(values).first(values.size() - 1);
        CHECK(kind_thrown_by([&] { ImportedRows::together(table, rows, short_of_one); }) == ErrorKind::config);
      }
    }
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  the_order_is_that_of_a_stable_sort(seed);
  pieces_are_taken_whole(seed);
  values_together_and_apart_are_the_same_rows(seed);
  return check::passed();
}

// What values the kernels give rows: initial ones, and those of 16-bit formats, rounded and read again.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "draws.h"
#include "kernels/kernels.h"
#include "reference_kernels.h"
#include "usable_kernels.h"

namespace holdfast {
namespace {

void initial_values_are_uniform_and_inside(Random& random) {
  RowSpec spec{.dim = 64,
               .dtype = RowDtype::f32,
               .optimizer = RowOptimizer::sgd,
               .state_floats = 0,
               .seed = random(),
               .table = 3,
               .init_low = -0.25f,
               .init_high = 0.75f};
  constexpr int num_rows = 4096;
  constexpr double num = num_rows * 64.0;
  std::vector<double> bins(64);
  double sum = 0, sum_products = 0;
  std::vector<float> row(64), previous(64);
  for (std::uint64_t r = 0; r < num_rows; ++r) {
    best_kernels().initial_row(spec, r, reinterpret_cast<std::byte*>(row.data()));
    for (std::size_t e = 0; e < 64; ++e) {
      CHECK(row[e] >= spec.init_low && row[e] < spec.init_high);
      bins[static_cast<std::size_t>((static_cast<double>(row[e]) + 0.25) * 64)] += 1;
      sum += static_cast<double>(row[e]);
      sum_products += (static_cast<double>(row[e]) - 0.25) * (static_cast<double>(previous[e]) - 0.25);
    }
    previous = row;
  }
  CHECK(std::fabs(sum / num - 0.25) < 6 * std::sqrt(1.0 / 12 / num));
  CHECK(std::fabs(sum_products / num) < 6 * (1.0 / 12) / std::sqrt(num));  // neighbouring rows are uncorrelated
  double chi_squared = 0;
  for (const double count : bins) chi_squared += (count - num / 64) * (count - num / 64) / (num / 64);
  CHECK(chi_squared < 63 + 6 * std::sqrt(2 * 63.0));
  // Rounding never reaches init_high, however narrow the interval or large its bounds.
  spec.init_low = 16777215.0f;
  spec.init_high = 16777216.0f;
  best_kernels().initial_row(spec, 0, reinterpret_cast<std::byte*>(row.data()));
  for (const float value : row) CHECK(value == spec.init_low);
}

// Updates one row of 16-bit weights with SGD (learning rate 1, gradient -delta: new = old + delta).
std::vector<std::uint16_t> rounded(const Kernels& kernels, RowDtype dtype, const std::vector<std::uint16_t>& old,
                                   const std::vector<float>& delta, std::uint64_t row, std::uint64_t step) {
  const std::uint32_t dim = static_cast<std::uint32_t>(old.size());
  const RowSpec spec{.dim = dim,
                     .dtype = dtype,
                     .optimizer = RowOptimizer::sgd,
                     .state_floats = 0,
                     .seed = 1,
                     .table = 2,
                     .init_low = 0,
                     .init_high = 0};
  UpdateSpec update{};
  update.learning_rate = -1;
  update.gradient_scale = 1;
  update.step = step;
  update.rounding_seed = 99;
  std::vector<std::uint16_t> home(dim * (row + 1)), working = old;
  std::vector<std::uint64_t> touched(row / 64 + 1, ~std::uint64_t{0});
  std::uint64_t rows = row;
  kernels.update_from_sums(spec, update, {reinterpret_cast<std::byte*>(home.data()), nullptr, touched.data()},
                           {&rows, reinterpret_cast<std::byte*>(working.data()), nullptr}, delta.data(), nullptr,
                           nullptr, 0, 1);
  return {home.end() - dim, home.end()};
}

void stochastic_rounding_is_unbiased(Random& random) {
  for (const RowDtype dtype : {RowDtype::f16, RowDtype::bf16}) {
    const auto& format = reference_kernels::format_of(dtype);
    for (int i = 0; i < 60; ++i) {
      // Magnitudes from far below the smallest subnormal of float16 to large.
      const float value = uniform(random, -1, 1) * std::ldexp(1.0f, static_cast<int>(below(random, 40)) - 26);
      const std::uint32_t dim = 1024;
      const std::vector<std::uint16_t> zeros(dim);
      const std::vector<float> delta(dim, value);
      double sum = 0;
      constexpr int num_steps = 32;
      float low = std::numeric_limits<float>::infinity(), high = -low;
      for (std::uint64_t step = 1; step <= num_steps; ++step) {
        for (const std::uint16_t bits : rounded(best_kernels(), dtype, zeros, delta, 0, step)) {
          const float result = reference_kernels::widen(bits, format);
          sum += static_cast<double>(result);
          low = std::min(low, result);
          high = std::max(high, result);
        }
      }
      const double mean = sum / (dim * num_steps);
      const double unit = static_cast<double>(high) - static_cast<double>(low);  // between the two neighbours
      CHECK(low <= value || low == high);
      CHECK(std::fabs(mean - static_cast<double>(value)) <= 6 * 0.5 * unit / std::sqrt(dim * num_steps) || unit == 0);
      if (unit == 0) {  // exact, or so near a neighbour that no draw went the other way
        const double neighbour = std::max(std::fabs(mean) * 0x1p-7, 0x1p-24);
        CHECK(std::fabs(mean - static_cast<double>(value)) <= neighbour * 20 / (dim * num_steps));
      }
    }
  }
}

void special_values_round_as_promised() {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const Kernels* kernels : instruction_sets()) {
    check::context = kernels->name;
    for (const RowDtype dtype : {RowDtype::f16, RowDtype::bf16}) {
      const auto& format = reference_kernels::format_of(dtype);
      const std::uint16_t max_finite = static_cast<std::uint16_t>(format.infinity - 1);
      const float max_float = std::numeric_limits<float>::max();
      const std::vector<float> delta{max_float, -max_float, infinity, -infinity, std::nanf(""), 65519.99f, 0.0f, -0.0f};
      for (std::uint64_t step = 1; step < 50; ++step) {
        const auto result = rounded(*kernels, dtype, std::vector<std::uint16_t>(8), delta, 5, step);
        CHECK(result[0] == max_finite);
        CHECK(result[1] == (max_finite | 0x8000));
        CHECK(result[2] == format.infinity);
        CHECK(result[3] == (format.infinity | 0x8000));
        CHECK((result[4] & 0x7fff) > format.infinity);
        if (dtype == RowDtype::f16) CHECK(result[5] == max_finite);
        CHECK(result[6] == 0 && result[7] == 0);
      }
    }
  }
}

// All 65536 values of both formats: pooled (widened) alike everywhere, and kept by an update that adds nothing.
void every_16_bit_value_survives() {
  for (const RowDtype dtype : {RowDtype::f16, RowDtype::bf16}) {
    const auto& format = reference_kernels::format_of(dtype);
    std::vector<std::uint16_t> all(65536);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i);
    std::vector<std::uint32_t> position(65536 / 64), bag_start(65536 / 64 + 1);
    for (std::uint32_t i = 0; i < position.size(); ++i) position[i] = i;
    for (std::uint32_t i = 0; i < bag_start.size(); ++i) bag_start[i] = i;
    for (const Kernels* kernels : instruction_sets()) {
      check::context = kernels->name;
      std::vector<float> out(65536);
      kernels->pool_bags({.weights = reinterpret_cast<const std::byte*>(all.data()),
                          .dim = 64,
                          .dtype = dtype,
                          .position = position.data(),
                          .bag_start = bag_start.data(),
                          .scale = nullptr,
                          .mean = false,
                          .out = out.data(),
                          .out_stride = 64},
                         0, position.size());
      for (std::uint32_t i = 0; i < 65536; ++i) {
        const float wide = 0.0f + reference_kernels::widen(static_cast<std::uint16_t>(i), format);
        if (std::isnan(wide)) {
          // Adding to zero makes a NaN quiet; sign and payload stay.
          const std::uint32_t quiet = std::bit_cast<std::uint32_t>(wide) | 0x400000u;
          CHECK(std::bit_cast<std::uint32_t>(out[i]) == quiet);
        } else {
          CHECK(std::bit_cast<std::uint32_t>(out[i]) == std::bit_cast<std::uint32_t>(wide));
        }
      }
      for (std::uint32_t first = 0; first < 65536; first += 4096) {
        const std::vector<std::uint16_t> old(all.begin() + first, all.begin() + first + 4096);
        const auto result = rounded(*kernels, dtype, old, std::vector<float>(4096, -0.0f), 1, 7);
        for (std::uint32_t i = 0; i < 4096; ++i) {
          const std::uint32_t bits = first + i;
          const bool nan = (bits & 0x7fff) > format.infinity;
          const std::uint32_t quiet_bit = 1u << (format.fraction_bits - 1);
          CHECK(result[i] == (nan ? (bits | quiet_bit) : (bits == 0x8000 ? result[i] & 0x8000u : bits)));
        }
      }
    }
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  every_16_bit_value_survives();
  special_values_round_as_promised();
  stochastic_rounding_is_unbiased(random);
  initial_values_are_uniform_and_inside(random);
  return check::passed();
}

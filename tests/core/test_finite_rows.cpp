// What an update says of the rows that it wrote: which is the first that is not finite.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "draws.h"
#include "kernels/kernels.h"
#include "reference_kernels.h"
#include "usable_kernels.h"

namespace holdfast {
namespace {

constexpr std::size_t num_rows = 37;
constexpr float largest = std::numeric_limits<float>::max();

struct Rows {
  explicit Rows(const RowSpec& spec)
      : weights(num_rows * spec.dim * bytes_of(spec.dtype)), state(num_rows * spec.state_floats + 1) {}
  std::vector<std::byte> weights;
  std::vector<float> state;  // one more, so that there is a place for none
};

// What the four updates of one table say of rows [begin, num_rows), each of which has one occurrence.
std::vector<std::size_t> first_of_each(const Kernels& kernels, const RowSpec& spec, const UpdateSpec& update,
                                       const Rows& before, const std::vector<float>& grad, std::size_t begin) {
  Rows old = before, home(spec), fresh(spec);
  std::vector<std::uint64_t> rows(num_rows), touched(1);
  std::vector<std::uint32_t> row_start(num_rows + 1), gradient_offset(num_rows);
  for (std::uint32_t u = 0; u < num_rows; ++u) {
    rows[u] = u;
    row_start[u + 1] = u + 1;
    gradient_offset[u] = u * spec.dim;
  }
  const WorkingRows working{rows.data(), old.weights.data(), old.state.data()};
  const HomeRows to_home{home.weights.data(), home.state.data(), touched.data()};
  const SlotRows to_fresh{fresh.weights.data(), fresh.state.data()};
  const Occurrences occurrences{row_start.data(), gradient_offset.data(), nullptr};
  return {
      kernels.update(spec, update, to_home, working, occurrences, grad.data(), nullptr, nullptr, begin, num_rows),
      kernels.update_from_sums(spec, update, to_home, working, grad.data(), nullptr, nullptr, begin, num_rows),
      kernels.update_compact(spec, update, working, occurrences, grad.data(), to_fresh, begin, num_rows),
      kernels.update_compact_from_sums(spec, update, working, grad.data(), to_fresh, begin, num_rows),
      kernels.first_non_finite(spec, {fresh.weights.data(), fresh.state.data()}, begin, num_rows),
  };
}

void check_says(const RowSpec& spec, float overflowing, Random& random) {
  const UpdateSpec update{.learning_rate = 4,
                          .epsilon = 1e-8f,
                          .beta1 = 0.5f,
                          .beta2 = 0.5f,
                          .weight_decay = 0,
                          .gradient_scale = 1,
                          .step = 1,
                          .rounding_seed = 3};
  const Rows before(spec);
  const auto says = [&](const std::vector<float>& grad, std::size_t begin, std::size_t found) {
    const std::vector<std::size_t> expected(5, found);
    CHECK(first_of_each(reference_kernels::kernels, spec, update, before, grad, begin) == expected);
    for (const Kernels* kernels : instruction_sets()) {
      check::context = std::string(kernels->name) + " dim " + std::to_string(spec.dim);
      CHECK(first_of_each(*kernels, spec, update, before, grad, begin) == expected);
    }
  };
  std::vector<float> grad(num_rows * spec.dim);
  says(grad, 0, num_rows);
  for (float& value : grad) value = uniform(random, -1, 1);
  says(grad, 0, num_rows);
  const std::size_t spoilt = 1 + below(random, num_rows - 1);
  const std::size_t elements[] = {0, spec.dim - 1, below(random, spec.dim)};
  for (const std::size_t e : elements) {
    float& value = grad[spoilt * spec.dim + e];
    const float usual = value;
    for (const float given : {overflowing, -overflowing, std::numeric_limits<float>::quiet_NaN()}) {
      value = given;
      says(grad, 0, spoilt);
      says(grad, spoilt, spoilt);
      if (spoilt + 1 < num_rows) says(grad, spoilt + 1, num_rows);
    }
    value = usual;
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  for (const std::uint32_t dim : {1u, 3u, 8u, 16u, 19u, 32u, 64u, 100u, 128u, 333u}) {
    for (const RowDtype dtype : {RowDtype::f32, RowDtype::f16, RowDtype::bf16}) {
      for (const RowOptimizer optimizer : {RowOptimizer::sgd, RowOptimizer::rowwise_adagrad, RowOptimizer::adagrad,
                                           RowOptimizer::adam, RowOptimizer::rowwise_adam}) {
        const RowSpec spec{.dim = dim,
                           .dtype = dtype,
                           .optimizer = optimizer,
                           .state_floats = state_floats_of(optimizer, dim),
                           .seed = 1,
                           .table = 2,
                           .init_low = 0,
                           .init_high = 0};
        // Beside the weights, its square is too large for the state.
        check_says(spec, optimizer == RowOptimizer::sgd ? largest : 1e25f, random);
      }
    }
  }
  return check::passed();
}

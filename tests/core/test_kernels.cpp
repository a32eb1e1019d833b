// Every instruction set against the reference, bit for bit, on random shapes; and what the kernels promise besides.
#include <cmath>
#include <cstring>
#include <map>
#include <vector>

#include "base/parallel.h"
#include "check.h"
#include "draws.h"
#include "kernels/kernels.h"
#include "reference_kernels.h"
#include "usable_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace holdfast {
namespace {

// How a kernel's range is cut, and whether pieces run on several threads.
enum class Cut { whole, pieces, threads };

template <class Body>
void run_cut(Cut cut, std::uint64_t seed, std::size_t count, const Body& body) {
  if (cut == Cut::whole) return body(0, count);
  Random random(seed);
  std::vector<std::pair<std::size_t, std::size_t>> pieces;
  for (std::size_t begin = 0; begin < count;) {
    const std::size_t end = std::min(count, begin + below(random, 70));
    pieces.emplace_back(begin, end);  // some are empty
    begin = end;
  }
  if (cut == Cut::pieces) {
    std::shuffle(pieces.begin(), pieces.end(), random);
    for (const auto& [begin, end] : pieces) body(begin, end);
  } else {
    parallel_for(pieces.size(), [&](std::size_t i) { body(pieces[i].first, pieces[i].second); });
  }
}

// Rows with a canary behind the last byte.
struct Bytes {
  explicit Bytes(std::size_t size = 0) : bytes(size + 8, std::byte{0x5a}) {}
  std::byte* data() { return bytes.data(); }
  float* floats() { return reinterpret_cast<float*>(bytes.data()); }
  bool operator==(const Bytes&) const = default;
  std::vector<std::byte> bytes;
};

struct Working {
  std::vector<std::uint64_t> rows;
  Bytes weights;
  Bytes state;
  WorkingRows view() { return {rows.data(), weights.data(), state.floats()}; }
  bool operator==(const Working&) const = default;
};

// Rows where they live for good.
struct Home {
  Bytes weights;
  Bytes state;
  std::vector<std::uint64_t> touched;
  HomeRows view() { return {weights.data(), state.floats(), touched.data()}; }
  bool operator==(const Home&) const = default;
};

// All memory that a step's kernels write.
struct Memory {
  Bytes home_weights;
  Bytes home_state;
  std::vector<std::uint64_t> touched;
  Home put;  // these, as put makes them
  Working working;
  Working next;
  Working fresh;  // rows after the update, compact
  Working slots;  // these in slots
  Working gathered;
  std::vector<float> pooled;
  std::vector<float> pooled_rest;  // added to what was there
  std::vector<float> sums;
  std::vector<float> scale_gradient;
  HomeRows home() { return {home_weights.data(), home_state.floats(), touched.data()}; }
};

bool same_floats(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * 4) == 0);
}

void check_same(const Memory& a, const Memory& b) {
  CHECK(a.touched == b.touched);
  CHECK(a.working == b.working);
  CHECK(a.next == b.next);
  CHECK(a.fresh == b.fresh);
  CHECK(a.slots == b.slots);
  CHECK(a.gathered == b.gathered);
  CHECK(a.put == b.put);
  CHECK(same_floats(a.pooled, b.pooled));
  CHECK(same_floats(a.pooled_rest, b.pooled_rest));
  CHECK(same_floats(a.sums, b.sums));
  CHECK(same_floats(a.scale_gradient, b.scale_gradient));
  CHECK(a.home_weights == b.home_weights);
  CHECK(a.home_state == b.home_state);
}

std::uint32_t random_dim(Random& random) {
  constexpr std::uint32_t common[] = {8, 16, 32, 64, 128};
  switch (below(random, 4)) {
    case 0: return common[below(random, 5)];
    case 1: return static_cast<std::uint32_t>(1 + below(random, 40));
    case 2: return static_cast<std::uint32_t>(1 + below(random, 130));
    default: return one_in(random, 8) ? static_cast<std::uint32_t>(1 + below(random, 4096)) : 16;
  }
}

// One step on one table with one feature, the same for every set of kernels.
struct Scenario {
  RowSpec spec{};
  UpdateSpec update{};
  std::uint64_t num_rows = 0;
  std::size_t num_bags = 0;
  std::vector<std::uint64_t> rows;            // unique, ascending
  std::vector<std::uint32_t> bag_start;
  std::vector<std::uint32_t> whole_bag_start;  // where the bags are the rest of others
  std::vector<std::uint32_t> bag_of;
  std::vector<std::uint32_t> position;
  std::vector<std::uint32_t> row_start;
  std::vector<std::uint32_t> gradient_offset;
  std::vector<float> scale;                   // by row
  std::vector<float> bag_scale;               // original order
  bool scaled = false;
  bool mean = false;
  std::vector<float> grad;
  std::vector<std::uint32_t> forward;
  bool forwards = false;
  std::vector<std::uint32_t> sum_position;
  bool positioned = false;
  bool accumulate = false;
  bool from_sums = false;
  Memory before;

  explicit Scenario(Random& random, std::uint32_t dim, RowDtype dtype, RowOptimizer optimizer) {
    spec = {.dim = dim,
            .dtype = dtype,
            .optimizer = optimizer,
            .state_floats = state_floats_of(optimizer, dim),
            .seed = random(),
            .table = below(random, 100),
            .init_low = uniform(random, -1, 0.5f),
            .init_high = 0};
    spec.init_high = spec.init_low + (one_in(random, 8) ? 0 : uniform(random, 0, 2));
    update = {.learning_rate = uniform(random, 0.001f, 0.5f),
              .epsilon = one_in(random, 4) ? 1e-3f : 1e-8f,
              .beta1 = 0.9f,
              .beta2 = 0.999f,
              .weight_decay = one_in(random, 3) ? 0.01f : 0,
              .gradient_scale = one_in(random, 3) ? 0.37f : 1,
              .step = 1 + below(random, one_in(random, 4) ? 100000 : 10),
              .rounding_seed = random()};
    num_rows = 1 + below(random, one_in(random, 3) ? 5 : 700);
    num_bags = below(random, dim > 200 ? 6 : one_in(random, 10) ? 800 : 60);
    mean = one_in(random, 2);
    scaled = one_in(random, 2);

    // Bags: some empty; now and then one row takes all lookups.
    const bool one_row = one_in(random, 6);
    const std::uint64_t the_row = below(random, num_rows);
    bag_start.push_back(0);
    std::map<std::uint64_t, std::vector<std::uint32_t>> occurrences;
    std::vector<std::uint64_t> row_of;
    for (std::uint32_t bag = 0; bag < num_bags; ++bag) {
      const std::uint64_t length = one_in(random, 4) ? 0 : below(random, 12);
      for (std::uint64_t i = 0; i < length; ++i) {
        row_of.push_back(one_row ? the_row : below(random, num_rows));
        occurrences[row_of.back()].push_back(static_cast<std::uint32_t>(bag_of.size()));
        bag_of.push_back(bag);
        bag_scale.push_back(uniform(random, -2, 2));
      }
      bag_start.push_back(static_cast<std::uint32_t>(bag_of.size()));
    }
    if (one_in(random, 4)) {  // rows without occurrences
      for (int i = 0; i < 5; ++i) occurrences[below(random, num_rows)];
    }
    position.resize(bag_of.size());
    const std::uint32_t stride = dim + static_cast<std::uint32_t>(below(random, 3));
    for (const auto& [row, where] : occurrences) {
      row_start.push_back(static_cast<std::uint32_t>(gradient_offset.size()));
      for (const std::uint32_t j : where) {
        position[j] = static_cast<std::uint32_t>(rows.size());
        gradient_offset.push_back(bag_of[j] * stride);
        scale.push_back(uniform(random, -2, 2));
      }
      rows.push_back(row);
    }
    row_start.push_back(static_cast<std::uint32_t>(gradient_offset.size()));
    grad.resize(num_bags * stride);
    for (float& value : grad) value = uniform(random, -1, 1);

    before.home_weights = Bytes(num_rows * dim * bytes_of(dtype));
    before.home_state = Bytes(num_rows * spec.state_floats * 4);
    before.touched.resize((num_rows + 63) / 64);
    for (std::uint64_t& word : before.touched) word = one_in(random, 3) ? ~std::uint64_t{0} : random();
    for (std::uint64_t i = 0; i < num_rows * dim; ++i) {
      const float value = uniform(random, -1, 1) * (one_in(random, 10) ? 1e-5f : 1);
      if (dtype == RowDtype::f32) {
        std::memcpy(before.home_weights.data() + i * 4, &value, 4);
      } else {
        reference_kernels::put16(before.home_weights.data(), i,
                                 reference_kernels::narrow_to_nearest(value, reference_kernels::format_of(dtype)));
      }
    }
    for (std::uint64_t i = 0; i < num_rows * spec.state_floats; ++i) {
      before.home_state.floats()[i] = uniform(random, 0, 1);
    }
    const auto make_working = [&](std::size_t num) {
      Working working;
      working.weights = Bytes(num * dim * bytes_of(dtype));
      working.state = Bytes(num * spec.state_floats * 4);
      return working;
    };
    before.fresh = make_working(rows.size());
    before.slots = make_working(rows.size());
    before.gathered = make_working(rows.size());
    before.working = make_working(rows.size());
    before.working.rows = rows;
    // The next batch holds some of the rows, marked fresh as if captured before the update.
    forwards = one_in(random, 2);
    forward.assign(rows.size(), no_forward);
    for (std::size_t u = 0; u < rows.size(); ++u) {
      if (!one_in(random, 2)) continue;
      forward[u] = static_cast<std::uint32_t>(before.next.rows.size());
      before.next.rows.push_back(rows[u] | (one_in(random, 2) ? fresh_bit : 0));
    }
    std::vector<std::uint64_t> next_rows = before.next.rows;
    before.next = make_working(next_rows.size());
    before.next.rows = next_rows;

    before.pooled.assign(num_bags * (dim + 3), -7.0f);
    for (std::size_t i = 0; i < before.pooled.size(); ++i) before.pooled_rest.push_back(uniform(random, -1, 1));
    for (std::uint32_t bag = 0; bag <= num_bags; ++bag) whole_bag_start.push_back(2 * bag_start[bag] + bag / 3);
    before.scale_gradient.assign(bag_of.size(), -7.0f);
    before.sums.resize(rows.size() * dim);
    for (float& value : before.sums) value = uniform(random, -1, 1);
    positioned = one_in(random, 2);
    accumulate = one_in(random, 2);
    from_sums = one_in(random, 3);
    for (std::uint32_t u = 0; u < rows.size(); ++u) sum_position.push_back(u);
    if (positioned) std::shuffle(sum_position.begin(), sum_position.end(), random);
  }

  PoolSpec pool(Memory& memory) const {
    return {.weights = memory.working.weights.data(),
            .dim = spec.dim,
            .dtype = spec.dtype,
            .position = position.data(),
            .bag_start = bag_start.data(),
            .scale = scaled ? bag_scale.data() : nullptr,
            .mean = mean,
            .out = memory.pooled.data(),
            .out_stride = spec.dim + 3};
  }

  // The step's verbs; `undo` ends with a restore.
  Memory run(const Kernels& kernels, Cut cut, std::uint64_t cut_seed, bool undo) const {
    Memory memory = before;
    memory.put = {memory.home_weights, memory.home_state, memory.touched};
    const HomeRows home = memory.home();
    const WorkingRows working = memory.working.view();
    const WorkingRows next = memory.next.view();
    const Occurrences occurrences{row_start.data(), gradient_offset.data(), scaled ? scale.data() : nullptr};
    const std::uint32_t* const forward_to = forwards ? forward.data() : nullptr;
    const std::size_t num_unique = rows.size();
    run_cut(cut, cut_seed, num_unique,
            [&](std::size_t begin, std::size_t end) { kernels.capture(spec, home, working, begin, end); });
    const PoolSpec pool_spec = pool(memory);
    run_cut(cut, cut_seed + 1, num_bags,
            [&](std::size_t begin, std::size_t end) { kernels.pool_bags(pool_spec, begin, end); });
    PoolSpec rest_spec = pool_spec;
    rest_spec.whole_bag_start = whole_bag_start.data();
    rest_spec.out = memory.pooled_rest.data();
    run_cut(cut, cut_seed + 9, num_bags,
            [&](std::size_t begin, std::size_t end) { kernels.pool_bags(rest_spec, begin, end); });
    run_cut(cut, cut_seed + 2, bag_of.size(), [&](std::size_t begin, std::size_t end) {
      kernels.scale_gradients(pool_spec, bag_of.data(), memory.pooled.data(), spec.dim + 3,
                              memory.scale_gradient.data(), begin, end);
    });
    run_cut(cut, cut_seed + 3, num_unique, [&](std::size_t begin, std::size_t end) {
      kernels.sum_gradients(spec.dim, occurrences, grad.data(), positioned ? sum_position.data() : nullptr, accumulate,
                            memory.sums.data(), begin, end);
    });
    run_cut(cut, cut_seed + 4, num_unique, [&](std::size_t begin, std::size_t end) {
      if (from_sums) {
        kernels.update_from_sums(spec, update, home, working, memory.sums.data(), forward_to, &next, begin, end);
      } else {
        kernels.update(spec, update, home, working, occurrences, grad.data(), forward_to, &next, begin, end);
      }
    });
    // Compactly as well, and through slots in some order and back.
    const WorkingRows fresh = memory.fresh.view();
    run_cut(cut, cut_seed + 6, num_unique, [&](std::size_t begin, std::size_t end) {
      if (from_sums) {
        kernels.update_compact_from_sums(spec, update, working, memory.sums.data(), {fresh.weights, fresh.state}, begin,
                                         end);
      } else {
        kernels.update_compact(spec, update, working, occurrences, grad.data(), {fresh.weights, fresh.state}, begin,
                               end);
      }
    });
    const SlotRows slots{memory.slots.weights.data(), memory.slots.view().state};
    run_cut(cut, cut_seed + 7, num_unique, [&](std::size_t begin, std::size_t end) {
      kernels.scatter(spec, slots, sum_position.data(), fresh, begin, end);
    });
    const WorkingRows gathered = memory.gathered.view();
    run_cut(cut, cut_seed + 8, num_unique, [&](std::size_t begin, std::size_t end) {
      kernels.gather(spec, slots, sum_position.data(), gathered, begin, end);
    });
    run_cut(cut, cut_seed + 10, num_unique, [&](std::size_t begin, std::size_t end) {
      kernels.put(spec, memory.put.view(), working.rows, {fresh.weights, fresh.state}, begin, end);
    });
    CHECK((memory.put == Home{memory.home_weights, memory.home_state, memory.touched}));
    if (undo) {
      run_cut(cut, cut_seed + 5, num_unique,
              [&](std::size_t begin, std::size_t end) { kernels.restore(spec, home, working, begin, end); });
    }
    return memory;
  }

  std::string name(const Kernels& kernels) const {
    return std::string(kernels.name) + " dim " + std::to_string(spec.dim) + " dtype " +
           std::to_string(static_cast<int>(spec.dtype)) + " optimizer " +
           std::to_string(static_cast<int>(spec.optimizer));
  }
};

constexpr RowDtype all_dtypes[] = {RowDtype::f32, RowDtype::f16, RowDtype::bf16};
constexpr RowOptimizer all_optimizers[] = {RowOptimizer::sgd, RowOptimizer::rowwise_adagrad, RowOptimizer::adagrad,
                                           RowOptimizer::adam, RowOptimizer::rowwise_adam};

void check_scenario(const Scenario& scenario, Random& random) {
  const bool undo = one_in(random, 3);
  const Memory expected = scenario.run(reference_kernels::kernels, Cut::whole, 0, undo);
  for (const Kernels* kernels : instruction_sets()) {
    for (const Cut cut : {Cut::whole, Cut::pieces, Cut::threads}) {
      check::context = scenario.name(*kernels);
      check_same(scenario.run(*kernels, cut, random(), undo), expected);
    }
  }
}

// one_of: only every so many-th scenario.
void every_set_gives_the_reference_bits(Random& random, std::uint32_t one_of) {
  for (std::uint32_t i = 0; i < 600; i += one_of) {
    const std::uint32_t dim = random_dim(random);
    check_scenario(Scenario(random, dim, all_dtypes[i % 3], all_optimizers[i % 5]), random);
  }
  for (std::uint32_t dim = 1; dim <= 130; dim += one_of) {
    check_scenario(Scenario(random, dim, all_dtypes[dim % 3], all_optimizers[below(random, 5)]), random);
  }
}

void thread_counts_do_not_change_bits(Random& random) {
  const int before = num_threads();
  const Scenario scenario(random, 32, RowDtype::bf16, RowOptimizer::rowwise_adagrad);
  const Memory expected = scenario.run(reference_kernels::kernels, Cut::whole, 0, false);
  for (const int threads : {1, 2, 3, 5}) {
    set_num_threads(threads);
    check_same(scenario.run(best_kernels(), Cut::threads, random(), false), expected);
  }
  set_num_threads(before);
}

// A step that is undone leaves every row's meaning as it was: same touched rows, same bytes in them.
void restore_undoes_update(Random& random) {
  for (int i = 0; i < 100; ++i) {
    Scenario scenario(random, random_dim(random), all_dtypes[i % 3], all_optimizers[i % 5]);
    Memory after = scenario.run(best_kernels(), Cut::whole, 0, true);
    CHECK(after.touched == scenario.before.touched);
    const std::size_t weight_bytes = scenario.spec.dim * bytes_of(scenario.spec.dtype);
    const std::size_t state_bytes = scenario.spec.state_floats * 4;
    for (std::uint64_t row = 0; row < scenario.num_rows; ++row) {
      if ((after.touched[row / 64] >> row % 64 & 1) == 0) continue;
      CHECK(std::memcmp(after.home_weights.data() + row * weight_bytes,
                        scenario.before.home_weights.data() + row * weight_bytes, weight_bytes) == 0);
      CHECK(std::memcmp(after.home_state.data() + row * state_bytes,
                        scenario.before.home_state.data() + row * state_bytes, state_bytes) == 0);
    }
  }
}

void sums_of_squares_agree(Random& random) {
  for (int i = 0; i < 200; ++i) {
    std::vector<float> values(below(random, 300));
    for (float& value : values) value = uniform(random, -10, 10);
    const double expected = reference_kernels::sum_of_squares(values.data(), values.size());
    for (const Kernels* kernels : instruction_sets()) {
      check::context = kernels->name;
      const double sum = kernels->sum_of_squares(values.data(), values.size());
      CHECK(std::memcmp(&sum, &expected, sizeof sum) == 0);
    }
  }
}

void whatever_is_not_finite_is_found(Random& random) {
  for (int i = 0; i < 200; ++i) {
    std::vector<float> values(1 + below(random, 300));
    for (float& value : values) value = uniform(random, -1e30f, 1e30f);
    const float special[] = {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                             std::numeric_limits<float>::quiet_NaN()};
    std::vector<float> spoilt = values;
    spoilt[below(random, spoilt.size())] = special[i % 3];
    for (const Kernels* kernels : instruction_sets()) {
      check::context = kernels->name;
      CHECK(kernels->all_finite(values.data(), values.size()));
      CHECK(!kernels->all_finite(spoilt.data(), spoilt.size()));
      CHECK(kernels->all_finite(values.data(), 0));
    }
  }
}

// The caller may have asked its CPU to flush subnormals (torch.set_flush_denormal): results are the same.
void caller_float_mode_does_not_matter(Random& random) {
#if defined(__x86_64__)
  for (const RowDtype dtype : all_dtypes) {
    Scenario scenario(random, 24, dtype, RowOptimizer::adagrad);
    for (float& value : scenario.grad) value *= 1e-38f;
    for (std::uint64_t i = 0; i < scenario.num_rows * 24; ++i) {
      if (dtype == RowDtype::f32) reinterpret_cast<float*>(scenario.before.home_weights.data())[i] *= 1e-38f;
    }
    const Memory expected = scenario.run(reference_kernels::kernels, Cut::whole, 0, false);
    for (const Kernels* kernels : instruction_sets()) {
      check::context = kernels->name;
      const unsigned before = _mm_getcsr();
      _mm_setcsr(0x1f80 | 0x8040 | 0x6000);  // flush results and operands to zero, round towards zero
      const Memory memory = scenario.run(*kernels, Cut::pieces, 1, false);
      CHECK((_mm_getcsr() & ~0x3fu) == (0x1f80 | 0x8040 | 0x6000));
      _mm_setcsr(before);
      check_same(memory, expected);
    }
  }
#else
  (void)random;
#endif
}

void unknown_sets_are_refused() {
  CHECK(kernels_named("sse9") == nullptr);
  CHECK(kernels_named("scalar") != nullptr);
  CHECK(kernels_named(best_kernels().name) == &best_kernels());
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  set_num_threads(2);
  unknown_sets_are_refused();
  sums_of_squares_agree(random);
  whatever_is_not_finite_is_found(random);
  every_set_gives_the_reference_bits(random, argc > 2 ? static_cast<std::uint32_t>(std::stoul(argv[2])) : 1);
  thread_counts_do_not_change_bits(random);
  restore_undoes_update(random);
  caller_float_mode_does_not_matter(random);
  return check::passed();
}

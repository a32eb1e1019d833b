// What the embedding verbs cost: plan → capture → pool → update over many distinct batches, next to the floor that
// memory sets: reading and copying each unique row once with the best plain prefetching loop, on the same threads.
//
// Usage: kernels_bench [--threads N] [--rounds N] [--set avx512|avx2|scalar] [--segments N] [--shape NAME]
//                      [--optimizer sgd|rowwise_adagrad] [--clock wall|cpu]
//
// On a machine that others use as well, --threads 1 --clock cpu counts only the time that this process ran.
//
// Homes are mapped files of tmpfs (MADV_RANDOM, every page and touched bit written before), working sets a ring of
// segments there, ids Zipf(1.05) scattered over the table by a hash. Each step takes the next batch and either
// captures or runs one of the floor's loops in capture's place, so that both find the caches as a real step does.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/counter_rng.h"
#include "base/parallel.h"
#include "kernels/kernels.h"
#include "step/plan.h"

namespace holdfast {
namespace {

struct BenchShape {
  const char* name;
  std::size_t num_tables;
  std::uint64_t num_rows;
  std::uint32_t dim;
  std::size_t lookups_per_bag;
  std::size_t batch_size;
  double target_ms;      // of all verbs together, row-wise Adagrad on two cores
  double target_ratio;   // floor / verb
};
constexpr BenchShape shapes[] = {
    {"kaggle", 26, 1'000'000, 16, 1, 2048, 1.4, 0.75},
    {"rm1", 8, 1'000'000, 32, 80, 1024, 12, 0.75},
    {"rm3", 10, 1'000'000, 32, 20, 1024, 4.4, 0.70},
};
constexpr std::size_t num_batches = 32;
constexpr std::size_t chunk_rows = 1024;  // of one index of parallel_for
constexpr std::size_t floor_distances[] = {16, 32, 48};

struct Options {
  int threads = 2;
  int rounds = 8;
  std::string set;
  std::size_t segments = 4;
  std::string shape;
  std::string optimizer;
  bool cpu_clock = false;
};

// Memory of a file on tmpfs, as a pool's is.
std::byte* map_shared(std::size_t bytes) {
  const int fd = memfd_create("kernels_bench", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    std::perror("kernels_bench: memory");
    std::exit(1);
  }
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (memory == MAP_FAILED) {
    std::perror("kernels_bench: mmap");
    std::exit(1);
  }
  madvise(memory, bytes, MADV_RANDOM);
  return static_cast<std::byte*>(memory);
}

std::size_t up_to_line(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

// Draws ranks with probability proportional to 1 / (rank + 1)^1.05.
class Zipf {
 public:
  explicit Zipf(std::uint64_t num_rows) : cumulative_(num_rows) {
    double sum = 0;
    for (std::uint64_t rank = 0; rank < num_rows; ++rank) {
      sum += std::pow(static_cast<double>(rank + 1), -1.05);
      cumulative_[rank] = sum;
    }
  }
  std::uint64_t operator()(std::mt19937_64& random) const {
    const double at = std::uniform_real_distribution<double>(0, cumulative_.back())(random);
    return static_cast<std::uint64_t>(std::lower_bound(cumulative_.begin(), cumulative_.end(), at) -
                                      cumulative_.begin());
  }

 private:
  std::vector<double> cumulative_;
};

struct Table {
  RowSpec spec;
  HomeRows home;
  WorkingRows working;
  TablePlan plan;
};

struct Chunk {
  std::size_t table;
  std::size_t begin;
  std::size_t end;
};

// The floor: copy each row, nothing else.
template <std::size_t WeightBytes>
void copy_rows(const Table& table, std::size_t begin, std::size_t end, std::size_t distance) {
  const std::size_t state_floats = table.spec.state_floats;
  for (std::size_t u = begin; u < end; ++u) {
    if (u + distance < end) {
      const std::uint64_t ahead = table.plan.rows[u + distance];
      for (std::size_t i = 0; i < WeightBytes; i += 64) {
        __builtin_prefetch(table.home.weights + ahead * WeightBytes + i);
      }
      if (state_floats != 0) __builtin_prefetch(table.home.state + ahead);
    }
    const std::uint64_t row = table.plan.rows[u];
    std::memcpy(table.working.weights + u * WeightBytes, table.home.weights + row * WeightBytes, WeightBytes);
    if (state_floats != 0) table.working.state[u] = table.home.state[row];
  }
}

double now_ms(bool cpu_clock = false) {
  timespec now;
  clock_gettime(cpu_clock ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) * 1e-6;
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void run_shape(const BenchShape& shape, RowOptimizer optimizer, const Kernels& kernels, const Options& options) {
  const std::uint32_t state_floats = state_floats_of(optimizer, shape.dim);
  const std::size_t lookups = shape.batch_size * shape.lookups_per_bag;
  const std::uint32_t output_width = static_cast<std::uint32_t>(shape.num_tables) * shape.dim;
  std::mt19937_64 random(1);
  const Zipf zipf(shape.num_rows);

  const std::size_t weights_bytes = shape.num_rows * shape.dim * 4;
  const std::size_t state_bytes = up_to_line(shape.num_rows * state_floats * 4);
  const std::size_t touched_bytes = up_to_line(shape.num_rows / 8 + 8);
  const std::size_t table_bytes = weights_bytes + state_bytes + touched_bytes;
  const std::size_t homes_bytes = shape.num_tables * table_bytes;
  std::byte* const homes = map_shared(homes_bytes);
  const std::size_t segment_table_bytes = up_to_line(lookups * shape.dim * 4) + up_to_line(lookups * state_floats * 4);
  const std::size_t ring_bytes = options.segments * shape.num_tables * segment_table_bytes;
  std::byte* const ring = map_shared(ring_bytes);
  std::memset(ring, 0, ring_bytes);

  std::vector<Table> tables(shape.num_tables);
  for (std::size_t t = 0; t < tables.size(); ++t) {
    Table& table = tables[t];
    std::byte* const base = homes + t * table_bytes;
    table.spec = {.dim = shape.dim,
                  .dtype = RowDtype::f32,
                  .optimizer = optimizer,
                  .state_floats = state_floats,
                  .seed = 1,
                  .table = t,
                  .init_low = -0.01f,
                  .init_high = 0.01f};
    table.home = {base, reinterpret_cast<float*>(base + weights_bytes),
                  reinterpret_cast<std::uint64_t*>(base + weights_bytes + state_bytes)};
    std::memset(base, 0, weights_bytes + state_bytes);
    std::memset(table.home.touched, 0xff, touched_bytes);
  }
  std::vector<std::vector<std::int64_t>> ids(num_batches * tables.size());
  for (auto& table_ids : ids) {
    table_ids.resize(lookups);
    for (std::int64_t& id : table_ids) {
      id = static_cast<std::int64_t>(counter_rng::mix64(zipf(random) + 1) % shape.num_rows);
    }
  }
  std::vector<std::int64_t> offsets(shape.batch_size + 1);
  for (std::size_t bag = 0; bag <= shape.batch_size; ++bag) {
    offsets[bag] = static_cast<std::int64_t>(bag * shape.lookups_per_bag);
  }
  std::vector<float> out(shape.batch_size * output_width), grad(out.size()), backward(out.size());
  for (float& value : backward) value = std::uniform_real_distribution<float>(-1, 1)(random);

  UpdateSpec update{};
  update.learning_rate = 0.01f;
  update.epsilon = 1e-8f;
  update.gradient_scale = 1;
  std::map<std::string, std::vector<double>> times;
  std::size_t num_unique = 0;
  std::vector<Chunk> row_chunks, bag_chunks;
  for (std::size_t t = 0; t < tables.size(); ++t) {
    const std::size_t chunk_bags = std::max<std::size_t>(16, 2 * chunk_rows / shape.lookups_per_bag);
    for (std::size_t bag = 0; bag < shape.batch_size; bag += chunk_bags) {
      bag_chunks.push_back({t, bag, std::min(bag + chunk_bags, shape.batch_size)});
    }
  }
  const auto over = [&](const std::vector<Chunk>& chunks, const auto& body) {
    parallel_for(chunks.size(), [&](std::size_t i) { body(tables[chunks[i].table], chunks[i]); });
  };
  const auto timed = [&](const std::string& verb, const auto& body) {
    const double begin = now_ms(options.cpu_clock);
    body();
    times[verb].push_back(now_ms(options.cpu_clock) - begin);
  };

  const std::size_t num_modes = 1 + std::size(floor_distances);
  const std::size_t num_steps = static_cast<std::size_t>(options.rounds) * num_batches;
  for (std::size_t step = 0; step < num_steps + num_batches; ++step) {
    if (step == num_batches) times.clear();  // all before was warming up
    const std::size_t batch = step % num_batches;
    const std::size_t mode = (batch + step / num_batches) % num_modes;
    std::byte* segment = ring + step % options.segments * shape.num_tables * segment_table_bytes;
    for (Table& table : tables) {
      table.working.weights = segment;
      table.working.state = reinterpret_cast<float*>(segment + up_to_line(lookups * shape.dim * 4));
      segment += segment_table_bytes;
    }
    timed("plan", [&] {
      parallel_for(tables.size(), [&](std::size_t t) {
        const FeatureInput feature{{ids[batch * tables.size() + t].data(), offsets.data(), true, shape.batch_size},
                                   nullptr,
                                   static_cast<std::uint32_t>(t) * shape.dim,
                                   output_width};
        plan_table({&feature, 1}, shape.num_rows, Pooling::sum, tables[t].plan);
      });
    });
    row_chunks.clear();
    num_unique = 0;
    for (std::size_t t = 0; t < tables.size(); ++t) {
      const std::size_t rows = tables[t].plan.num_unique();
      num_unique += rows;
      tables[t].working.rows = tables[t].plan.rows.data();
      for (std::size_t u = 0; u < rows; u += chunk_rows) row_chunks.push_back({t, u, std::min(u + chunk_rows, rows)});
    }
    if (mode == 0) {
      timed("capture", [&] {
        over(row_chunks, [&](Table& table, const Chunk& chunk) {
          kernels.capture(table.spec, table.home, table.working, chunk.begin, chunk.end);
        });
      });
    } else {
      const std::size_t distance = floor_distances[mode - 1];
      timed("floor " + std::to_string(distance), [&] {
        over(row_chunks, [&](Table& table, const Chunk& chunk) {
          shape.dim == 16 ? copy_rows<64>(table, chunk.begin, chunk.end, distance)
                          : copy_rows<128>(table, chunk.begin, chunk.end, distance);
        });
      });
    }
    timed("pool", [&] {
      over(bag_chunks, [&](Table& table, const Chunk& chunk) {
        const PoolSpec pool{.weights = table.working.weights,
                            .dim = shape.dim,
                            .dtype = RowDtype::f32,
                            .position = table.plan.position.data(),
                            .bag_start = table.plan.bag_start.data(),
                            .scale = nullptr,
                            .mean = false,
                            .out = out.data() + chunk.table * shape.dim,
                            .out_stride = output_width};
        kernels.pool_bags(pool, chunk.begin, chunk.end);
      });
    });
    const std::size_t sample_bytes = output_width * 4;
    parallel_for(shape.batch_size / 64, [&](std::size_t i) {  // backward, not timed, leaves gradients in the caches
      std::memcpy(grad.data() + i * 64 * output_width, backward.data() + i * 64 * output_width, 64 * sample_bytes);
    });
    update.step = step + 1;
    timed("update", [&] {
      over(row_chunks, [&](Table& table, const Chunk& chunk) {
        const Occurrences occurrences{table.plan.row_start.data(), table.plan.gradient_offset.data(), nullptr};
        kernels.update(table.spec, update, table.home, table.working, occurrences, grad.data(), nullptr, nullptr,
                       chunk.begin, chunk.end);
      });
    });
  }
  double floor = 1e9;
  for (const std::size_t distance : floor_distances) {
    floor = std::min(floor, median(times["floor " + std::to_string(distance)]));
  }
  const double plan = median(times["plan"]), capture = median(times["capture"]), pool = median(times["pool"]),
               updated = median(times["update"]);
  std::printf(
      "%-7s %-16s unique %6zu  floor %6.3f  plan %6.3f  capture %6.3f  pool %6.3f  update %6.3f  all %6.3f ms"
      "  floor/capture %3.0f%%  floor/update %3.0f%%",
      shape.name, optimizer == RowOptimizer::sgd ? "sgd" : "rowwise_adagrad", num_unique, floor, plan, capture, pool,
      updated, plan + capture + pool + updated, 100 * floor / capture, 100 * floor / updated);
  std::printf("  (targets: all %.1f ms, ratios %.0f%%)\n", shape.target_ms, 100 * shape.target_ratio);
  std::fflush(stdout);
  munmap(homes, homes_bytes);
  munmap(ring, ring_bytes);
}

// An empty parallel_for, back to back, and after a pause in which workers have gone to sleep.
void time_parallel_for(int threads) {
  std::vector<double> busy, rested;
  for (int i = 0; i < 2000; ++i) {
    const double begin = now_ms();
    parallel_for(static_cast<std::size_t>(threads), [](std::size_t) {});
    busy.push_back(now_ms() - begin);
  }
  for (int i = 0; i < 500; ++i) {
    usleep(200);
    const double begin = now_ms();
    parallel_for(static_cast<std::size_t>(threads), [](std::size_t) {});
    rested.push_back(now_ms() - begin);
  }
  std::printf("parallel_for, %d threads: %.1f µs back to back, %.1f µs after a pause\n", threads, 1e3 * median(busy),
              1e3 * median(rested));
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Options options;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i];
    if (name == "--threads") options.threads = std::atoi(argv[i + 1]);
    if (name == "--rounds") options.rounds = std::atoi(argv[i + 1]);
    if (name == "--set") options.set = argv[i + 1];
    if (name == "--segments") options.segments = static_cast<std::size_t>(std::atoi(argv[i + 1]));
    if (name == "--shape") options.shape = argv[i + 1];
    if (name == "--optimizer") options.optimizer = argv[i + 1];
    if (name == "--clock") options.cpu_clock = std::string(argv[i + 1]) == "cpu";
  }
  const Kernels* const kernels = options.set.empty() ? &best_kernels() : kernels_named(options.set.c_str());
  if (kernels == nullptr) {
    std::fprintf(stderr, "kernels_bench: this CPU does not run %s\n", options.set.c_str());
    return 1;
  }
  set_num_threads(options.threads);
  std::printf("kernels %s, %d threads, %d rounds of %zu batches, medians of %s time\n", kernels->name, options.threads,
              options.rounds, num_batches, options.cpu_clock ? "CPU" : "wall");
  time_parallel_for(options.threads);
  for (const BenchShape& shape : shapes) {
    if (!options.shape.empty() && options.shape != shape.name) continue;
    for (const RowOptimizer optimizer : {RowOptimizer::rowwise_adagrad, RowOptimizer::sgd}) {
      if (!options.optimizer.empty() && (options.optimizer == "sgd") != (optimizer == RowOptimizer::sgd)) continue;
      run_shape(shape, optimizer, *kernels, options);
    }
  }
  return 0;
}

// What the log store's verbs cost on a disk. Usage: log_store_bench DIRECTORY [rows of the table] [steps]
//
// One table, dim 32 with row-wise Adagrad (136 bytes a row, three in a sector); steps of 100k random rows, and
// fetches of 20k. CPU is that of all threads of the process, the kernel's part included.
#include <sys/resource.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "error.h"
#include "log_store.h"

namespace holdfast {
namespace {

constexpr std::uint32_t dim = 32;
constexpr std::size_t step_rows = 100000;
constexpr std::size_t fetch_rows = 20000;
constexpr std::size_t num_fetches = 20;
constexpr std::uint64_t every_step = std::numeric_limits<std::uint64_t>::max();

struct Rows {
  Rows(std::uint64_t num_rows, std::size_t count, std::mt19937_64& random) {
    std::set<std::uint64_t> chosen;
    while (chosen.size() < count) chosen.insert(random() % num_rows);
    rows.assign(chosen.begin(), chosen.end());
    weights.resize(count * dim * 4);
    state.resize(count);
  }
  TableRows view() { return {0, rows.size(), {rows.data(), weights.data(), state.data()}}; }

  std::vector<std::uint64_t> rows;
  std::vector<std::byte> weights;
  std::vector<float> state;
};

double seconds(const timeval& time) {
  return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
}

double cpu_seconds() {
  rusage usage{};
  ::getrusage(RUSAGE_SELF, &usage);
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

class Stopwatch {
 public:
  void start() {
    began_ = std::chrono::steady_clock::now();
    cpu_began_ = cpu_seconds();
  }
  void stop() {
    wall_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began_).count();
    cpu_ += cpu_seconds() - cpu_began_;
  }
  void print(const char* what, double rows, double bytes) const {
    std::printf("%-28s %9.0f rows/s   %6.2f us CPU a row   %7.1f MB/s\n", what, rows / wall_, cpu_ / rows * 1e6,
                bytes / wall_ / 1e6);
  }

 private:
  std::chrono::steady_clock::time_point began_;
  double cpu_began_ = 0;
  double wall_ = 0;
  double cpu_ = 0;
};

void time_fetches(LogStore& store, const char* what, std::uint64_t num_rows, std::mt19937_64& random) {
  Stopwatch watch;
  const std::uint64_t bytes = store.counters().fetched_bytes;
  for (std::size_t i = 0; i < num_fetches; ++i) {
    Rows wanted(num_rows, fetch_rows, random);
    const TableRows view = wanted.view();
    watch.start();
    store.fetch({&view, 1});
    watch.stop();
  }
  watch.print(what, num_fetches * fetch_rows, static_cast<double>(store.counters().fetched_bytes - bytes));
}

void bench(const std::string& directory, std::uint64_t num_rows, std::uint64_t steps) {
  const std::vector<RowTable> tables = {
      {{dim, RowDtype::f32, RowOptimizer::rowwise_adagrad, 1, 1, 0, -0.1f, 0.1f}, num_rows}};
  LogStore::create(directory, tables, format::align_up(steps * step_rows * 192, format::block_bytes));
  LogStore store(directory, tables);
  store.recover(1, every_step);
  std::mt19937_64 random(1);

  Stopwatch appending;
  for (std::uint64_t step = 1; step <= steps; ++step) {
    Rows update(num_rows, step_rows, random);
    const TableRows view = update.view();
    appending.start();
    if (!store.append(store.pack({step, step, step}, {&view, 1})))
      throw Error(ErrorKind::full, "the ring is too small");
    store.sync();
    appending.stop();
  }
  LogStoreCounters counters = store.counters();
  appending.print("append + sync", static_cast<double>(counters.appended_rows),
                  static_cast<double>(counters.appended_bytes));
  std::printf("%-28s %9zu entries   %5.1f bytes each\n", "index", store.index_entries(),
              static_cast<double>(store.index_bytes()) / static_cast<double>(store.index_entries()));
  time_fetches(store, "fetch, log and untouched", num_rows, random);

  Stopwatch merging;
  merging.start();
  while (store.merge(every_step, std::uint64_t{256} << 20) != 0) {
  }
  merging.stop();
  counters = store.counters();
  merging.print("merge (rows appended)", static_cast<double>(counters.appended_rows),
                static_cast<double>(counters.home_bytes_written));
  std::printf("%-28s %9.2f\n", "write amplification",
              static_cast<double>(counters.appended_bytes + counters.home_bytes_written) /
                  static_cast<double>(counters.appended_rows * (dim * 4 + 8)));
  time_fetches(store, "fetch, from home", num_rows, random);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s DIRECTORY [rows] [steps]\n", argv[0]);
    return 2;
  }
  const std::string directory = std::string(argv[1]) + "/log-store-bench";
  const std::uint64_t rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 8000000;
  const std::uint64_t steps = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 40;
  try {
    std::filesystem::create_directory(directory);
    holdfast::bench(directory, rows, steps);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::filesystem::remove_all(directory);
  return 0;
}

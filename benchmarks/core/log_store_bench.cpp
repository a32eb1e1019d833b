// What the log store's verbs cost on a disk. Usage: log_store_bench DIRECTORY [rows of the table] [steps]
//
// One table, dim 32 with row-wise Adagrad (136 bytes a row, three in a sector); steps of 100k random rows, and
// fetches of 20k. CPU is that of all threads of the process, the kernel's part included.
//
// Then what a merge costs. Rows are written home by blocks of 4096 bytes, so the merge of N distinct rows, uniformly
// drawn from a table that takes B blocks, writes B (1 - (1 - 1/B)^N) of them: one block for every row while N is far
// below B, and nearly none for a further row when it is far above. That is why a larger log writes home less. (Rows
// are drawn without replacement, which meets a few more blocks when N is a good part of the table.) Rows that are drawn
// with a preference cost less still: those that stay in the log are not written.
//
// Then what fetches of 2000 rows suffer from a merge beside them.
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "log_store/log_store.h"

namespace holdfast {
namespace {

constexpr std::uint32_t dim = 32;
constexpr std::size_t step_rows = 100000;
constexpr std::size_t fetch_rows = 20000;
constexpr std::size_t num_fetches = 20;
constexpr std::uint64_t every_step = std::numeric_limits<std::uint64_t>::max();

enum class Ids { uniform, skewed };

std::vector<RowTable> one_table(std::uint64_t num_rows) {
  return {{{dim, RowDtype::f32, RowOptimizer::rowwise_adagrad, 1, 1, 0, -0.1f, 0.1f}, num_rows}};
}

// Skewed: the density falls with the reciprocal of the rank, as that of words does.
std::uint64_t draw(Ids ids, std::uint64_t num_rows, std::mt19937_64& random) {
  if (ids == Ids::uniform) return random() % num_rows;
  const double u = std::uniform_real_distribution<double>()(random);
  const auto rank = static_cast<std::uint64_t>(std::pow(static_cast<double>(num_rows), u)) - 1;
  return rank * 2654435761 % num_rows;  // hot rows are not neighbours
}

struct Rows {
  Rows(std::uint64_t num_rows, std::size_t count, std::mt19937_64& random, Ids ids = Ids::uniform) {
    std::set<std::uint64_t> chosen;
    for (std::size_t drawn = 0; ids == Ids::uniform ? chosen.size() < count : drawn < count; ++drawn) {
      chosen.insert(draw(ids, num_rows, random));
    }
    count = chosen.size();
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
  const std::vector<RowTable> tables = one_table(num_rows);
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
  while (store.merge([] { return every_step; }) != 0) {
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

// A store in a directory of its own.
struct Scratch {
  Scratch(std::string where, std::uint64_t num_rows, std::uint64_t log_bytes) : directory(std::move(where)) {
    std::filesystem::create_directory(directory);
    LogStore::create(directory, one_table(num_rows), log_bytes);
    store = std::make_unique<LogStore>(directory, one_table(num_rows));
    store->recover(1, every_step);
  }
  ~Scratch() {
    store.reset();
    std::filesystem::remove_all(directory);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool append(std::uint64_t step, Rows rows) {
    const TableRows view = rows.view();
    const bool had_room = store->append(store->pack({step, step, step}, {&view, 1})).has_value();
    store->sync();
    return had_room;
  }

  std::string directory;
  std::unique_ptr<LogStore> store;
};

void check_blocks(const std::string& directory, std::uint64_t num_rows, std::uint64_t log_bytes) {
  Scratch scratch(directory, num_rows, log_bytes);
  std::mt19937_64 random(2);
  for (std::uint64_t step = 1; scratch.append(step, {num_rows, step_rows / 4, random}); ++step) {
  }
  scratch.store->merge([] { return every_step; });
  const LogStoreCounters counters = scratch.store->counters();
  const auto blocks =
      static_cast<double>(format::align_up(layout_of(one_table(num_rows)[0]).bytes_for(num_rows), format::block_bytes) /
                          format::block_bytes);
  const auto rows = static_cast<double>(counters.merged_rows);
  const double predicted = blocks * (1 - std::pow(1 - 1 / blocks, rows));
  const double measured = static_cast<double>(counters.home_bytes_written) / format::block_bytes;
  std::printf(
      "log of %4llu MiB, uniform ids: %8.0f rows of a home of %.0f blocks: %8.0f written, %8.0f predicted (%+.1f%%)\n",
      static_cast<unsigned long long>(log_bytes >> 20), rows, blocks, measured, predicted,
      100 * (measured / predicted - 1));
}

// As the merger does it: a quarter of the log when half of it is in use; the last steps may not be merged yet.
void bench_skewed(const std::string& directory, std::uint64_t num_rows, std::uint64_t log_bytes, std::uint64_t lag) {
  Scratch scratch(directory, num_rows, log_bytes);
  LogStore& store = *scratch.store;
  std::mt19937_64 random(3);
  for (std::uint64_t step = 1; store.counters().merged_bytes < 2 * log_bytes; ++step) {
    scratch.append(step, {num_rows, step_rows, random, Ids::skewed});
    if (store.used_bytes() > log_bytes / 2) store.merge([&] { return std::max(step, lag) - lag; });
  }
  const LogStoreCounters counters = store.counters();
  std::printf(
      "log of %4llu MiB, skewed ids, limit %2llu steps behind: of %llu rows appended %llu written home, "
      "write amplification %.2f\n",
      static_cast<unsigned long long>(log_bytes >> 20), static_cast<unsigned long long>(lag),
      static_cast<unsigned long long>(counters.appended_rows), static_cast<unsigned long long>(counters.merged_rows),
      static_cast<double>(counters.appended_bytes + counters.home_bytes_written) /
          static_cast<double>(counters.appended_row_bytes));
}

std::vector<double> fetch_times(LogStore& store, std::uint64_t num_rows, std::mt19937_64& random,
                                const std::function<bool(std::size_t)>& goes_on) {
  std::vector<double> times;
  while (goes_on(times.size())) {
    Rows wanted(num_rows, 2000, random);
    const TableRows view = wanted.view();
    const auto began = std::chrono::steady_clock::now();
    store.fetch({&view, 1});
    times.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
  }
  std::sort(times.begin(), times.end());
  return times;
}

void bench_fetches_beside_a_merge(const std::string& directory, std::uint64_t num_rows, std::uint64_t log_bytes) {
  Scratch scratch(directory, num_rows, log_bytes);
  LogStore& store = *scratch.store;
  const std::uint64_t part = 1000000;
  for (std::uint64_t first = 0; first < num_rows; first += part) {  // reading holes would be too easy
    std::vector<std::uint64_t> rows(std::min(part, num_rows - first));
    std::iota(rows.begin(), rows.end(), first);
    const std::vector<std::byte> weights(rows.size() * dim * 4);
    store.import_rows(0, ImportedRows::apart(one_table(num_rows)[0], rows, weights, {}));
  }
  store.sync_home();
  std::mt19937_64 random(4);
  std::uint64_t step = 0;
  const auto print = [](const char* what, const std::vector<double>& times) {
    std::printf("fetch of 2000 rows, %-24s %6.2f ms median   %6.2f ms p99   (%zu)\n", what, times[times.size() / 2],
                times[times.size() * 99 / 100], times.size());
  };
  print("alone", fetch_times(store, num_rows, random, [](std::size_t done) { return done < 400; }));
  for (const bool is_urgent : {true, false}) {
    while (scratch.append(++step, {num_rows, step_rows, random})) {
    }
    const LogStoreCounters before = store.counters();
    std::atomic<bool> merged{false};
    Stopwatch merging;
    merging.start();
    std::thread merger([&] {
      store.merge([] { return every_step; },
                  [&](std::chrono::nanoseconds wanted, double) {
                    if (!is_urgent) std::this_thread::sleep_for(wanted);
                    return is_urgent;
                  });
      merging.stop();
      merged = true;
    });
    const auto beside = fetch_times(store, num_rows, random, [&](std::size_t) { return !merged; });
    merger.join();
    print(is_urgent ? "beside an urgent merge" : "beside a merge", beside);
    merging.print("that merge", static_cast<double>(store.counters().merged_rows - before.merged_rows),
                  static_cast<double>(store.counters().home_bytes_written - before.home_bytes_written));
  }
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
    for (const std::uint64_t log_bytes : {std::uint64_t{64} << 20, std::uint64_t{256} << 20}) {
      holdfast::check_blocks(directory + "/blocks", rows, log_bytes);
    }
    for (const std::uint64_t lag : {0, 5}) {
      holdfast::bench_skewed(directory + "/skewed", rows, std::uint64_t{256} << 20, lag);
    }
    holdfast::bench_fetches_beside_a_merge(directory + "/beside", rows, std::uint64_t{256} << 20);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  std::filesystem::remove_all(directory);
  return 0;
}

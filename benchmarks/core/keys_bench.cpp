// The directory of keys: how fast it places and finds keys, and what it takes.
//
//   keys_bench KEYS        inserts so many, then looks for them: all over the table, and by Zipf's law
//   keys_bench plan        plans the batches of rm1 (80 lookups a bag, Zipf's law, a million keys a table), by row
//                          numbers and by keys, of which none and a tenth are new
//   keys_bench leave       places batches of which a tenth is new, while as many keys are left behind as come, beside
//                          batches without new ones: how evenly that goes
//
// Whether it holds against a model, however long: test_key_directory SEED CALLS.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <vector>

#include "base/counter_rng.h"
#include "keys/key_directory.h"
#include "keys/living_keys.h"
#include "step/collection.h"

namespace {

using namespace holdfast;

// The process's time on a processor: what it waits for others is not its.
struct Clock {
  using duration = std::chrono::nanoseconds;
  using time_point = std::chrono::time_point<Clock, duration>;
  static time_point now() {
    timespec spent;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return time_point(std::chrono::seconds(spent.tv_sec) + std::chrono::nanoseconds(spent.tv_nsec));
  }
};

constexpr std::size_t batch = 1 << 16;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::int64_t scattered(std::uint64_t i) { return static_cast<std::int64_t>(counter_rng::mix64(i + 1)); }

void measure(std::uint64_t num_keys) {
  KeyDirectory directory("t", KeyShards::whole(num_keys), 12345);
  std::vector<std::int64_t> keys(batch), rows(batch);
  double slowest = 0;
  const auto began = Clock::now();
  for (std::uint64_t first = 0; first < num_keys; first += batch) {
    const std::size_t count = std::min<std::uint64_t>(batch, num_keys - first);
    for (std::size_t i = 0; i < count; ++i) keys[i] = scattered(first + i);
    const auto batch_began = Clock::now();
    directory.place({keys.data(), count}, rows.data());
    slowest = std::max(slowest, seconds_since(batch_began));
  }
  std::printf("insert %.1f M/s, slowest batch of %zu %.1f ms, %.1f bytes a key\n",
              static_cast<double>(num_keys) / seconds_since(began) / 1e6, batch, slowest * 1e3,
              static_cast<double>(directory.memory_bytes()) / static_cast<double>(num_keys));
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform;
  for (const bool zipf : {false, true}) {
    double seconds = 0;
    std::uint64_t looked_up = 0;
    std::uint64_t wrong = 0;
    while (looked_up < std::uint64_t{1} << 23) {
      std::vector<std::uint64_t> expected(batch);
      for (std::size_t i = 0; i < batch; ++i) {
        expected[i] = zipf ? static_cast<std::uint64_t>(std::pow(static_cast<double>(num_keys), uniform(random))) - 1
                           : random() % num_keys;
        keys[i] = scattered(expected[i]);
      }
      const auto batch_began = Clock::now();
      directory.place(keys, rows.data());
      seconds += seconds_since(batch_began);
      for (std::size_t i = 0; i < batch; ++i) wrong += static_cast<std::uint64_t>(rows[i]) != expected[i];
      looked_up += batch;
    }
    std::printf("%s: %.1f M keys/s, %llu wrong\n", zipf ? "zipf" : "uniform",
                static_cast<double>(looked_up) / seconds / 1e6, static_cast<unsigned long long>(wrong));
  }
}

// One core's milliseconds for a batch of eight tables: the median over batches.
void measure_plans() {
  constexpr std::size_t num_tables = 8, num_bags = 1024, bag = 80, num_rows = 1'000'000, num_batches = 40;
  constexpr std::size_t num_lookups = num_bags * bag;
  std::vector<double> cumulative(num_rows);
  double sum = 0;
  for (std::size_t i = 0; i < num_rows; ++i) {
    cumulative[i] = sum += std::pow(static_cast<double>(i + 1), -1.05);
  }
  std::mt19937_64 random(1);
  std::uniform_real_distribution<double> uniform(0, sum);
  std::vector<std::int64_t> offsets(num_bags + 1);
  for (std::size_t b = 0; b <= num_bags; ++b) offsets[b] = static_cast<std::int64_t>(b * bag);
  std::vector<std::vector<std::int64_t>> ids(num_batches * num_tables, std::vector<std::int64_t>(num_lookups));
  for (auto& of_table : ids) {
    for (std::int64_t& id : of_table) {
      const auto rank =
          std::lower_bound(cumulative.begin(), cumulative.end() - 1, uniform(random)) - cumulative.begin();
      id = static_cast<std::int64_t>(static_cast<std::uint64_t>(rank) * 2'654'435'761 % num_rows);
    }
  }
  enum class By { numbers, keys, keys_and_new_ones };
  for (const By by : {By::numbers, By::keys, By::keys_and_new_ones}) {
    auto spec = std::make_shared<CollectionSpec>();
    std::vector<std::int64_t> rows(num_rows);
    for (std::uint32_t t = 0; t < num_tables; ++t) {
      std::shared_ptr<KeyDirectory> keys;
      if (by != By::numbers) {
        keys = std::make_shared<KeyDirectory>("t", KeyShards::whole(2 * num_rows), 12345 + t);
        std::vector<std::int64_t> all(num_rows);
        for (std::size_t i = 0; i < num_rows; ++i) all[i] = scattered(i);
        keys->place(all, rows.data());
      }
      spec->tables.push_back({t, num_rows, 32, Pooling::sum, false, keys});
      spec->features.push_back({t, 32 * t, "f"});
    }
    spec->output_width = 32 * num_tables;
    Plan plan;
    plan.spec = spec;
    std::vector<double> took;
    std::uint64_t next_key = num_rows;
    for (std::size_t number = 0; number < num_batches; ++number) {
      std::vector<std::int64_t> batch_ids, batch_offsets{0};
      for (std::size_t t = 0; t < num_tables; ++t) {
        auto of_table = ids[number * num_tables + t];
        if (by != By::numbers) {
          for (std::int64_t& id : of_table) id = scattered(static_cast<std::uint64_t>(id));
        }
        if (by == By::keys_and_new_ones) {
          for (std::size_t i = 0; i < num_lookups; i += 34) of_table[i] = scattered(next_key++);  // a tenth of 24,000
        }
        batch_ids.insert(batch_ids.end(), of_table.begin(), of_table.end());
        for (std::size_t b = 1; b <= num_bags; ++b) {
          batch_offsets.push_back(static_cast<std::int64_t>(t * num_lookups) + offsets[b]);
        }
      }
      const BatchIds batch_of{batch_ids.data(), batch_offsets.data(),    true, nullptr,
                              num_bags,         {0, 1, 2, 3, 4, 5, 6, 7}};
      const auto began = Clock::now();
      plan_batch(batch_of, false, plan);
      took.push_back(seconds_since(began) * 1e3);
    }
    std::sort(took.begin(), took.end());
    std::printf("%s: %.2f ms a batch, %.2f at best\n",
                by == By::numbers ? "numbers"
                : by == By::keys  ? "keys"
                                  : "keys, a tenth new",
                took[took.size() / 2], took[0]);
  }
}

// Keys that are not new are of the last ten batches.
void measure_leaving(bool brings_new) {
  constexpr std::size_t num_keys = 26'000, ttl = 20, num_steps = 1200, warmup = 200;
  const KeyPolicy policy{.ttl_steps = ttl};
  KeyDirectory directory("t", KeyShards::whole(10'000'000), 12345, policy);
  TableAges ages(policy);
  std::vector<std::int64_t> keys(num_keys), rows(num_keys);
  std::vector<double> took;
  std::mt19937_64 random(1);
  std::uint64_t next_key = num_keys;
  for (std::uint64_t step = 1; step <= num_steps; ++step) {
    for (std::size_t i = 0; i < num_keys; ++i) {
      keys[i] =
          scattered(i % 10 == 0 && (brings_new || step <= warmup) ? next_key++ : next_key - 1 - random() % num_keys);
    }
    const auto began = Clock::now();
    directory.place(keys, rows.data());
    if (step > warmup) took.push_back(seconds_since(began) * 1e3);
    directory.pass(step, ages.leave_behind(step));
  }
  std::sort(took.begin(), took.end());
  std::printf("%s: %.3f ms a batch, 99th percentile %.2f of it; %zu keys, %llu rows\n",
              brings_new ? "as many leave as come" : "none come", took[took.size() / 2],
              took[took.size() * 99 / 100] / took[took.size() / 2], directory.num_keys(),
              static_cast<unsigned long long>(directory.num_rows_used()));
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc > 1 && std::string_view(argv[1]) == "plan") {
    measure_plans();
    return 0;
  }
  if (argc > 1 && std::string_view(argv[1]) == "leave") {
    for (const bool brings_new : {false, true}) measure_leaving(brings_new);
    return 0;
  }
  measure(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'000);
  return 0;
}

// The directory of keys: how fast it places and finds keys, and what it takes.
//
//   keys_bench KEYS        inserts so many, then looks for them: all over the table, and by Zipf's law
//
// Whether it holds against a model, however long: test_key_directory SEED CALLS.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "base/counter_rng.h"
#include "keys/key_directory.h"

namespace {

using namespace holdfast;
using Clock = std::chrono::steady_clock;

constexpr std::size_t batch = 1 << 16;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::int64_t scattered(std::uint64_t i) { return static_cast<std::int64_t>(counter_rng::mix64(i + 1)); }

void measure(std::uint64_t num_keys) {
  KeyDirectory directory("t", num_keys, 12345);
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

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  measure(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'000);
  return 0;
}

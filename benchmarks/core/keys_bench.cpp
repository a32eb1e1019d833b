// The directory of keys: how fast it places and finds keys, what it takes, and whether it holds against a model.
//
//   keys_bench KEYS        inserts KEYS keys, then looks for them: all over the table, and by Zipf's law
//   keys_bench KEYS CALLS  CALLS inserts and lookups of scattered and of chosen keys, with keys left behind, of which no
//                          two may ever have one row and none may be lost
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "base/counter_rng.h"
#include "keys/key_ages.h"
#include "keys/key_directory.h"

namespace {

using namespace holdfast;
using Clock = std::chrono::steady_clock;

constexpr std::size_t batch = 1 << 16;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

std::int64_t scattered(std::uint64_t i) { return static_cast<std::int64_t>(counter_rng::mix64(i + 1)); }

// Hundreds of them share all but a few bits, or differ by powers of two.
std::int64_t chosen(std::uint64_t i) { return static_cast<std::int64_t>((i & 0xffff) << 48 | i >> 16 << 12); }

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
    std::printf("%s: %.1f M keys/s, %llu wrong\n", zipf ? "zipf" : "uniform", static_cast<double>(looked_up) / seconds / 1e6,
                static_cast<unsigned long long>(wrong));
  }
}

// A step is a batch. The model says of each row whose it is and when that was used last, of each key what row it had last.
int check_against_model(std::uint64_t num_keys, std::uint64_t num_calls) {
  constexpr std::size_t of_step = 4096;
  const std::uint64_t num_rows = num_keys;
  const std::uint64_t universe = 2 * num_keys;  // of keys, half of them chosen
  const KeyPolicy policy{.ttl_steps = num_keys / of_step / 4, .max_keys = num_keys / 2};
  KeyDirectory directory("t", num_rows, 99, true);
  KeyAges ages(policy);
  std::vector<std::uint32_t> row_of(universe, ~0u), step_of(universe), key_of(num_rows, ~0u);
  std::vector<std::uint32_t> ids(of_step);
  std::vector<std::int64_t> keys(of_step), rows(of_step);
  std::mt19937_64 random(7);
  std::uint64_t lost = 0, shared = 0, returned = 0, evicted_seen = 0, calls = 0;
  std::uint64_t oldest = 0;
  double slowest = 0, total = 0;
  std::uint32_t step = 0;
  while (calls < num_calls) {
    ++step;
    // Keys come and go: a window that moves over them, and some that come all over it.
    const std::uint64_t window = step * std::uint64_t{of_step / 8} % universe;
    for (std::size_t i = 0; i < of_step; ++i) {
      const std::uint64_t at = random() % 16 == 0 ? random() % universe : window + random() % (num_keys / 8);
      ids[i] = static_cast<std::uint32_t>(at % universe);
      keys[i] = ids[i] % 2 == 0 ? scattered(ids[i]) : ~chosen(ids[i]);
    }
    const auto began = Clock::now();
    directory.place(keys, rows.data());
    const double seconds = seconds_since(began);
    slowest = std::max(slowest, seconds);
    total += seconds;
    for (std::size_t i = 0; i < of_step; ++i) {
      const std::uint32_t id = ids[i];
      const auto row = static_cast<std::uint32_t>(rows[i]);
      const bool lives = row_of[id] != ~0u && step_of[id] >= oldest;
      if (lives && row_of[id] != row) ++lost;
      const std::uint32_t before = key_of[row];
      if (before != ~0u && before != id && row_of[before] == row && step_of[before] >= oldest) ++shared;
      if (!lives && step_of[id] != 0) ++returned;
      if (before != ~0u && before != id) ++evicted_seen;
      if (step_of[id] != step) {
        if (lives) ages.remove(step_of[id]);
        ages.add(step, 1);
      }
      row_of[id] = row;
      key_of[row] = id;
      step_of[id] = step;
    }
    oldest = ages.leave_behind(step);
    directory.pass(step, oldest);
    calls += of_step;
  }
  std::printf("%llu calls, %u steps: %llu lost, %llu on one row, %llu came back anew, %llu rows reused; %.1f M keys/s, "
              "slowest step %.2f ms of %.2f\n",
              static_cast<unsigned long long>(calls), step, static_cast<unsigned long long>(lost),
              static_cast<unsigned long long>(shared), static_cast<unsigned long long>(returned),
              static_cast<unsigned long long>(evicted_seen), static_cast<double>(calls) / total / 1e6, slowest * 1e3,
              total / step * 1e3);
  return lost == 0 && shared == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::uint64_t num_keys = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10'000'000;
  if (argc > 2) return check_against_model(num_keys, std::strtoull(argv[2], nullptr, 10));
  measure(num_keys);
  return 0;
}

// Rows that leave a scratchpad come back from the victim cache as they left, whatever came between; what nobody has room
// for is refused by name.
#include <algorithm>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "scratchpad/victim_cache.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t small_log_bytes = 96 << 10;
constexpr std::uint64_t scratchpad_bytes = 18 << 10;

// Two tables of one size, whose rows drive one another out, one of another, and one that is in as a whole.
Script four_tables() {
  Script script;
  script.tables = {
      table_record("a", 300, 8, RowOptimizer::rowwise_adagrad), table_record("b", 200, 4, RowOptimizer::adam),
      table_record("c", 400, 8, RowOptimizer::rowwise_adagrad), table_record("d", 5, 2, RowOptimizer::sgd)};
  script.num_bags = 8;
  return script;
}

OpenOptions with_victims(std::uint64_t bytes, std::uint64_t of_scratchpad = scratchpad_bytes) {
  return {.scratchpad_bytes = of_scratchpad, .victims = VictimOptions{.bytes = bytes}};
}

void what_is_taken_is_what_was_put_last_and_is_gone(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const std::vector<RowTable> tables = row_tables_of(
      {table_record("a", 500, 8, RowOptimizer::rowwise_adagrad), table_record("b", 900, 4, RowOptimizer::adam)}, 1);
  for (const std::uint64_t bytes : {std::uint64_t{700}, std::uint64_t{6000}, std::uint64_t{1} << 20}) {
    const VictimMemory memory({.bytes = bytes});
    const VictimShelving shelving = shelve_with_victims(tables, 20000, bytes);
    std::vector<std::unique_ptr<Shelf>> shelves;
    for (const Shelving::Size& size : shelving.shelving.shelves) {
      shelves.push_back(std::make_unique<Shelf>(*size.table, size.num_slots, size.num_rows));
    }
    VictimCache victims(memory, shelves, shelving.num_sets);
    CHECK(victims.num_rows() <= bytes / 36);
    std::vector<std::map<std::uint64_t, std::uint8_t>> put(shelves.size());
    std::uint64_t num_found = 0;
    for (int i = 0; i < 20000; ++i) {
      const std::size_t shelf = random() % shelves.size();
      if (!victims.has_room(shelf)) continue;
      const std::size_t row_bytes = shelves[shelf]->weight_bytes + shelves[shelf]->state_bytes;
      const std::uint64_t key = Shelf::key_of(static_cast<std::uint32_t>(shelf), random() % 500);
      const std::byte* const found = victims.take(shelf, key);
      const auto expected = put[shelf].find(key);
      if (found != nullptr) {
        ++num_found;
        CHECK(memory.data() <= found && found + row_bytes <= memory.data() + bytes);
        CHECK(expected != put[shelf].end());
        const auto is_it = [&](std::byte byte) { return byte == std::byte{expected->second}; };
        CHECK(std::all_of(found, found + row_bytes, is_it));
        CHECK(victims.take(shelf, key) == nullptr);
      }
      const auto value = static_cast<std::uint8_t>(random());
      if (random() % 4 == 0) {
        put[shelf].erase(key);
      } else {
        std::fill_n(victims.put(shelf, key), row_bytes, std::byte{value});
        put[shelf][key] = value;
      }
    }
    CHECK(num_found != 0);
    if (bytes != 1 << 20) continue;
    for (std::size_t shelf = 0; shelf < shelves.size(); ++shelf) {  // with room for all, most are there
      std::size_t count = 0;
      for (const auto& [key, value] : put[shelf]) count += victims.take(shelf, key) != nullptr;
      CHECK(10 * count > 9 * put[shelf].size());
    }
  }
}

void tags_count_towards_the_scratchpad_and_tables_that_fit_get_no_places() {
  const std::vector<RowTable> tables = row_tables_of(four_tables().tables, 1);
  const auto num_slots = [](const Shelving& shelving) {
    std::uint64_t sum = 0;
    for (const Shelving::Size& size : shelving.shelves) sum += size.num_slots;
    return sum;
  };
  const Shelving without = shelve(tables, scratchpad_bytes);
  const VictimShelving with = shelve_with_victims(tables, scratchpad_bytes, 12 << 10);
  CHECK(num_slots(with.shelving) < num_slots(without));
  CHECK(with.num_sets.size() == 3);
  CHECK(with.num_sets[2] == 0 && with.shelving.shelves[2].num_slots == 5);
  CHECK(with.num_sets[0] != 0 && with.num_sets[1] != 0);
  const VictimShelving all_fit = shelve_with_victims(tables, 1 << 20, 12 << 10);
  CHECK(num_slots(all_fit.shelving) == 905);
  for (const std::uint64_t num_sets : all_fit.num_sets) CHECK(num_sets == 0);
  CHECK(kind_thrown_by([&] { shelve_with_victims(tables, 4000, 1 << 20); }) == ErrorKind::config);
}

// However batches are announced, however rows are updated, and however few of them have room here.
void rows_are_those_of_a_pool_without_one() {
  const Script script = four_tables();
  const auto expected = reference(60, script);
  for (const std::uint64_t window : {0u, 1u, 4u, 32u}) {
    for (const std::uint64_t victim_bytes : {0u, 600u, 9000u, 100'000u}) {
      check::context = "window " + std::to_string(window) + ", victims " + std::to_string(victim_bytes);
      const TemporaryDirectory directory;
      make_pool(directory.path(), small_log_bytes, format::Store::log, script);
      OpenOptions options = with_victims(victim_bytes);
      if (victim_bytes == 0) options.victims = std::nullopt;
      options.warm = window != 0;  // what a sweep brings was missed and is in none of the counts below
      Run run(directory.path(), options, script);
      run.updates = window % 2 == 0 ? Updates::by_turns : Updates::by_pool;
      while (run.pool.step() < 60) run.step_ahead(window);
      const Traffic traffic = *run.pool.traffic();
      run.pool.close();
      CHECK(rows_of_pool(directory.path()) == expected);
      CHECK((traffic.rows_from_victims != 0) == (victim_bytes != 0));
      CHECK((traffic.victim_rows != 0) == (victim_bytes != 0));
      // Of rows that were not in, each came from the victim cache, from below, or is as it was at first.
      const std::uint64_t arrived = traffic.rows_from_victims + traffic.rows_fetched + traffic.rows_initial;
      CHECK(arrived == traffic.rows_missed || window != 0);
    }
  }
}

// Batches that are announced and never captured, and captured and thrown away, and a look at rows that leaves no trace.
void holds_that_are_given_up_leave_rows_as_they_are() {
  const Script script = four_tables();
  const TemporaryDirectory directory;
  make_pool(directory.path(), small_log_bytes, format::Store::log, script);
  Run run(directory.path(), with_victims(20'000), script);
  std::mt19937_64 random(1);
  while (run.pool.step() < 50) {
    std::deque<std::shared_ptr<Plan>> announced;
    for (std::uint64_t i = 0; i < random() % 7; ++i) {
      announced.push_back(run.plan(1000 + 10 * run.pool.step() + i));
      run.pool.announce(announced.back());
    }
    while (announced.size() > 3) announced.pop_front();
    const auto thrown_away = run.pool.capture(run.plan(2000 + run.pool.step()));
    run.step(false);
  }
  CHECK(run.pool.traffic()->rows_from_victims != 0);
  run.pool.close();
  CHECK(rows_of_pool(directory.path()) == reference(50, script));
}

void what_cannot_be_had_is_refused() {
  const TemporaryDirectory directory;
  make_pool(directory.path(), small_log_bytes, format::Store::log);
  const auto kind = [&](const VictimOptions& victims) {
    return kind_thrown_by([&] { Run(directory.path(), {.scratchpad_bytes = scratchpad_bytes, .victims = victims}); });
  };
  CHECK(kind({.bytes = 0}) == ErrorKind::config);
  CHECK(kind({.bytes = 1 << 20, .directory = "/nowhere"}) == ErrorKind::config);
  CHECK(kind({.bytes = 1 << 20, .directory = "/proc"}) == ErrorKind::config);
  CHECK(kind({.bytes = 1 << 20, .nodes = {777}}) == ErrorKind::config);
  CHECK(kind({.bytes = 1 << 20, .directory = "/dev/shm", .nodes = {0}}) == ErrorKind::config);
  CHECK(kind({.bytes = std::uint64_t{1} << 50, .directory = "/dev/shm"}) == ErrorKind::full);
  Run run(directory.path(), with_victims(1 << 20));  // none of these has changed anything
  run.step(false);
  run.pool.close();
  const TemporaryDirectory in_place;
  make_pool(in_place.path(), small_log_bytes);
  CHECK(kind_thrown_by([&] { Run(in_place.path(), with_victims(1 << 20)); }) == ErrorKind::config);
}

// Of a dialled one, what moves is asked of the dial: a step takes the longer, the slower it is.
void a_file_of_memory_and_a_dialled_one_hold_the_same_rows() {
  const Script script = four_tables();
  const auto expected = reference(20, script);
  DialSpec slow{.read_bytes_per_s = 1e9,
                .write_bytes_per_s = 1e9,
                .stream_write_bytes_per_s = 1e9,
                .read_latency_s = 2e-5,
                .write_latency_s = 2e-5,
                .outstanding_requests = 1,
                .granularity_bytes = 64,
                .sync_latency_s = 0,
                .cache_bytes = 0};
  for (const bool is_slow : {false, true}) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), small_log_bytes, format::Store::log, script);
    OpenOptions options = with_victims(50'000);
    options.victims->directory = "/dev/shm";
    if (is_slow) options.victims->dial = slow;
    Run run(directory.path(), options, script);
    const auto began = std::chrono::steady_clock::now();
    while (run.pool.step() < 20) run.step_ahead(2);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
    // Each of them is read by itself; as many are written, or more.
    const auto num_moved = 2 * static_cast<double>(run.pool.traffic()->rows_from_victims);
    if (is_slow) CHECK(took.count() >= num_moved * slow.read_latency_s);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == expected);
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  what_is_taken_is_what_was_put_last_and_is_gone(seed);
  tags_count_towards_the_scratchpad_and_tables_that_fit_get_no_places();
  rows_are_those_of_a_pool_without_one();
  holds_that_are_given_up_leave_rows_as_they_are();
  what_cannot_be_had_is_refused();
  a_file_of_memory_and_a_dialled_one_hold_the_same_rows();
  return check::passed();
}

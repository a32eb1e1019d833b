// A pool through its verbs, without Python: what a step does, what comes back after a life ends without a close, and
// that every way of running it leaves the same rows. Sanitizers watch.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "pool.h"
#include "reader.h"

namespace holdfast {
namespace {

constexpr std::size_t num_bags = 16;
constexpr std::size_t ids_per_bag = 3;

class Directory {
 public:
  Directory() {
    std::string pattern =
        std::filesystem::exists("/dev/shm") ? "/dev/shm/holdfast-core-XXXXXX" : "/tmp/holdfast-core-XXXXXX";
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~Directory() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

format::TableRecord table_record(const char* name, std::uint64_t rows, std::uint32_t dim, RowOptimizer optimizer) {
  format::TableRecord record{};
  record.num_embeddings = rows;
  record.embedding_dim = dim;
  record.optimizer = static_cast<std::uint32_t>(optimizer);
  record.state_floats = state_floats_of(optimizer, dim);
  record.init_low = -0.1f;
  record.init_high = 0.1f;
  std::strncpy(record.name, name, sizeof(record.name) - 1);
  return record;
}

void make_pool(const std::string& path, std::uint64_t log_bytes, format::Store store = format::Store::in_place) {
  Pool::create(
      path, {1, log_bytes, store},
      {table_record("a", 300, 8, RowOptimizer::rowwise_adagrad), table_record("b", 40, 4, RowOptimizer::adam)});
}

// Trains scripted steps: ids and gradients are functions of the step.
class Run {
 public:
  Run(const std::string& path, const OpenOptions& options) : pool(path, options) {
    auto spec = std::make_shared<CollectionSpec>();
    spec->tables = {{0, 300, 8, Pooling::sum}, {1, 40, 4, Pooling::mean}};
    spec->features = {{0, 0, "x"}, {1, 8, "y"}};
    spec->output_width = 12;
    plans_ = std::make_shared<PlanPool>(spec);
  }

  std::shared_ptr<Plan> plan(std::uint64_t step) {
    std::mt19937_64 random(step);
    std::vector<std::int64_t> ids;
    for (std::size_t i = 0; i < num_bags * ids_per_bag; ++i) ids.push_back(static_cast<std::int64_t>(random() % 300));
    for (std::size_t i = 0; i < num_bags * ids_per_bag; ++i) ids.push_back(static_cast<std::int64_t>(random() % 40));
    std::vector<std::int64_t> offsets;
    for (std::size_t i = 0; i <= 2 * num_bags; ++i) offsets.push_back(static_cast<std::int64_t>(i * ids_per_bag));
    auto plan = plans_->take();
    plan_batch({ids.data(), offsets.data(), true, nullptr, num_bags, {0, 1}}, true, *plan);
    return plan;
  }

  static UpdateSpec hyperparameters() {
    UpdateSpec spec{};
    spec.learning_rate = 0.1f;
    spec.epsilon = 1e-6f;
    spec.beta1 = 0.9f;
    spec.beta2 = 0.99f;
    spec.gradient_scale = 1;
    return spec;
  }

  // A step of which the coming `window` batches are announced.
  void step_ahead(std::uint64_t window) {
    const std::uint64_t number = pool.step() + 1;
    while (announced_.size() < window) {
      announced_.push_back(plan(number + announced_.size()));
      pool.announce(announced_.back());
    }
    if (window != 0) {
      next_ = announced_.front();
      announced_.pop_front();
    }
    step(false);
  }

  void step(bool ahead, bool commit = true) {
    const std::uint64_t number = pool.step() + 1;
    auto now = next_ ? std::exchange(next_, nullptr) : plan(number);
    const auto capture = pool.capture(now);
    std::vector<float> out(num_bags * 12);
    pool.lookup(*capture, out.data());
    if (ahead) {
      next_ = plan(number + 1);
      pool.capture_ahead(next_);
    }
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = out[i] * 0.5f + static_cast<float>(i % 7) * 0.01f;
    pool.update({{capture, out.data()}}, hyperparameters());
    if (commit) commit_step(number);
  }

  void commit_step(std::uint64_t number) {
    const std::string structure = "{\"step\": " + std::to_string(number) + "}";
    const std::vector<double> tensor(500, static_cast<double>(number));
    const DenseTensor dense{tensor.data(), tensor.size() * sizeof(double), 0};
    const Pool::Dense state{{reinterpret_cast<const std::byte*>(structure.data()), structure.size()},
                            {&dense, 1},
                            tensor.size() * sizeof(double)};
    pool.commit(number * num_bags, pool.dense_due() ? &state : nullptr);
  }

  Pool pool;

 private:
  std::shared_ptr<PlanPool> plans_;
  std::shared_ptr<Plan> next_;
  std::deque<std::shared_ptr<Plan>> announced_;
};

std::vector<std::byte> rows_of_pool(const std::string& path) {
  const Reader reader(path);
  std::vector<std::byte> all;
  for (std::size_t t = 0; t < 2; ++t) {
    const auto& table = reader.tables()[t];
    std::vector<std::byte> weights(table.num_rows * table.weight_bytes());
    std::vector<float> state(table.num_rows * table.spec.state_floats);
    reader.read_rows(t, 0, table.num_rows, weights.data(), state.data());
    all.insert(all.end(), weights.begin(), weights.end());
    const auto* bytes = reinterpret_cast<const std::byte*>(state.data());
    all.insert(all.end(), bytes, bytes + state.size() * 4);
  }
  return all;
}

// Runs `life` in a child that ends without a word, as a killed process does.
void run_and_die(const std::function<void()>& life) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    life();
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

std::vector<std::byte> reference(std::uint64_t steps) {
  const Directory directory;
  make_pool(directory.path(), 1 << 20);
  Run run(directory.path(), {});
  while (run.pool.step() < steps) run.step(false);
  run.pool.close();
  return rows_of_pool(directory.path());
}

void every_way_of_running_leaves_the_same_rows() {
  const auto expected = reference(20);
  for (const bool ahead : {false, true}) {
    for (const std::uint32_t interval : {1u, 3u, 50u}) {
      for (const std::uint64_t log_bytes : {std::uint64_t{16384}, std::uint64_t{1} << 20}) {
        const Directory directory;
        make_pool(directory.path(), log_bytes);
        Run run(directory.path(), {.dense_interval = interval});
        while (run.pool.step() < 20) run.step(ahead);
        run.pool.flush();
        CHECK(run.pool.rows_durable_step() == 20);
        run.pool.close();
        CHECK(rows_of_pool(directory.path()) == expected);
        CHECK(Reader(directory.path()).verify().empty());
      }
    }
  }
}

[[maybe_unused]] void a_life_that_ends_anywhere_is_rolled_back_to_its_newest_dense_state() {
  for (const std::uint32_t interval : {1u, 4u}) {
    for (const bool committed : {false, true}) {
      const Directory directory;
      make_pool(directory.path(), 1 << 20);
      run_and_die([&] {
        Run run(directory.path(), {.dense_interval = interval});
        while (run.pool.step() < 10) run.step(true);
        run.step(true, committed);
        run.pool.flush();
      });
      Run run(directory.path(), {.dense_interval = interval});
      const std::uint64_t rows_step = committed ? 11 : 10;
      CHECK(!run.pool.recovery().clean);
      CHECK(run.pool.recovery().rows_step == rows_step);
      CHECK(run.pool.step() == rows_step / interval * interval);
      run.pool.close();
      CHECK(rows_of_pool(directory.path()) == reference(rows_step / interval * interval));
    }
  }
}

// What a pool with a log store is opened with here: a row log that turns over many times, a scratchpad of few rows, and
// batches that are announced ahead.
constexpr std::uint64_t small_log_bytes = 96 << 10;

void a_log_store_leaves_the_same_rows_however_it_runs() {
  const auto expected = reference(60);
  for (const std::uint64_t window : {0u, 1u, 4u, 32u}) {
    for (const std::uint64_t scratchpad_bytes : {std::uint64_t{14} << 10, std::uint64_t{1} << 20}) {
      for (const std::uint32_t interval : {1u, 3u, 50u}) {
        check::context = "window " + std::to_string(window) + ", scratchpad " + std::to_string(scratchpad_bytes) +
                         ", dense interval " + std::to_string(interval);
        const Directory directory;
        make_pool(directory.path(), small_log_bytes, format::Store::log);
        Run run(directory.path(), {.dense_interval = interval, .scratchpad_bytes = scratchpad_bytes});
        while (run.pool.step() < 60) run.step_ahead(window);
        run.pool.flush();
        CHECK(run.pool.rows_durable_step() == 60);
        CHECK(run.pool.traffic()->merged_bytes > 2 * small_log_bytes);
        run.pool.close();
        CHECK(rows_of_pool(directory.path()) == expected);
        CHECK(Reader(directory.path()).verify().empty());
        CHECK(Reader(directory.path()).commit().step == 60);
      }
    }
  }
}

[[maybe_unused]] void a_log_store_comes_back_to_its_newest_dense_state() {
  for (const std::uint32_t interval : {1u, 4u}) {
    for (const bool committed : {false, true}) {
      for (const std::uint64_t steps : {2u, 30u}) {
        const Directory directory;
        make_pool(directory.path(), small_log_bytes, format::Store::log);
        run_and_die([&] {
          Run run(directory.path(), {.dense_interval = interval});
          while (run.pool.step() < steps) run.step_ahead(2);
          run.step(false, committed);
          run.pool.flush();
        });
        Run run(directory.path(), {.dense_interval = interval});
        const std::uint64_t rows_step = committed ? steps + 1 : steps;
        CHECK(!run.pool.recovery().clean);
        CHECK(run.pool.recovery().rows_step == rows_step);
        CHECK(run.pool.step() <= rows_step);  // dense states come early where the log is low
        CHECK(run.pool.step() >= rows_step / interval * interval);
        while (run.pool.step() < 40) run.step_ahead(3);
        run.pool.close();
        CHECK(rows_of_pool(directory.path()) == reference(40));
      }
    }
  }
}

void captures_of_one_step_share_the_scratchpad_or_are_refused() {
  const Directory directory;
  make_pool(directory.path(), 1 << 20, format::Store::log);
  Run run(directory.path(), {.scratchpad_bytes = 14 << 10});
  std::vector<std::shared_ptr<Capture>> captures;
  bool refused = false;
  try {
    for (std::uint64_t i = 1; i < 100; ++i) captures.push_back(run.pool.capture(run.plan(i)));
  } catch (const Error& error) {
    refused = error.kind() == ErrorKind::batch_too_large;
  }
  CHECK(refused);
  CHECK(captures.size() > 1);
  captures.clear();
  while (run.pool.step() < 20) run.step_ahead(4);
  run.pool.close();
  CHECK(rows_of_pool(directory.path()) == reference(20));
}

// The rows of the announced batches give way to it; the batches are captured as usual when it is their turn.
void a_batch_that_was_not_announced_finds_room_beside_a_window() {
  for (const std::uint64_t scratchpad_bytes : {std::uint64_t{16} << 10, std::uint64_t{24} << 10}) {
    const Directory directory;
    make_pool(directory.path(), 1 << 20, format::Store::log);
    Run run(directory.path(), {.scratchpad_bytes = scratchpad_bytes});
    while (run.pool.step() < 40) {
      std::deque<std::shared_ptr<Plan>> never_captured;
      for (std::uint64_t i = 0; i < 6; ++i) {
        never_captured.push_back(run.plan(1000 + 10 * run.pool.step() + i));
        run.pool.announce(never_captured.back());
      }
      const auto thrown_away = run.pool.capture(run.plan(2000 + run.pool.step()));
      run.step(false);
    }
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(40));
  }
}

void a_pool_is_opened_for_writing_once() {
  const Directory directory;
  make_pool(directory.path(), 1 << 20);
  const Run run(directory.path(), {});
  bool busy = false;
  try {
    const Pool second(directory.path(), {});
  } catch (const Error& error) {
    busy = error.kind() == ErrorKind::busy;
  }
  CHECK(busy);
}

void a_capture_that_the_log_has_no_room_for_is_refused_and_harms_nothing() {
  const Directory directory;
  make_pool(directory.path(), 4096);
  Run run(directory.path(), {.grow_log = false});
  const auto first = run.pool.capture(run.plan(1));
  bool refused = false;
  try {
    run.pool.capture(run.plan(2));
  } catch (const Error& error) {
    refused = error.kind() == ErrorKind::batch_too_large;
  }
  CHECK(refused);
  run.commit_step(1);
  while (run.pool.step() < 5) run.step(false);
  run.pool.close();
}

}  // namespace
}  // namespace holdfast

int main() {
#if !defined(__SANITIZE_THREAD__)  // which knows no threads in the child of a process that had some
  holdfast::a_life_that_ends_anywhere_is_rolled_back_to_its_newest_dense_state();
  holdfast::a_log_store_comes_back_to_its_newest_dense_state();
#endif
  holdfast::a_log_store_leaves_the_same_rows_however_it_runs();
  holdfast::captures_of_one_step_share_the_scratchpad_or_are_refused();
  holdfast::a_batch_that_was_not_announced_finds_room_beside_a_window();
  holdfast::every_way_of_running_leaves_the_same_rows();
  holdfast::a_pool_is_opened_for_writing_once();
  holdfast::a_capture_that_the_log_has_no_room_for_is_refused_and_harms_nothing();
  return 0;
}

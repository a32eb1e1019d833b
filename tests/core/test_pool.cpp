// A pool through its verbs, without Python: what a step does, what comes back after a life ends without a close, and
// that every way of running it leaves the same rows. Sanitizers watch.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pool/pool.h"
#include "readers/reader.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

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

constexpr Updates all_updates[] = {Updates::by_pool, Updates::elsewhere, Updates::by_turns};

void every_way_of_running_leaves_the_same_rows() {
  const auto expected = reference(20);
  for (const bool ahead : {false, true}) {
    for (const Updates updates : all_updates) {
      for (const std::uint32_t interval : {1u, 3u, 50u}) {
        for (const std::uint64_t log_bytes : {std::uint64_t{16384}, std::uint64_t{1} << 20}) {
          const TemporaryDirectory directory;
          make_pool(directory.path(), log_bytes);
          Run run(directory.path(), {.dense_interval = interval});
          run.updates = updates;
          while (run.pool.step() < 20) run.step(ahead);
          run.pool.flush();
          CHECK(run.pool.rows_durable_step() == 20);
          CHECK(run.pool.row_updates() == 20);
          run.pool.close();
          CHECK(rows_of_pool(directory.path()) == expected);
          CHECK(Reader(directory.path()).verify().empty());
        }
      }
    }
  }
}

[[maybe_unused]] void a_life_that_ends_anywhere_is_rolled_back_to_its_newest_dense_state() {
  for (const std::uint32_t interval : {1u, 4u}) {
    for (const bool committed : {false, true}) {
      const TemporaryDirectory directory;
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
        const TemporaryDirectory directory;
        make_pool(directory.path(), small_log_bytes, format::Store::log);
        Run run(directory.path(), {.dense_interval = interval, .scratchpad_bytes = scratchpad_bytes});
        run.updates = all_updates[window % 3];
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
        const TemporaryDirectory directory;
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
  const TemporaryDirectory directory;
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
    const TemporaryDirectory directory;
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

// With room for the rows of one batch only, and several that are announced.
void rows_of_a_step_that_is_over_give_way_at_once() {
  const TemporaryDirectory directory;
  make_pool(directory.path(), small_log_bytes, format::Store::log);
  Run run(directory.path(), {.scratchpad_bytes = 7 << 10});
  while (run.pool.step() < 3000) run.step_ahead(32);
  run.pool.close();
  CHECK(rows_of_pool(directory.path()) == reference(3000));
}

// Keeps the row log from being synced while it is closed.
class Gate final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile&, std::uint64_t, std::span<const std::byte>) override {}
  void before_sync(const BlockFile& file) override {
    if (file.name().find("row-log") == std::string::npos) return;
    std::unique_lock lock(mutex_);
    turned_.wait(lock, [this] { return is_open_; });
  }
  void after_sync(const BlockFile&) override {}

  void set(bool is_open) {
    {
      const std::lock_guard lock(mutex_);
      is_open_ = is_open;
    }
    turned_.notify_all();
  }
  bool is_open() const {
    const std::lock_guard lock(mutex_);
    return is_open_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable turned_;
  bool is_open_ = true;
};

// At most the step in flight is lost: a commit with a dense state waits until the one before is durable.
void with_a_dense_state_every_step_one_step_is_on_its_way_to_the_medium() {
  const TemporaryDirectory directory;
  make_pool(directory.path(), small_log_bytes, format::Store::log);
  Gate gate;
  Run run(directory.path(), {.dense_interval = 1}, {}, nullptr, &gate);
  while (run.pool.step() < 3) run.step(false);
  run.pool.flush();
  gate.set(false);
  run.step(false);
  CHECK(!gate.is_open());
  CHECK(run.pool.durable_step() == 3);
  std::jthread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    gate.set(true);
  });
  run.step(false);
  CHECK(gate.is_open());
  CHECK(run.pool.durable_step() >= 4);
  run.pool.close();
  CHECK(rows_of_pool(directory.path()) == reference(5));
}

void a_pool_is_opened_for_writing_once() {
  const TemporaryDirectory directory;
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
  const TemporaryDirectory directory;
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
  holdfast::rows_of_a_step_that_is_over_give_way_at_once();
  holdfast::every_way_of_running_leaves_the_same_rows();
  holdfast::with_a_dense_state_every_step_one_step_is_on_its_way_to_the_medium();
  holdfast::a_pool_is_opened_for_writing_once();
  holdfast::a_capture_that_the_log_has_no_room_for_is_refused_and_harms_nothing();
  return 0;
}

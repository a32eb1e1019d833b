// The pool of threads: every index once, from any thread, in a forked child, with exceptions.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/parallel.h"
#include "check.h"
#include "draws.h"

namespace holdfast {
namespace {

#if defined(__SANITIZE_THREAD__)
constexpr bool thread_sanitizer = true;  // it does not support threads after a fork
#else
constexpr bool thread_sanitizer = false;
#endif

void check_every_index_runs_once(std::size_t count) {
  std::vector<int> runs(count);  // no atomics: one thread runs an index, and its end is seen by the caller
  parallel_for(count, [&](std::size_t i) { ++runs[i]; });
  for (const int times : runs) CHECK(times == 1);
}

void every_index_runs_once(Random& random) {
  for (int i = 0; i < 3000; ++i) {
    if (i % 100 == 0) set_num_threads(static_cast<int>(1 + random() % 6));
    check_every_index_runs_once(random() % 40);
  }
  set_num_threads(3);
  check_every_index_runs_once(100000);
}

void calls_from_several_threads_take_turns() {
  set_num_threads(3);
  std::atomic<int> running{0};
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        std::vector<int> runs(20);
        parallel_for(runs.size(), [&](std::size_t index) {
          running.fetch_add(1);
          ++runs[index];
          CHECK(running.fetch_sub(1) <= 3);
        });
        for (const int times : runs) CHECK(times == 1);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void nested_calls_run_inline() {
  set_num_threads(3);
  std::atomic<int> total{0};
  parallel_for(8, [&](std::size_t) {
    const std::thread::id outer = std::this_thread::get_id();
    parallel_for(5, [&](std::size_t) {
      CHECK(std::this_thread::get_id() == outer);
      total.fetch_add(1);
    });
  });
  CHECK(total == 40);
}

void exceptions_reach_the_caller() {
  set_num_threads(3);
  for (int i = 0; i < 200; ++i) {
    bool thrown = false;
    try {
      parallel_for(50, [&](std::size_t index) {
        if (index % 7 == 3) throw std::runtime_error("index " + std::to_string(index));
      });
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    CHECK(thrown);
    check_every_index_runs_once(30);  // the pool works on
  }
}

void several_threads_do_the_work() {
  set_num_threads(3);
  std::mutex mutex;
  std::set<std::thread::id> seen;
  for (int i = 0; i < 1000 && seen.size() < 2; ++i) {
    parallel_for(3, [&](std::size_t) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
      const std::lock_guard lock(mutex);
      seen.insert(std::this_thread::get_id());
    });
  }
  CHECK(seen.size() >= 2);
}

void forked_child_starts_anew() {
  set_num_threads(3);
  check_every_index_runs_once(100);
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      check_every_index_runs_once(1000);
      _exit(0);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_every_index_runs_once(100);
  }
}

// A fork while another thread holds the pool: the child must not wait for that turn.
void fork_during_a_call_is_harmless() {
  set_num_threads(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) check_every_index_runs_once(64);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      std::atomic<int> total{0};
      parallel_for(64, [&](std::size_t) { total.fetch_add(1); });
      _exit(total == 64 ? 0 : 1);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  CHECK(num_threads() >= 1);
  every_index_runs_once(random);
  calls_from_several_threads_take_turns();
  nested_calls_run_inline();
  exceptions_reach_the_caller();
  several_threads_do_the_work();
  if (!thread_sanitizer) {
    forked_child_starts_anew();
    fork_during_a_call_is_harmless();
  }
  return check::passed();
}

// A life of a small pool that something it asks the system for is refused in, and what must hold of the pool after it.
//
// - The process goes on. What it is told is a typed error: of the pool, or std::bad_alloc (Python's MemoryError).
// - A verb that was refused may be tried again. Either the pool refuses from then on, or the step has the right bits.
// - Opened again, the pool is at the end of a step that is not below any reported durable, with the rows of that step,
//   and trains on to those of a run that was refused nothing.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace holdfast {

constexpr std::uint64_t first_steps = 3;  // that the pool has when the life begins
constexpr std::uint64_t last_step = 8;

struct Shape {
  const char* what;
  format::Store store;
  std::uint64_t log_bytes;
  Updates updates;
  bool ahead;
  bool row_checksums = false;

  Script script() const {
    Script script;
    script.row_checksums = row_checksums;
    return script;
  }
};

inline const Shape shapes[] = {
    {"in place", format::Store::in_place, 64 << 10, Updates::by_pool, false},
    {"in place, captured ahead, with row checksums", format::Store::in_place, 64 << 10, Updates::by_turns, true, true},
    {"log store, whose log is merged all the time", format::Store::log, 64 << 10, Updates::by_turns, false},
};

struct Outcome {
  std::uint64_t durable = 0;  // the newest step that was reported durable
  std::uint64_t begun = 0;    // and the newest that may have been committed
  std::string error;          // that was thrown last
};

// Opens the pool, trains to the end and closes it, on what there is. A verb that throws is tried once more.
class LifeInNeed {
 public:
  LifeInNeed(const std::string& path, const Shape& shape) : shape_(shape) {
    outcome_.begun = first_steps;
    outcome_.durable = first_steps;
    if (!tries([&] { open(path); }) && !tries([&] { open(path); })) return;
    run_->updates = shape.updates;
    for (int refusals = 0; refusals < 3 && run_->pool.step() < last_step;) {
      outcome_.begun = run_->pool.step() + 1;
      if (!tries([&] { step(); })) {
        ++refusals;
        run_->forget_plans();
      }
      outcome_.durable = run_->pool.durable_step();
    }
    if (!tries([&] { run_->pool.close(); })) tries([&] { run_->pool.close(); });
    outcome_.durable = run_->pool.durable_step();
  }
  const Outcome& outcome() const { return outcome_; }

 private:
  void open(const std::string& path) {
    run_ =
        std::make_unique<Run>(path, OpenOptions{.grow_log = shape_.store == format::Store::in_place}, shape_.script());
  }
  void step() {
    if (shape_.store == format::Store::log) {
      run_->step_ahead(2);
    } else {
      run_->step(shape_.ahead);
    }
  }
  template <class Verb>
  bool tries(const Verb& verb) {
    try {
      verb();
      return true;
    } catch (const Error& error) {
      outcome_.error = error.what();
    } catch (const std::bad_alloc& error) {
      outcome_.error = error.what();
    } catch (const std::exception& error) {
      check::context += std::string(", which threw '") + error.what() + "'";
      check::fail(__FILE__, __LINE__, "an error has a type of the pool's");
    }
    return false;
  }

  Shape shape_;
  Outcome outcome_;
  std::unique_ptr<Run> run_;
};

// Waiting for what will never come is a failure, too. It has no other witness.
inline void fail_if_it_hangs() {
  constexpr unsigned patience_seconds = 60;
  ::signal(SIGALRM, [](int) { check::fail(__FILE__, __LINE__, "it goes on within patience_seconds"); });
  ::alarm(patience_seconds);
}

// Of a run that was refused nothing, at the end of each step.
inline std::vector<std::vector<std::byte>> rows_of_steps(const Script& script) {
  std::vector<std::vector<std::byte>> rows;
  for (std::uint64_t step = 0; step <= last_step; ++step) rows.push_back(reference(step, script));
  return rows;
}

// The pool that every life begins with.
inline void make_pool_of_first_steps(const std::string& path, const Shape& shape) {
  make_pool(path, shape.log_bytes, shape.store, shape.script());
  Run run(path, {}, shape.script());
  run.write_dense();
  while (run.pool.step() < first_steps) run.step(false);
  run.pool.close();
}

// trusted: a sync that failed leaves a pool at level `process` that wants to be trusted, and here it may be.
inline void check_whole(const std::string& path, const Shape& shape, const Outcome& outcome,
                        const std::vector<std::vector<std::byte>>& expected, bool trusted = false) {
  check::context += ", which said '" + outcome.error + "', of steps " + std::to_string(outcome.durable) +
                    " (durable) to " + std::to_string(outcome.begun) + " (begun)";
  try {
    Run run(path, OpenOptions{.trust_after_reboot = trusted}, shape.script());
    const std::uint64_t step = run.pool.step();
    check::context += ", it is back at step " + std::to_string(step);
    CHECK(step >= outcome.durable && step <= outcome.begun);
    CHECK(rows_of(Reader(path)) == expected[step]);
    while (run.pool.step() < last_step) run.step(false);
    run.pool.close();
    const Reader reader(path);
    CHECK(rows_of(reader) == expected[last_step]);
    CHECK(reader.verify().empty());
  } catch (const Error& error) {
    check::context += std::string(", then '") + error.what() + "'";
    CHECK(!"the pool that was left goes on");
  }
}

}  // namespace holdfast

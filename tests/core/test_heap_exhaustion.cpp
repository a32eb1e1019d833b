// Memory runs out once, at every place where the core asks for some: opening, training and closing, in both stores.
//
// What must hold, whichever request is refused
// - The process goes on. What it is told is a typed error: of the pool, or std::bad_alloc (Python's MemoryError).
// - A verb that was refused may be tried again. Either the pool refuses from then on, or the step has the right bits.
// - Opened again, the pool is at the end of a step that is not below any reported durable, with the rows of that step,
//   and trains on to those of a run that had memory.
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <iterator>
#include <new>
#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "parallel.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace {

// Requests of all threads are counted in one row; the one that brings this to 0 is refused.
std::atomic<std::int64_t> requests_left{0};
std::atomic<std::uint64_t> num_refused{0};

// Where a debugger stops to see whose request it is.
[[gnu::noinline]] void refuse() { ++num_refused; }

bool refuses() {
  if (requests_left.load(std::memory_order_relaxed) <= 0) return false;
  if (requests_left.fetch_sub(1) != 1) return false;
  refuse();
  return true;
}

void* allocate(std::size_t bytes, std::size_t alignment) {
  if (refuses()) return nullptr;
  void* memory = nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(bytes == 0 ? 1 : bytes);
  return ::posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

// Not inline, so that no compiler takes the library's free for the wrong partner of the operators here.
[[gnu::noinline]] void release(void* memory) { std::free(memory); }

void* allocate_or_throw(std::size_t bytes, std::size_t alignment) {
  void* const memory = allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

// What the linker takes instead of the libraries' own.
void* operator new(std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new[](std::size_t bytes) { return allocate_or_throw(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return allocate_or_throw(bytes, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 1); }
void* operator new[](std::size_t bytes, const std::nothrow_t&) noexcept { return allocate(bytes, 1); }
void operator delete(void* memory) noexcept { release(memory); }
void operator delete[](void* memory) noexcept { release(memory); }
void operator delete(void* memory, std::size_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t) noexcept { release(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { release(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { release(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { release(memory); }

// Sanitizers have their own of these.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
extern "C" {

void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  if (refuses()) {
    errno = ENOMEM;
    return nullptr;
  }
  void* memory = nullptr;
  return ::posix_memalign(&memory, alignment, bytes) == 0 ? memory : nullptr;
}

void* mmap(void* at, std::size_t bytes, int protection, int flags, int descriptor, off_t offset) noexcept {
  if (refuses()) {
    errno = ENOMEM;
    return MAP_FAILED;
  }
  return reinterpret_cast<void*>(::syscall(SYS_mmap, at, bytes, protection, flags, descriptor, offset));
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* of) noexcept {
  using Create = int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static Create* const create = reinterpret_cast<Create*>(::dlsym(RTLD_NEXT, "pthread_create"));
  return refuses() ? EAGAIN : create(thread, attributes, run, of);
}

}  // extern "C"
#endif

namespace holdfast {
namespace {

constexpr std::uint64_t first_steps = 3;  // that the pool has when memory runs out
constexpr std::uint64_t last_step = 8;

struct Shape {
  const char* what;
  format::Store store;
  std::uint64_t log_bytes;
  Updates updates;
  bool ahead;
  bool row_checksums = false;
};

const Shape shapes[] = {
    {"in place", format::Store::in_place, 64 << 10, Updates::by_pool, false},
    {"in place, captured ahead, with row checksums", format::Store::in_place, 64 << 10, Updates::by_turns, true, true},
    {"log store, whose log is merged all the time", format::Store::log, 64 << 10, Updates::by_turns, false},
};

struct Outcome {
  std::uint64_t durable = 0;  // the newest step that was reported durable
  std::uint64_t begun = 0;    // and the newest that may have been committed
  std::string error;          // that was thrown last
};

// Opens the pool, trains to the end and closes it, on the memory that there is. A verb that throws is tried once more.
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
    Script script;
    script.row_checksums = shape_.row_checksums;
    run_ = std::make_unique<Run>(path, OpenOptions{.grow_log = shape_.store == format::Store::in_place}, script);
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
    }
    return false;
  }

  Shape shape_;
  Outcome outcome_;
  std::unique_ptr<Run> run_;
};

// Memory for everything from here on.
void end_of_need() { requests_left = 0; }

// Waiting for what will never come is a failure, too. It has no other witness.
constexpr unsigned patience_seconds = 60;
void fail_if_it_hangs() {
  ::signal(SIGALRM, [](int) { check::fail(__FILE__, __LINE__, "it goes on within patience_seconds"); });
  ::alarm(patience_seconds);
}

std::vector<std::vector<std::byte>> rows_of_steps(const Script& script) {
  std::vector<std::vector<std::byte>> rows;
  for (std::uint64_t step = 0; step <= last_step; ++step) rows.push_back(reference(step, script));
  return rows;
}

void check_whole(const std::string& path, const Shape& shape, const Outcome& outcome,
                 const std::vector<std::vector<std::byte>>& expected) {
  Script script;
  script.row_checksums = shape.row_checksums;
  check::context += ", which said '" + outcome.error + "', of steps " + std::to_string(outcome.durable) +
                    " (durable) to " + std::to_string(outcome.begun) + " (begun)";
  try {
    Run run(path, {}, script);
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

struct Tally {
  std::uint64_t requests = 0;
  std::uint64_t told = 0;  // somebody was: otherwise the core did without
};

Tally run_out_of_memory_everywhere(const Shape& shape, std::uint64_t every, std::uint64_t first) {
  Script script;
  script.row_checksums = shape.row_checksums;
  const auto expected = rows_of_steps(script);
  const TemporaryDirectory before;
  make_pool(before.path(), shape.log_bytes, shape.store, script);
  {
    Run run(before.path(), {}, script);
    run.write_dense();
    while (run.pool.step() < first_steps) run.step(false);
    run.pool.close();
  }
  Tally tally;
  for (std::uint64_t number = first;; number += every) {
    const TemporaryDirectory directory;
    std::filesystem::copy(before.path(), directory.path(), std::filesystem::copy_options::recursive);
    check::context = std::string(shape.what) + ", request " + std::to_string(number) + " is refused";
    fail_if_it_hangs();
    num_refused = 0;
    requests_left = static_cast<std::int64_t>(number);
    Outcome outcome;
    {
      const LifeInNeed life(directory.path(), shape);
      outcome = life.outcome();
      end_of_need();
    }
    check_whole(directory.path(), shape, outcome, expected);
    if (num_refused == 0) return tally;  // there are no more requests
    ++tally.requests;
    tally.told += outcome.error.empty() ? 0 : 1;
  }
}

}  // namespace
}  // namespace holdfast

// Arguments: the number of the request that is refused first; the next one's distance (1: every one is refused, each in
// a run of its own); the number of the only shape, where it is only one.
int main(int argc, char** argv) {
  const auto argument = [&](int i, std::uint64_t otherwise) {
    return argc > i ? std::strtoull(argv[i], nullptr, 10) : otherwise;
  };
  const std::uint64_t first = argument(1, 1);
  const std::uint64_t every = argument(2, 1);
  check::replay_command = std::string(argv[0]) + " FIRST 100000 SHAPE, as often as it takes";
  holdfast::set_num_threads(2);
  for (std::uint64_t number = 0; number < std::size(holdfast::shapes); ++number) {
    if (argument(3, number) != number) continue;
    const holdfast::Shape& shape = holdfast::shapes[number];
    const auto [requests, told] = holdfast::run_out_of_memory_everywhere(shape, every, first);
    std::printf("%s: %llu requests refused, %llu of them said so\n", shape.what,
                static_cast<unsigned long long>(requests), static_cast<unsigned long long>(told));
    std::fflush(stdout);
    CHECK(every > 100 || told > 100 / every);
  }
  return check::passed();
}

// Memory runs out once, at every place where the core asks for some: opening, training and closing, in both stores.
// life_in_need.h says what must hold, whichever request is refused.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <new>
#include <string>

#include "base/parallel.h"
#include "check.h"
#include "life_in_need.h"
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

// Memory for everything from here on.
void end_of_need() { requests_left = 0; }

struct Tally {
  std::uint64_t requests = 0;
  std::uint64_t told = 0;  // somebody was: otherwise the core did without
};

Tally run_out_of_memory_everywhere(const Shape& shape, std::uint64_t every, std::uint64_t first) {
  const auto expected = rows_of_steps(shape.script());
  const TemporaryDirectory before;
  make_pool_of_first_steps(before.path(), shape);
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

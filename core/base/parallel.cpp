#include "base/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/native_thread.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace holdfast {
namespace {

// How often a thread looks for work, or for the end of it, before it sleeps: a few microseconds, enough to bridge the
// gap between two kernels of one verb and too little to be a bad neighbour to PyTorch's threads.
constexpr int num_spins = 200;

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool inside_parallel_for = false;

struct Inside {
  Inside() { inside_parallel_for = true; }
  ~Inside() { inside_parallel_for = false; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;
};

// The indices of one call on a team. Each thread begins with a share of its own, the same in every call of as many
// indices: tables that a thread has captured are in its caches when it pools them. Then it helps the others.
class Shares {
 public:
  Shares(std::size_t count, int num_threads, const std::function<void(std::size_t)>& body)
      : shares_(static_cast<std::size_t>(num_threads)), body_(body) {
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      shares_[i].next.store(count * i / shares_.size(), std::memory_order_relaxed);
      shares_[i].end = count * (i + 1) / shares_.size();
    }
  }

  void work_off(std::size_t thread) noexcept {
    const Inside inside;
    for (std::size_t i = 0; i < shares_.size(); ++i) {
      Share& share = shares_[(thread + i) % shares_.size()];
      while (!failed_.load(std::memory_order_relaxed)) {
        const std::size_t index = share.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= share.end) break;
        try {
          body_(index);
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
      }
    }
  }
  void rethrow() const {
    if (error_ != nullptr) std::rethrow_exception(error_);
  }

 private:
  struct alignas(64) Share {
    std::atomic<std::size_t> next;
    std::size_t end;
  };
  std::vector<Share> shares_;
  const std::function<void(std::size_t)>& body_;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
};

// The OpenMP runtime that PyTorch brought into the process, if it is GCC's. Its team of threads belongs to the thread
// that begins a region, and spins for milliseconds after each: on as many threads as CPUs, workers of our own would get
// half of a CPU beside it, in exactly the verbs that follow a backward pass. So the main thread's calls run on the main
// thread's team, where a region begins within a microsecond or two.
class OpenMp {
 public:
  // Looks anew until PyTorch has been imported.
  static std::optional<OpenMp> find() {
    static std::atomic<void*> begin_region{nullptr};
    OpenMp openmp;
    if (begin_region.load(std::memory_order_acquire) == nullptr) {
      begin_region.store(::dlsym(RTLD_DEFAULT, "GOMP_parallel"), std::memory_order_release);
    }
    openmp.parallel_ = reinterpret_cast<Parallel*>(begin_region.load(std::memory_order_acquire));
    if (openmp.parallel_ == nullptr) return std::nullopt;
    static const auto max_threads = reinterpret_cast<Number*>(::dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
    static const auto thread_number = reinterpret_cast<Number*>(::dlsym(RTLD_DEFAULT, "omp_get_thread_num"));
    static const auto in_parallel = reinterpret_cast<Number*>(::dlsym(RTLD_DEFAULT, "omp_in_parallel"));
    if (max_threads == nullptr || thread_number == nullptr || in_parallel == nullptr) return std::nullopt;
    openmp.max_threads_ = max_threads;
    openmp.thread_number_ = thread_number;
    openmp.in_parallel_ = in_parallel;
    return openmp;
  }

  int max_threads() const { return max_threads_(); }
  bool in_parallel() const { return in_parallel_() != 0; }

  void run(std::size_t count, int num_threads, const std::function<void(std::size_t)>& body) const {
    Shares shares(count, num_threads, body);
    std::pair<Shares*, Number*> region{&shares, thread_number_};
    parallel_(
        [](void* data) {
          const auto& [of_region, thread_number] = *static_cast<std::pair<Shares*, Number*>*>(data);
          of_region->work_off(static_cast<std::size_t>(thread_number()));
        },
        &region, static_cast<unsigned>(num_threads), 0);
    shares.rethrow();
  }

 private:
  using Parallel = void(void (*)(void*), void*, unsigned num_threads, unsigned flags);
  using Number = int();
  Parallel* parallel_ = nullptr;
  Number* max_threads_ = nullptr;
  Number* thread_number_ = nullptr;
  Number* in_parallel_ = nullptr;
};

// Indices are handed out by counting `unclaimed` down. Claiming needs no generation number: fields of the running
// call are written before `unclaimed` is raised and stay until `unfinished` is 0, so whoever claimed an index finds
// the fields of the call that the index belongs to, however late it woke up. And a worker that never wakes (its core
// is taken) delays nobody: the caller claims all indices itself.
class Workers {
 public:
  explicit Workers(int num_workers) {
    const SignalsBlocked blocked;
    try {
      while (static_cast<int>(threads_.size()) < num_workers) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
      // The system gives no more threads: the ones there are do the work.
    }
  }

  ~Workers() {
    stopping_.store(true);
    calls_.fetch_add(1);
    calls_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  void run(std::size_t count, const std::function<void(std::size_t)>& body) {
    count_ = count;
    body_ = &body;
    failed_.store(false, std::memory_order_relaxed);
    unfinished_.store(count, std::memory_order_relaxed);
    unclaimed_.store(count, std::memory_order_release);
    calls_.fetch_add(1);
    calls_.notify_all();  // no system call when nobody sleeps

    work_off();
    for (int spin = 0; unfinished_.load(std::memory_order_acquire) != 0; ++spin) {
      if (spin < num_spins) {
        pause_cpu();
      } else {
        const std::uint32_t seen = ends_.load();
        if (unfinished_.load() != 0) ends_.wait(seen);
      }
    }
    if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
  }

 private:
  // Runs indices until all are claimed.
  void work_off() {
    std::size_t left = unclaimed_.load(std::memory_order_acquire);
    while (left > 0) {
      if (!unclaimed_.compare_exchange_weak(left, left - 1, std::memory_order_acq_rel)) continue;
      if (!failed_.load(std::memory_order_relaxed)) {
        try {
          (*body_)(count_ - left);
        } catch (...) {
          if (!failed_.exchange(true)) error_ = std::current_exception();
        }
      }
      if (unfinished_.fetch_sub(1) == 1) {
        ends_.fetch_add(1);
        ends_.notify_one();
      }
      left = unclaimed_.load(std::memory_order_acquire);
    }
  }

  void work() {
    inside_parallel_for = true;
    std::uint32_t seen = calls_.load();
    while (!stopping_.load()) {
      work_off();
      for (int spin = 0; spin < num_spins && calls_.load() == seen; ++spin) pause_cpu();
      calls_.wait(seen);  // returns at once when a call has come since
      seen = calls_.load();
    }
  }

  std::size_t count_ = 0;
  const std::function<void(std::size_t)>* body_ = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<std::size_t> unclaimed_{0};
  alignas(64) std::atomic<std::size_t> unfinished_{0};
  alignas(64) std::atomic<std::uint32_t> calls_{0};
  std::atomic<bool> stopping_{false};
  alignas(64) std::atomic<std::uint32_t> ends_{0};
  std::vector<std::thread> threads_;
};

int num_cpus() {
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof cpus, &cpus) == 0) return CPU_COUNT(&cpus);
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Everything that a forked child starts anew. It is never destroyed: threads outlive static destructors.
struct Pool {
  explicit Pool(bool in_forked_child) : may_use_openmp(!in_forked_child) {}

  std::mutex turn;
  Workers* workers = nullptr;
  int num_workers = 0;
  const bool may_use_openmp;
};

std::atomic<int>& wanted_threads() {
  static std::atomic<int> wanted{num_cpus()};
  return wanted;
}

std::atomic<bool> is_chosen{false};  // how many threads are wanted

std::atomic<Pool*>& current_pool() {
  static std::atomic<Pool*> pool{[] {
    // In a child only the forking thread lives on; the parent's pool, perhaps locked, is left alone. So is a team of
    // OpenMP's, whose threads the child does not have and the runtime does not know to be gone.
    pthread_atfork(nullptr, nullptr, [] { current_pool().store(new Pool(true)); });
    return new Pool(false);
  }()};
  return pool;
}

// When the library is loaded: a fork before the first call counts, too.
[[maybe_unused]] const Pool* const first_pool = current_pool().load();

// The team on which the calling thread may run `wanted` threads, if there is one. A region of another size than
// the last would end threads and start new ones.
std::optional<OpenMp> openmp_team(const Pool& pool, int wanted) {
  if (!pool.may_use_openmp || ::syscall(SYS_gettid) != ::getpid()) return std::nullopt;
  auto openmp = OpenMp::find();
  if (openmp && (openmp->max_threads() != wanted || openmp->in_parallel())) openmp.reset();
  return openmp;
}

}  // namespace

void set_num_threads(int num_threads) {
  is_chosen = true;
  wanted_threads().store(std::max(1, num_threads));
}

void suggest_num_threads(int num_threads) {
  if (!is_chosen) wanted_threads().store(std::max(1, num_threads));
}

int num_threads() { return wanted_threads().load(); }

void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body) {
  const int num_workers = num_threads() - 1;
  if (inside_parallel_for || count <= 1 || num_workers == 0) {
    for (std::size_t i = 0; i < count; ++i) body(i);
    return;
  }
  Pool& pool = *current_pool().load();
  if (const auto openmp = openmp_team(pool, num_workers + 1)) {
    openmp->run(count, num_workers + 1, body);
    return;
  }
  const std::lock_guard turn(pool.turn);
  if (pool.num_workers != num_workers) {
    delete pool.workers;
    pool.workers = new Workers(num_workers);
    pool.num_workers = num_workers;
  }
  const Inside inside;
  pool.workers->run(count, body);
}

}  // namespace holdfast

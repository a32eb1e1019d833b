#include "base/forks.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

namespace holdfast {
namespace {

std::atomic<std::uint64_t> forks{0};

// Never destroyed: a process may fork while it ends.
struct Kept {
  std::mutex mutex;
  std::vector<int> descriptors;
};

Kept& kept() {
  static Kept* const all = [] {
    auto* made = new Kept;
    pthread_atfork([] { kept().mutex.lock(); }, [] { kept().mutex.unlock(); },
                   [] {
                     for (const int fd : kept().descriptors) ::close(fd);
                     kept().descriptors.clear();
                     forks.fetch_add(1, std::memory_order_relaxed);
                     kept().mutex.unlock();
                   });
    return made;
  }();
  return *all;
}

// When the library is loaded: a fork before the first pool counts, too.
[[maybe_unused]] const Kept* const first = &kept();

}  // namespace

std::uint64_t num_forks() { return forks.load(std::memory_order_relaxed); }

KeptHere::KeptHere(int fd) : fd_(fd) {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.push_back(fd);
}

KeptHere::~KeptHere() {
  if (!made_here_.is_here()) return;  // closed already, and the number may be another file's
  const std::lock_guard lock(kept().mutex);
  std::erase(kept().descriptors, fd_);
  ::close(fd_);
}

}  // namespace holdfast

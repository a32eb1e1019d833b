// What a forked child leaves to its parent. A child has a copy of everything in memory, but none of the threads, and
// every descriptor, whose lock would outlive the parent.
//
// Invariants
// - A KeptHere is closed in a child before anything else runs there: locks end with the process that took them.
// - What an OwnedHere points to is destroyed by the process that made it. A child leaves it alone for good: threads that
//   it would wait for are not there, and locks of theirs may be held.
#pragma once

#include <cstdint>
#include <memory>

namespace holdfast {

// How many forks lie between this process and the one that loaded the library.
std::uint64_t num_forks();

class MadeHere {
 public:
  // Whether this process made it.
  bool is_here() const { return forks_ == num_forks(); }

 private:
  std::uint64_t forks_ = num_forks();
};

struct LeftToParent {
  LeftToParent() = default;
  template <class Other>
  LeftToParent(std::default_delete<Other>) {}

  template <class T>
  void operator()(T* made) const {
    if (made_here.is_here()) delete made;
  }

  MadeHere made_here;
};

template <class T>
using OwnedHere = std::unique_ptr<T, LeftToParent>;

// A file descriptor that no child of fork keeps.
class KeptHere {
 public:
  explicit KeptHere(int fd);
  ~KeptHere();
  KeptHere(const KeptHere&) = delete;
  KeptHere& operator=(const KeptHere&) = delete;

  // Of the process that opened it.
  int get() const { return fd_; }

 private:
  int fd_;
  MadeHere made_here_;
};

}  // namespace holdfast

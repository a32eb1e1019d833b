// Key ages: how many keys of a table were updated last at which step, and so which of them have been left behind.
//
// A key is left behind where it was not updated for more than ttl_steps steps, or where the table would have more than
// max_keys keys otherwise: then the keys of the oldest step go, all of them at once, then those of the next. Those of the
// newest step stay.
//
// Invariants
// - A function of the records that the rows have at the end of a step, and of the step. So nothing of it is kept on the
//   medium: what a run counts from step to step is what an opening counts anew.
//   (Of the records at or after a step there are never fewer at a later time: a record moves to the newest step, or is
//   overwritten by one of the newest step. So what has to go to make room has to go in every later count.)
// - What is left behind never comes back: `oldest` only grows.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

namespace holdfast {

// Which keys keep their rows. Zeros: all of them, from the first step that brings them on.
struct KeyPolicy {
  std::uint64_t ttl_steps = 0;  // a key that no step updated for more than so many steps is left behind; 0: never
  std::uint64_t max_keys = 0;  // with more than so many, those go that were updated longest ago; 0: no limit
  std::uint32_t admit_after = 0;  // the number of a key's first step that trains it; until then it counts, and no more

  bool leaves_keys() const { return ttl_steps != 0 || max_keys != 0; }
};

class KeyAges {
 public:
  explicit KeyAges(const KeyPolicy& policy = {}) : policy_(policy) {}

  // `count` keys that were updated last at `step`.
  void add(std::uint64_t step, std::uint64_t count) {
    if (count == 0 || step < oldest_) return;
    if (counts_.empty()) first_ = step;
    for (; step < first_; --first_) counts_.push_front(0);
    if (step - first_ >= counts_.size()) counts_.resize(step - first_ + 1);
    counts_[step - first_] += count;
    num_keys_ += count;
  }
  // One of those that were updated last at `step` was updated again.
  void remove(std::uint64_t step) {
    if (counts_.empty() || step < first_ || step - first_ >= counts_.size()) return;
    --counts_[step - first_];
    --num_keys_;
  }
  // Of the step after `step`, at whose end all has been counted: a key counts whose newest update is not before this.
  std::uint64_t leave_behind(std::uint64_t step) {
    const std::uint64_t next = step + 1;
    if (policy_.ttl_steps != 0 && next > policy_.ttl_steps) drop_before(next - policy_.ttl_steps);
    if (policy_.max_keys != 0) {
      while (num_keys_ > policy_.max_keys && counts_.size() > 1) drop_before(first_ + 1);
    }
    return oldest_;
  }
  std::uint64_t oldest() const { return oldest_; }
  std::uint64_t num_keys() const { return num_keys_; }

 private:
  void drop_before(std::uint64_t step) {
    for (; !counts_.empty() && first_ < step; ++first_) {
      num_keys_ -= counts_.front();
      counts_.pop_front();
    }
    oldest_ = std::max(oldest_, step);
  }

  KeyPolicy policy_;
  std::deque<std::uint64_t> counts_;  // of step first_ + i
  std::uint64_t first_ = 0;
  std::uint64_t oldest_ = 0;
  std::uint64_t num_keys_ = 0;  // that are not left behind
};

}  // namespace holdfast

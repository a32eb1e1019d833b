// Key ages: how many keys there are of which score, and so which of them have been left behind.
//
// A key's score is the step that updated it last, and what its updates are worth in steps (KeyStay: nothing, where no
// such rule was chosen). By age a key is left behind whose score is more than ttl_steps before the step that comes next.
// For room, where there would be more than max_keys keys: the keys of the lowest score go, all of them at once, then
// those of the next, as long as that is a score below any that a new key could have; beyond that, only as far as there
// are max_keys left. Of the step that updated any last, all keys stay as far as room is concerned.
//
// Invariants
// - A function of the records that the rows have at the end of a step, and of the step. So nothing of it is kept on the
//   medium: which keys a run has left behind from step to step is what an opening finds that counts anew.
// - What is left behind never comes back.
// Why both hold, though rows of keys that were left behind become others':
// - Of scores at or after s there are never fewer later, where s is no later than a new key's score, which grows: a record
//   gives way only to one whose score is not before s. So what has to go below a new key's score has to go in every later
//   count.
// - Beyond that, the max_keys best scores of all records never become worse: each is a key's that is not left behind, whose
//   record gives way only to its own next one, of a better score. So the lowest of them never falls, and whether a record
//   is at or after it does not depend on what became of those before it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>

#include "keys/key_policy.h"

namespace holdfast {

// The keys that count at the end of a step.
struct KeyBounds {
  std::uint64_t by_age = 0;  // of scores
  std::uint64_t by_room = 0;
  std::uint64_t newest = 0;  // the newest step that updated keys

  bool count(std::uint64_t step, std::uint64_t stay) const {
    const std::uint64_t score = step + stay;
    return score >= by_age && (score >= by_room || step >= newest);
  }
};

class KeyAges {
 public:
  explicit KeyAges(const KeyPolicy& policy = {}) : policy_(policy) {}

  // `count` keys of this level (KeyStay) were updated last at `step`.
  void add(std::uint64_t step, std::uint8_t level, std::uint64_t count) {
    if (count == 0) return;
    bounds_.newest = std::max(bounds_.newest, step);
    const std::uint64_t score = score_of(step, level);
    if (score < oldest()) {
      num_left_ += static_cast<std::int64_t>(count);
      return;
    }
    if (counts_.empty()) first_ = score;
    for (; score < first_; --first_) counts_.push_front(0);
    if (score - first_ >= counts_.size()) counts_.resize(score - first_ + 1);
    counts_[score - first_] += count;
    num_keys_ += count;
  }
  // One of those was updated again.
  void remove(std::uint64_t step, std::uint8_t level) {
    const std::uint64_t score = score_of(step, level);
    if (score < oldest()) {
      --num_left_;  // it was spared, being of the newest step
      return;
    }
    if (counts_.empty() || score < first_ || score - first_ >= counts_.size()) return;
    --counts_[score - first_];
    --num_keys_;
  }
  // At the end of `step`, when all has been counted: the keys that count from then on.
  const KeyBounds& leave_behind(std::uint64_t step) {
    const std::uint64_t next = step + 1;
    if (policy_.ttl_steps != 0 && next > policy_.ttl_steps) {
      bounds_.by_age = std::max(bounds_.by_age, next - policy_.ttl_steps);
      drop_before(bounds_.by_age);
    }
    if (policy_.max_keys == 0) return bounds_;
    const std::uint64_t of_new_key = score_of(bounds_.newest, 0);
    while (num_keys_ > policy_.max_keys) {
      if (first_ >= of_new_key && num_keys_ - counts_.front() < policy_.max_keys) break;
      bounds_.by_room = first_ + 1;
      drop_before(bounds_.by_room);
    }
    return bounds_;
  }
  const KeyBounds& bounds() const { return bounds_; }
  // How many were left behind so far; those of the newest step among them, which stay for it, if their scores are too low.
  std::int64_t num_left() const { return num_left_; }

 private:
  std::uint64_t score_of(std::uint64_t step, std::uint8_t level) const { return step + policy_.stay.of_level(level); }
  std::uint64_t oldest() const { return std::max(bounds_.by_age, bounds_.by_room); }
  void drop_before(std::uint64_t score) {
    for (; !counts_.empty() && first_ < score; ++first_) {
      num_keys_ -= counts_.front();
      num_left_ += static_cast<std::int64_t>(counts_.front());
      counts_.pop_front();
    }
  }

  KeyPolicy policy_;
  KeyBounds bounds_;
  std::deque<std::uint64_t> counts_;  // of score first_ + i
  std::uint64_t first_ = 0;
  std::uint64_t num_keys_ = 0;  // of scores that are not left behind
  std::int64_t num_left_ = 0;
};

}  // namespace holdfast

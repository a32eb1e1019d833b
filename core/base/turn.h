// Turn: what one thread does at a time. Whoever comes while another thread is at it is refused, and has changed nothing.
#pragma once

#include <atomic>

#include "base/error.h"

namespace holdfast {

class Turn {
 public:
  explicit Turn(std::atomic<bool>& taken) : taken_(taken) {
    if (!taken_.exchange(true, std::memory_order_acquire)) return;
    throw Error(
        ErrorKind::step,
        "another thread is in the middle of a step of this pool: one thread trains, others may plan and evaluate");
  }
  ~Turn() { taken_.store(false, std::memory_order_release); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  std::atomic<bool>& taken_;
};

}  // namespace holdfast

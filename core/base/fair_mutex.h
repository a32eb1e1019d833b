// Fair mutex: whoever has asked first has it first, where std::mutex mostly goes back to the one that has just let it go.
// Its holders keep it for so long that the price of that does not matter.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace holdfast {

class FairMutex {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    const std::uint64_t number = asked_++;
    turned_.wait(lock, [&] { return turn_ == number; });
  }
  void unlock() {
    {
      const std::lock_guard lock(mutex_);
      ++turn_;
    }
    turned_.notify_all();
  }

 private:
  std::mutex mutex_;  // guards what follows
  std::condition_variable turned_;
  std::uint64_t asked_ = 0;
  std::uint64_t turn_ = 0;
};

}  // namespace holdfast

// Failure latch: after a failure of writing nobody knows what reached the medium. So whatever writes, or rests on what was
// written, refuses from then on, with the first such failure, until the store is opened again. Where the medium is only
// full, everything is as it was.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace holdfast {

class FailureLatch {
 public:
  void require_unfailed() const {
    if (!failed_) return;
    const std::lock_guard lock(mutex_);
    std::rethrow_exception(failure_);
  }
  // Does the work. What it throws is thrown on, and remembered.
  template <class Work>
  void latching(const Work& work) {
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::full) fail(std::current_exception());
      throw;
    } catch (...) {
      fail(std::current_exception());
      throw;
    }
  }

 private:
  void fail(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    if (!failed_) failure_ = std::move(failure);
    failed_ = true;
  }

  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::exception_ptr failure_;  // there before failed_ is set
};

}  // namespace holdfast

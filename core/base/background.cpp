#include "base/background.h"

#include <utility>

#include "base/native_thread.h"

namespace holdfast {

Background::~Background() { stop(); }

Background::Ticket Background::submit(std::function<void()> job) {
  Ticket ticket;
  {
    const std::lock_guard lock(queue_mutex_);
    if (failure_) std::rethrow_exception(failure_);
    if (is_beside_ && !thread_.joinable()) thread_ = start_thread(name_, [this] { run(); });
    queue_.push_back(std::move(job));
    ticket = ++submitted_;
  }
  wake_.notify_one();
  return ticket;
}

bool Background::done(Ticket ticket) const {
  const std::lock_guard lock(queue_mutex_);
  return completed_ >= ticket;
}

bool Background::has_jobs() const {
  const std::lock_guard lock(queue_mutex_);
  return !queue_.empty();
}

void Background::check() const {
  const std::lock_guard lock(queue_mutex_);
  if (failure_) std::rethrow_exception(failure_);
}

void Background::fail(std::exception_ptr failure) {
  const std::lock_guard lock(queue_mutex_);
  if (!failure_) failure_ = std::move(failure);
}

void Background::wait(Ticket ticket) {
  while (!done(ticket)) {
    check();
    const std::lock_guard running(run_mutex_);
    if (!done(ticket)) run_next();
  }
  check();
}

void Background::drain() {
  Ticket last;
  {
    const std::lock_guard lock(queue_mutex_);
    last = submitted_;
  }
  wait(last);
}

// Takes the oldest job and runs it. The caller holds run_mutex_.
void Background::run_next() {
  std::function<void()> job;
  {
    const std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return;
    job = std::move(queue_.front());
    queue_.pop_front();
    if (failure_) return;
  }
  try {
    job();
  } catch (...) {
    const std::lock_guard lock(queue_mutex_);
    if (!failure_) failure_ = std::current_exception();
    queue_.clear();
    return;
  }
  const std::lock_guard lock(queue_mutex_);
  ++completed_;
}

void Background::run() {
  for (;;) {
    {
      std::unique_lock lock(queue_mutex_);
      wake_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
      if (stopping_ && queue_.empty()) return;
    }
    const std::lock_guard running(run_mutex_);
    run_next();
  }
}

void Background::stop() {
  {
    const std::lock_guard lock(queue_mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
  while (!is_beside_ && has_jobs()) {
    const std::lock_guard running(run_mutex_);
    run_next();
  }
}

}  // namespace holdfast

// Background: the one thread that makes things durable while the batch computes.
//
// Invariants
// - Jobs run in the order of submit, one at a time: a commit record never overtakes the log record it rests on, nor a
//   dense slot its commit record.
// - wait(ticket) does not wait for the thread to be scheduled: it runs the jobs that are still queued itself.
// - Nor does it wait for jobs behind its own, however many there are.
// - The first job that throws latches the failure: the queued jobs are dropped, and submit and wait rethrow from then
//   on.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#include "base/fair_mutex.h"

namespace holdfast {

class Background {
 public:
  using Ticket = std::uint64_t;

  // The thread's name, 15 characters at most, is what top and perf show.
  explicit Background(const char* name) : name_(name) {}
  ~Background();
  Background(const Background&) = delete;
  Background& operator=(const Background&) = delete;

  // Jobs run when somebody waits for one of them or a later one, in that thread, and at stop: nothing is done beside what
  // the caller does. Before the first job.
  void run_when_awaited() { is_beside_ = false; }
  // Queues a job; the thread is started by the first one.
  Ticket submit(std::function<void()> job);
  // Returns when the job of `ticket` is done.
  void wait(Ticket ticket);
  // Returns when every submitted job is done.
  void drain();
  bool done(Ticket ticket) const;
  // Rethrows the failure that was latched, if any.
  void check() const;
  // Latches a failure that happened outside a job.
  void fail(std::exception_ptr failure);
  // Finishes what is queued and ends the thread. Does not throw.
  void stop();

 private:
  void run();
  void run_next();
  bool has_jobs() const;

  const char* name_;
  bool is_beside_ = true;  // has a thread of its own
  mutable std::mutex queue_mutex_;
  FairMutex run_mutex_;  // held while a job runs; taken before queue_mutex_
  std::condition_variable wake_;
  std::deque<std::function<void()>> queue_;
  Ticket submitted_ = 0;
  Ticket completed_ = 0;
  std::exception_ptr failure_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace holdfast

// Dial: a medium made as slow as another one. What a verb moves is looked up in declared figures, and the verb returns
// no sooner than the declared medium would have had it done.
//
// Invariants
// - The real work is done, all of it, at the real medium's speed. What is waited for is the declared time less what
//   passed meanwhile; a real medium that is slower than the declared one is not made faster, only counted (late_s).
// - Pieces of work that are under way at the same time share the declared medium (of a duplex one each way) evenly,
//   whatever threads they are of: bandwidth and outstanding requests are the medium's, not a thread's.
// - Bytes, order and durability do not depend on it: it waits, and does nothing else.
// - A thread that waits sleeps, but for the last tenth of a millisecond: the processor is free as it is beside a device.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>

namespace holdfast {

// A medium in figures, all of them of the whole of it.
struct DialSpec {
  double read_bytes_per_s;
  double write_bytes_per_s;
  double stream_write_bytes_per_s;  // in long runs: logs and dense states
  double read_latency_s;
  double write_latency_s;
  double outstanding_requests;  // that are under way at a time, each of them for a latency
  std::uint64_t granularity_bytes;  // what the medium moves at least
  double sync_latency_s;  // of a flush of a block medium, beside what it writes
  double cache_bytes;  // of the processor beside the medium; of a batch's rows beyond it, each use is a read
  bool duplex = false;  // reads and writes do not take turns: each has a way of its own, as over a link
};

// What a piece of work moves. Requests are at random places, each of them in whole granules; streams are long runs.
struct DialWork {
  std::uint64_t read_requests = 0;
  std::uint64_t read_granules = 0;
  std::uint64_t write_requests = 0;
  std::uint64_t written_granules = 0;
  std::uint64_t stream_read_bytes = 0;
  std::uint64_t stream_written_bytes = 0;
  std::uint64_t syncs = 0;
};

class Dial {
 public:
  using Clock = std::chrono::steady_clock;

  // Throws config where a figure is none that a medium can have.
  explicit Dial(const DialSpec& spec);
  Dial(const Dial&) = delete;
  Dial& operator=(const Dial&) = delete;

  const DialSpec& spec() const { return spec_; }

  void add_reads(DialWork& work, std::uint64_t count, std::size_t bytes_each) const;
  void add_writes(DialWork& work, std::uint64_t count, std::size_t bytes_each) const;

  // Of a batch's rows, which were read and take so many bytes, the part that the cache has no room for.
  double uncached(std::uint64_t bytes) const;

  // How long the declared medium takes for the work alone. Reads and writes take turns, but for those of a duplex one; of
  // requests the bandwidth or the latencies of those outstanding decide, whichever takes longer.
  double seconds(const DialWork& work) const;

  // Since the dial was made.
  struct Counts {
    DialWork work;
    double declared_s;
    double waited_s;  // by threads, of which several may wait at a time
    double late_s;  // that real work took longer than its share of the declared medium would have
  };
  Counts counts() const;

 private:
  friend class DialService;
  using Seconds = std::chrono::duration<double>;

  // What pieces of work share. There are two where reads and writes each have their own, else the first is the medium.
  // Every piece under way is served at the same rate: of each as many seconds as `served` grows by.
  struct Way {
    double served = 0;
    std::multiset<double> targets;  // of what is under way: `served` at its end

    void advance(double passed_s);
    // How long until `served` is at the target, if nothing else comes.
    double seconds_until(double target) const;
  };
  static constexpr std::size_t num_ways = 2;
  using OfWays = std::array<double, num_ways>;

  struct Admission {
    OfWays targets;  // of `served`: done there
    double least_s;  // one request's latency
    double declared_s;
    Clock::time_point began;
  };
  Admission admit(const DialWork& work);
  void calibrate();
  void await(const Admission& admission);
  OfWays seconds_of_ways(const DialWork& work) const;
  // Brings the sharing up to `now`. The caller holds mutex_.
  void advance(Clock::time_point now);
  bool is_served(const OfWays& targets) const;
  // When it will be, if nothing else comes. The caller holds mutex_.
  Clock::time_point when_served(const OfWays& targets) const;

  const DialSpec spec_;
  double own_s_ = 0;  // that asking and awaiting take by themselves, which counts as served
  mutable std::mutex mutex_;  // guards what follows
  std::array<Way, num_ways> ways_;
  Clock::time_point as_of_ = Clock::now();
  DialWork work_{};
  double declared_s_ = 0;
  double waited_s_ = 0;
  double late_s_ = 0;
};

// A piece of work on a dialled medium: asked for when this is made, before the real work begins.
class DialService {
 public:
  // dial: null where the medium is as it is; then this does nothing.
  DialService(Dial* dial, const DialWork& work) : dial_(dial) {
    if (dial_ != nullptr) admission_ = dial_->admit(work);
  }
  // The real work is done: returns when the declared medium would have had it done as well.
  void finish() {
    if (dial_ != nullptr) dial_->await(admission_);
  }

 private:
  Dial* dial_;
  Dial::Admission admission_{};
};

}  // namespace holdfast

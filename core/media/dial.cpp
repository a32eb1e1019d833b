#include "media/dial.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <string>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/error.h"

namespace holdfast {
namespace {

// What the system may be late by when it wakes a thread up; the rest is spun.
constexpr std::chrono::microseconds wake_up_margin{100};

void wait_until(Dial::Clock::time_point end) {
  const auto left = end - Dial::Clock::now();
  if (left > 2 * wake_up_margin) {
    const auto sleep = std::chrono::duration_cast<std::chrono::nanoseconds>(left - wake_up_margin).count();
    timespec time{static_cast<time_t>(sleep / 1'000'000'000), static_cast<long>(sleep % 1'000'000'000)};
    while (::clock_nanosleep(CLOCK_MONOTONIC, 0, &time, &time) == EINTR) {
    }
  }
  while (Dial::Clock::now() < end) {
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
}

void require(bool holds, const char* name, double value) {
  if (!holds) throw Error(ErrorKind::config, std::string("dial: ") + name + " = " + std::to_string(value));
}

std::uint64_t granules(std::size_t bytes, std::uint64_t granularity) { return (bytes + granularity - 1) / granularity; }

}  // namespace

Dial::Dial(const DialSpec& spec) : spec_(spec) {
  const auto positive = [](const char* name, double value) { require(std::isfinite(value) && value > 0, name, value); };
  const auto not_negative = [](const char* name, double value) {
    require(std::isfinite(value) && value >= 0, name, value);
  };
  positive("read_bytes_per_s", spec.read_bytes_per_s);
  positive("write_bytes_per_s", spec.write_bytes_per_s);
  positive("stream_write_bytes_per_s", spec.stream_write_bytes_per_s);
  positive("outstanding_requests", spec.outstanding_requests);
  positive("granularity_bytes", static_cast<double>(spec.granularity_bytes));
  not_negative("read_latency_s", spec.read_latency_s);
  not_negative("write_latency_s", spec.write_latency_s);
  not_negative("sync_latency_s", spec.sync_latency_s);
  require(spec.cache_bytes >= 0, "cache_bytes", spec.cache_bytes);  // without end, too
  calibrate();
}

// By how much a piece of work of a known length is late, in the median: so that a single read of some hundred
// nanoseconds takes as long as is declared.
void Dial::calibrate() {
  constexpr double known_s = 2e-6;
  std::array<double, 101> late{};
  for (double& each : late) {
    const auto began = Clock::now();
    await({{ways_[0].served, ways_[1].served}, known_s, known_s, Clock::now()});
    each = Seconds(Clock::now() - began).count() - known_s;
  }
  std::ranges::nth_element(late, late.begin() + late.size() / 2);
  own_s_ = std::max(0.0, late[late.size() / 2]);
  waited_s_ = late_s_ = 0;
}

void Dial::add_reads(DialWork& work, std::uint64_t count, std::size_t bytes_each) const {
  if (bytes_each == 0) return;
  work.read_requests += count;
  work.read_granules += count * granules(bytes_each, spec_.granularity_bytes);
}

void Dial::add_writes(DialWork& work, std::uint64_t count, std::size_t bytes_each) const {
  if (bytes_each == 0) return;
  work.write_requests += count;
  work.written_granules += count * granules(bytes_each, spec_.granularity_bytes);
}

double Dial::uncached(std::uint64_t bytes) const {
  return bytes == 0 ? 0.0 : std::max(0.0, 1.0 - spec_.cache_bytes / static_cast<double>(bytes));
}

double Dial::seconds(const DialWork& work) const {
  const auto [first, second] = seconds_of_ways(work);
  return std::max(first, second);
}

Dial::OfWays Dial::seconds_of_ways(const DialWork& work) const {
  const auto of_requests = [this](std::uint64_t requests, std::uint64_t moved, double bytes_per_s, double latency_s) {
    const double streaming = static_cast<double>(moved * spec_.granularity_bytes) / bytes_per_s;
    return std::max(streaming, static_cast<double>(requests) * latency_s / spec_.outstanding_requests);
  };
  const double reading =
      of_requests(work.read_requests, work.read_granules, spec_.read_bytes_per_s, spec_.read_latency_s) +
      static_cast<double>(work.stream_read_bytes) / spec_.read_bytes_per_s;
  const double writing =
      of_requests(work.write_requests, work.written_granules, spec_.write_bytes_per_s, spec_.write_latency_s) +
      static_cast<double>(work.stream_written_bytes) / spec_.stream_write_bytes_per_s +
      static_cast<double>(work.syncs) * spec_.sync_latency_s;
  if (spec_.duplex) return {reading, writing};
  return {reading + writing, 0.0};
}

Dial::Counts Dial::counts() const {
  const std::lock_guard lock(mutex_);
  return {work_, declared_s_, waited_s_, late_s_};
}

void Dial::Way::advance(double passed_s) {
  while (!targets.empty()) {
    const auto sharers = static_cast<double>(targets.size());
    const double needed = (*targets.begin() - served) * sharers;
    if (needed > passed_s) {
      served += passed_s / sharers;
      return;
    }
    passed_s -= needed;
    served = *targets.begin();
    targets.erase(targets.begin());
  }
}

double Dial::Way::seconds_until(double target) const {
  double at = served;
  double left = 0;
  auto sharers = static_cast<double>(targets.size());
  for (auto next = targets.begin(); next != targets.end() && at < target; ++next, --sharers) {
    left += (*next - at) * sharers;
    at = *next;
  }
  return left;
}

void Dial::advance(Clock::time_point now) {
  const double passed = Seconds(now - as_of_).count();
  as_of_ = now;
  for (Way& way : ways_) way.advance(passed);
}

bool Dial::is_served(const OfWays& targets) const {
  return ways_[0].served >= targets[0] && ways_[1].served >= targets[1];
}

Dial::Clock::time_point Dial::when_served(const OfWays& targets) const {
  const double left = std::max(ways_[0].seconds_until(targets[0]), ways_[1].seconds_until(targets[1]));
  return as_of_ + std::chrono::ceil<Clock::duration>(Seconds(left));
}

Dial::Admission Dial::admit(const DialWork& work) {
  const OfWays of_ways = seconds_of_ways(work);
  const double declared = seconds(work);
  const double least = std::max(work.read_requests + work.stream_read_bytes != 0 ? spec_.read_latency_s : 0.0,
                                work.write_requests + work.stream_written_bytes != 0 ? spec_.write_latency_s : 0.0);
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  advance(now);
  work_.read_requests += work.read_requests;
  work_.read_granules += work.read_granules;
  work_.write_requests += work.write_requests;
  work_.written_granules += work.written_granules;
  work_.stream_read_bytes += work.stream_read_bytes;
  work_.stream_written_bytes += work.stream_written_bytes;
  work_.syncs += work.syncs;
  declared_s_ += declared;
  OfWays targets{};
  for (std::size_t i = 0; i < num_ways; ++i) {
    targets[i] = ways_[i].served + of_ways[i];
    if (of_ways[i] > 0) ways_[i].targets.insert(targets[i]);
  }
  return {targets, least, declared, now};
}

void Dial::await(const Admission& admission) {
  const double least_s = std::max(0.0, admission.least_s - own_s_);
  const auto least_end = admission.began + std::chrono::ceil<Clock::duration>(Seconds(least_s));
  const auto arrived = Clock::now();
  std::unique_lock lock(mutex_);
  advance(arrived);
  if (is_served(admission.targets) && arrived >= least_end) {
    late_s_ += std::max(0.0, Seconds(arrived - admission.began).count() - admission.declared_s);
    return;
  }
  // Others may come while this one waits, and take their share.
  for (auto now = arrived; !is_served(admission.targets) || now < least_end;) {
    const auto end = std::max(when_served(admission.targets), least_end);
    lock.unlock();
    wait_until(end);
    lock.lock();
    now = Clock::now();
    advance(now);
  }
  waited_s_ += Seconds(as_of_ - arrived).count();
}

}  // namespace holdfast

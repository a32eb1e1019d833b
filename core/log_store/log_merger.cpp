#include "log_store/log_merger.h"

#include <algorithm>

#include "base/error.h"
#include "base/native_thread.h"

namespace holdfast {
namespace {

// Of the log, what is in use when a merge begins: never less, never more.
constexpr double earliest = 0.5;
constexpr double latest = 0.7;
constexpr double share_of_work = 0.5;  // of a merge's time, so that it ends before the log is full
constexpr double full = 0.95;  // of the log, by when a merge has ended
// No rest is longer, whatever is wanted: a part also takes the time for which the whole process was stopped in it.
constexpr std::chrono::milliseconds longest_rest{200};

}  // namespace

LogMerger::LogMerger(LogStore& store, StageSpans& spans)
    : store_(store), spans_(spans), thread_(start_thread("hf-merge", [this] { run(); })) {}

LogMerger::~LogMerger() { stop(); }

void LogMerger::allow(std::uint64_t step) {
  {
    const std::lock_guard lock(mutex_);
    if (step <= limit_step_) return;
    limit_step_ = step;
    found_nothing_ = false;
  }
  turned_.notify_all();
}

std::uint64_t LogMerger::limit_step() const {
  const std::lock_guard lock(mutex_);
  return limit_step_;
}

// Not while the thread is between a look at the log and its sleep.
void LogMerger::wake() {
  {
    const std::lock_guard lock(mutex_);
  }
  turned_.notify_all();
}

bool LogMerger::make_room() {
  std::unique_lock lock(mutex_);
  const std::uint64_t before = num_merges_;
  is_urgent_ = true;
  found_nothing_ = false;
  turned_.notify_all();
  turned_.wait(lock, [&] { return num_merges_ != before || found_nothing_ || failure_ || stopping_; });
  is_urgent_ = false;
  if (num_merges_ != before) return true;
  if (failure_) std::rethrow_exception(failure_);
  return false;
}

Merging LogMerger::merging() const {
  const std::lock_guard lock(mutex_);
  if (stopping_) return is_merging_ ? Merging::given_up : Merging::none;
  if (is_urgent_) return Merging::awaited;
  return is_merging_ || (!is_broken_ && wants_to_merge()) ? Merging::wanted : Merging::none;
}

// Of the log, what may be in use when a merge begins that is to end before the log is full.
double LogMerger::share_to_begin_at() const { return 1 / (1 + appended_per_merged_ / share_of_work); }

std::uint64_t LogMerger::bytes_to_begin_at() const {
  const double share = std::clamp(share_to_begin_at(), earliest, latest);
  return static_cast<std::uint64_t>(share * static_cast<double>(store_.ring_bytes()));
}

bool LogMerger::wants_to_merge() const {
  return !found_nothing_ && (is_urgent_ || store_.used_bytes() > bytes_to_begin_at());
}

bool LogMerger::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_;
}

bool LogMerger::is_in_a_hurry(double progress) const {
  const auto begun = static_cast<double>(used_when_begun_);
  const double end = std::max(full * static_cast<double>(store_.ring_bytes()), begun);
  return is_urgent_ || stopping_ || static_cast<double>(store_.used_bytes()) > begun + progress * (end - begun);
}

void LogMerger::end_part() { spans_.add({Stage::merge, part_began_, StageSpans::Clock::now()}); }

bool LogMerger::rest(std::chrono::nanoseconds wanted, double progress) {
  end_part();
  std::unique_lock lock(mutex_);
  const std::uint64_t used = store_.used_bytes();
  const bool hurries = turned_.wait_for(lock, std::min<std::chrono::nanoseconds>(wanted, longest_rest),
                                        [&] { return is_in_a_hurry(progress); });
  appended_in_rests_ += store_.used_bytes() - used;
  part_began_ = StageSpans::Clock::now();
  return hurries || !has_time_to_spare_;
}

void LogMerger::learn(std::uint64_t merged) {
  const auto appended =
      static_cast<double>(store_.used_bytes() + merged) - static_cast<double>(used_when_begun_ + appended_in_rests_);
  const double now = std::max(0.0, appended / static_cast<double>(merged));
  // Whoever waited for room would have appended more. To begin too late stalls training, too early costs a few
  // requests: so a slow merge is believed at once, a fast one by and by.
  constexpr double doubt = 0.75;
  appended_per_merged_ = is_urgent_ ? std::max(appended_per_merged_, 2 * now)
                                    : std::max(now, doubt * appended_per_merged_ + (1 - doubt) * now);
}

void LogMerger::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    turned_.wait(lock, [this] { return stopping_ || (!is_broken_ && wants_to_merge()); });
    if (stopping_) return;
    const std::uint64_t limit = limit_step_;
    used_when_begun_ = store_.used_bytes();
    appended_in_rests_ = 0;
    has_time_to_spare_ = share_to_begin_at() > latest;
    is_merging_ = true;
    lock.unlock();
    part_began_ = StageSpans::Clock::now();
    std::uint64_t merged = 0;
    std::exception_ptr failure;
    bool is_broken = false;
    try {
      merged = store_.merge([this] { return limit_step(); },
                            [this](std::chrono::nanoseconds wanted, double progress) { return rest(wanted, progress); },
                            [this] { return is_stopping(); });
    } catch (const Error& error) {
      failure = std::current_exception();
      is_broken = error.kind() != ErrorKind::full;
    } catch (...) {
      failure = std::current_exception();
      is_broken = true;
    }
    end_part();
    lock.lock();
    is_merging_ = false;
    failure_ = failure;
    is_broken_ = is_broken;
    if (merged != 0) {
      ++num_merges_;
      learn(merged);
    }
    if (merged == 0 && limit == limit_step_) found_nothing_ = true;
    turned_.notify_all();
  }
}

void LogMerger::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  turned_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace holdfast

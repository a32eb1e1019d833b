#include "log_store/log_merger.h"

#include <algorithm>

#include "base/error.h"
#include "base/native_thread.h"

namespace holdfast {
namespace {

// Of the log, what is in use when a merge begins: never less, never more.
constexpr double earliest = 0.4;
constexpr double latest = 0.7;
constexpr double least_in_use = 1 << 30;  // bytes of the log, of which that is a share, if it has as many
// Bytes of the log that a merge gets done in a second: a guess, where none has been made.
constexpr double guessed_merge_rate = 500e6;
constexpr std::chrono::duration<double> guesses_after{0.5};
constexpr double share_of_work = 0.5;  // of a merge's time, so that it ends before the log is full
// Where records wait for merges, the log comes to be so full when one ends, less two records; and never fuller than `full`.
constexpr double mark = 0.9;
constexpr double full = 0.97;
constexpr double spare_records = 2;
// Of the way from where the log is to where it would be, how much a merge lets it go.
constexpr double approach = 0.25;
// Where the log may not grow by so many records, they are too coarse to be held up one by one.
constexpr double least_records = 4;
// The merge hurries before anybody waits.
constexpr double share_before_waiting = 0.75;
constexpr std::uint64_t portions = 16;  // of the log
constexpr std::uint64_t least_portion = std::uint64_t{8} << 20;
// Rows beside each in its block, in a merge of the whole log, with which there is little gain in its size.
constexpr double most_crowding = 0.75;
constexpr double least_rows = 256;  // that were home before, of a merge that says how they lie
// No rest is longer, whatever is wanted: a part also takes the time for which the whole process was stopped in it.
constexpr std::chrono::milliseconds longest_rest{200};

}  // namespace

LogMerger::LogMerger(LogStore& store, StageSpans& spans)
    : store_(store),
      spans_(spans),
      // As if rows were drawn at random; how it is, merges tell.
      crowding_(store.rows_per_home_block() / format::block_bytes / store.num_home_blocks()),
      thread_(start_thread("hf-merge", [this] { run(); })) {}

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

bool LogMerger::must_wait(std::uint64_t bytes) const {
  if (!is_merging_ || lets_through_ || stopping_ || is_urgent_) return false;
  if (allowed_growth_ < least_records * static_cast<double>(bytes)) return false;
  const double line = static_cast<double>(used_when_begun_) + progress_ * allowed_growth_;
  return static_cast<double>(store_.used_bytes() + bytes) > line;
}

bool LogMerger::wait_for_turn(std::uint64_t bytes) {
  std::unique_lock lock(mutex_);
  largest_record_bytes_ = std::max(largest_record_bytes_, bytes);
  if (num_merges_ == 0) guess_pace(bytes);
  if (!must_wait(bytes)) return false;
  ++num_waiting_;
  turned_.notify_all();
  turned_.wait(lock, [&] { return !must_wait(bytes); });
  --num_waiting_;
  return true;
}

// Before the first merge has said how it gets on: from how fast the log fills.
void LogMerger::guess_pace(std::uint64_t bytes) {
  const auto now = StageSpans::Clock::now();
  if (appended_ == 0) first_append_ = now;
  const std::chrono::duration<double> took = now - first_append_;
  const auto appended = static_cast<double>(appended_);
  appended_ += bytes;
  if (took < guesses_after) return;
  appended_per_merged_ = std::max(appended_per_merged_, appended / took.count() / guessed_merge_rate);
}

void LogMerger::let_through() {
  {
    const std::lock_guard lock(mutex_);
    lets_through_ = true;
  }
  turned_.notify_all();
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
  if (is_urgent_ || num_waiting_ != 0) return Merging::awaited;
  return is_merging_ || (!is_broken_ && wants_to_merge()) ? Merging::wanted : Merging::none;
}

// Of the log, what may be in use when a merge begins that is to end before the log is full.
double LogMerger::share_to_begin_at() const { return 1 / (1 + appended_per_merged_ / share_of_work); }

// A log that is larger than home is for merges that cannot keep up with what is appended: each costs home, so it is to take
// as much as there can be. Others have nothing to gain from more than that, and whoever opens the pool reads it all.
std::uint64_t LogMerger::bytes_to_begin_at() const {
  const double share = share_to_begin_at();
  auto bytes = static_cast<double>(store_.ring_bytes());
  if (share > earliest) bytes = std::min(bytes, std::max(least_in_use, store_.num_home_blocks() * format::block_bytes));
  return static_cast<std::uint64_t>(std::clamp(share, earliest, latest) * bytes);
}

bool LogMerger::wants_to_merge() const {
  return !found_nothing_ && (is_urgent_ || store_.used_bytes() > bytes_to_begin_at());
}

bool LogMerger::is_stopping() const {
  const std::lock_guard lock(mutex_);
  return stopping_ || paused_;
}

bool LogMerger::is_in_a_hurry(double progress) const {
  if (is_urgent_ || stopping_ || paused_ || num_waiting_ != 0) return true;
  const double line = static_cast<double>(used_when_begun_) + progress * share_before_waiting * allowed_growth_;
  return static_cast<double>(store_.used_bytes()) > line;
}

// Of the log, that the next merge takes at most.
std::uint64_t LogMerger::portion_bytes() const {
  const std::uint64_t ring = store_.ring_bytes();
  const bool gains_by_size = crowding_ * static_cast<double>(ring) > most_crowding;
  return gains_by_size ? ring : std::max(ring / portions, least_portion);
}

// By how much the log may grow until a merge that begins now and takes so much of it is done: by as much, so that it is
// as full then as now, and some of what is left to the mark, so that it comes there by and by.
double LogMerger::growth_beside(double takes) const {
  const auto ring = static_cast<double>(store_.ring_bytes());
  const auto used = static_cast<double>(store_.used_bytes());
  const double spare = spare_records * static_cast<double>(largest_record_bytes_);
  const double growth = takes + approach * (mark * ring - spare - takes - used);
  return std::clamp(growth, 0.0, std::max(0.0, full * ring - spare - used));
}

void LogMerger::begin_merge(std::uint64_t most_bytes) {
  used_when_begun_ = store_.used_bytes();
  allowed_growth_ = growth_beside(static_cast<double>(std::min(most_bytes, used_when_begun_)));
  appended_in_rests_ = 0;
  progress_ = 0;
  has_time_to_spare_ = share_to_begin_at() > latest;
  is_merging_ = true;
}

void LogMerger::end_part() { spans_.add({Stage::merge, part_began_, StageSpans::Clock::now()}); }

bool LogMerger::rest(std::chrono::nanoseconds wanted, double progress) {
  end_part();
  std::unique_lock lock(mutex_);
  progress_ = std::max(progress_, progress);
  if (num_waiting_ != 0) turned_.notify_all();
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
  // requests: so a slow merge is believed at once, a fast one by and by, but for the first, before which nothing is known.
  const double doubt = num_merges_ == 1 ? 0 : 0.75;
  appended_per_merged_ = is_urgent_ ? std::max(appended_per_merged_, 2 * now)
                                    : std::max(now, doubt * appended_per_merged_ + (1 - doubt) * now);
}

// A merge of a part of the log is thinner than one of all of it. Rows that it was the first to write lie together however
// many there were: they say nothing.
void LogMerger::learn_crowding(std::uint64_t merged, const LogStoreCounters& before) {
  const LogStoreCounters now = store_.counters();
  const std::uint64_t placed = now.placed_rows - before.placed_rows;
  const std::uint64_t placed_bytes = now.placed_bytes - before.placed_bytes;
  const auto rows = static_cast<double>(now.merged_rows - before.merged_rows - placed);
  const auto bytes = static_cast<double>(now.home_bytes_written - before.home_bytes_written);
  const double blocks = (bytes - static_cast<double>(placed_bytes)) / format::block_bytes;
  if (rows < least_rows || blocks < 1) return;
  // Of rows that are strewn at random a block gets as many more than one as half of what it gets on average.
  const double more = std::max(0.0, rows / blocks - 1);
  crowding_ = (more + std::min(more, 1.0)) / static_cast<double>(merged);
}

void LogMerger::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    turned_.wait(lock, [this] { return stopping_ || (!paused_ && !is_broken_ && wants_to_merge()); });
    if (stopping_) return;
    const std::uint64_t limit = limit_step_;
    const std::uint64_t most_bytes = portion_bytes();
    const LogStoreCounters before = store_.counters();
    begin_merge(most_bytes);
    lock.unlock();
    part_began_ = StageSpans::Clock::now();
    std::uint64_t merged = 0;
    std::exception_ptr failure;
    bool is_broken = false;
    try {
      merged = store_.merge([this] { return limit_step(); },
                            [this](std::chrono::nanoseconds wanted, double progress) { return rest(wanted, progress); },
                            [this] { return is_stopping(); }, most_bytes);
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
      learn_crowding(merged, before);
    }
    if (merged == 0 && limit == limit_step_) found_nothing_ = true;
    turned_.notify_all();
  }
}

void LogMerger::pause() {
  std::unique_lock lock(mutex_);
  paused_ = true;
  turned_.notify_all();
  turned_.wait(lock, [this] { return !is_merging_; });
}

void LogMerger::resume() {
  {
    const std::lock_guard lock(mutex_);
    paused_ = false;
  }
  turned_.notify_all();
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

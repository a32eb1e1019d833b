// Log merger: the thread that folds the row log into home, so that the log always has room.
//
// Invariants
// - It merges no step after the limit that it was told last: recovery may have to go back to that one.
// - It begins as late as it may, between four and seven tenths of the log (of as much of it as home has, where that is
//   less and merges keep up), and takes all that may be merged: the longer
//   a version waits, the more often a newer one of the same row, or of a row in the same block, comes along and is
//   written with it. How much is appended meanwhile, it learns from the merges before.
// - Where merges cannot keep up with what is appended, every record waits a little, none for long: beside a merge the
//   log fills no faster than the merge gets on, up to a mark that leaves room for some records more. Where that is all
//   of the time, the log stays near the mark.
// - Where rows that are merged together share few blocks of home, there is nothing to gain from many of them: merges take
//   a sixteenth of the log then, its oldest part, so that room appears early and little is undone that is given up.
// - It leaves most of the disk's time to fetches, unless that would make somebody wait for room: a merge gets on at
//   least as fast as the room that was left when it began is taken. Where it could have begun later, it takes short
//   parts, for the sake of commits.
// - Who stops it waits for a part of a merge at most, never for the rest of one: what need not be merged stays in the log.
// - After a failed merge nothing is merged any more, and make_room throws the failure. Where the medium was only full,
//   it is tried again when more is allowed.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>

#include "base/stage_spans.h"
#include "log_store/log_store.h"
#include "step/row_backend.h"

namespace holdfast {

class LogMerger {
 public:
  LogMerger(LogStore& store, StageSpans& spans);
  ~LogMerger();
  LogMerger(const LogMerger&) = delete;
  LogMerger& operator=(const LogMerger&) = delete;

  // Steps up to `step` may be merged.
  void allow(std::uint64_t step);
  // The log has grown: looks whether there is something to do.
  void wake();
  // Before a record of so many bytes is appended: returns when it is its turn, and whether that took any time.
  bool wait_for_turn(std::uint64_t bytes);
  // From now on it is always its turn.
  void let_through();
  // Returns when something was merged since the call; false where nothing can be, until more is allowed. Throws what a
  // merge threw.
  bool make_room();
  // Where there is none, none begins before more is appended, or allowed.
  Merging merging() const;
  // Nothing is merged when this returns, and nothing will be until resume; a merge that is at work is given up.
  void pause();
  void resume();
  // Ends the thread; a merge that is at work is given up.
  void stop();

 private:
  void run();
  std::uint64_t limit_step() const;
  double share_to_begin_at() const;
  std::uint64_t bytes_to_begin_at() const;
  bool wants_to_merge() const;
  bool is_in_a_hurry(double progress) const;
  bool is_stopping() const;
  bool rest(std::chrono::nanoseconds wanted, double progress);
  bool must_wait(std::uint64_t bytes) const;
  void guess_pace(std::uint64_t bytes);
  std::uint64_t portion_bytes() const;
  double growth_beside(double takes) const;
  void begin_merge(std::uint64_t most_bytes);
  void end_part();
  void learn(std::uint64_t merged);
  void learn_crowding(std::uint64_t merged, const LogStoreCounters& before);

  LogStore& store_;
  StageSpans& spans_;
  StageSpans::Clock::time_point part_began_;  // of the merge in progress; its thread's alone
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable turned_;
  std::uint64_t limit_step_ = 0;
  std::uint64_t num_merges_ = 0;
  // Bytes appended in the time that merging a byte takes. To begin with, a guess that is rather too high: where the first
  // merge begins too late, every step until its end waits.
  double appended_per_merged_ = 0.75;
  double crowding_;  // how many more rows of a block of home a merge writes with one, for each byte of the log
  std::uint64_t appended_ = 0;  // bytes, before the first merge is done
  StageSpans::Clock::time_point first_append_;
  std::uint64_t used_when_begun_ = 0;  // bytes of the log, when the merge in progress began
  double allowed_growth_ = 0;  // of the log, in bytes, until that merge's end
  double progress_ = 0;  // of that merge
  std::uint64_t appended_in_rests_ = 0;  // bytes, of that merge
  bool has_time_to_spare_ = false;  // that merge: it could have begun later
  bool is_merging_ = false;
  bool is_urgent_ = false;  // somebody waits for room
  std::uint64_t largest_record_bytes_ = 0;
  std::uint32_t num_waiting_ = 0;  // records, for their turn
  bool lets_through_ = false;
  bool found_nothing_ = false;  // in the last turn, with this limit
  bool paused_ = false;
  bool stopping_ = false;
  std::exception_ptr failure_;  // of the last merge
  bool is_broken_ = false;  // and it was not for want of space
  std::thread thread_;
};

}  // namespace holdfast

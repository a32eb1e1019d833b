// Row log follower: a row log's new versions, read while a writer goes on.
//
// Invariants
// - It begins at the log's tail. So a row's newest version of a step up to the fixed one is among those taken, or was
//   home when this began.
// - Records are taken along the chain alone, whole.
// - Nothing is missed unnoticed: taking ends with the record of the fixed step, or overtaken is thrown.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "log_store/log_store.h"
#include "rows/row_versions.h"

namespace holdfast {

class RowLogFollower {
 public:
  // The store is not writable, and was scanned.
  explicit RowLogFollower(LogStore& store);

  // Takes what was appended since. The fixed step will not be below `floor`.
  void follow(std::uint64_t floor);
  // Takes the records of steps up to `step`, and forgets those behind. Throws overtaken.
  void fix(std::uint64_t step);
  // Takes all that was appended before the call and returns the newest. Throws overtaken.
  StepMark catch_up();
  // Takes what was appended since; the newest step of it.
  std::uint64_t newest_step();

  // After fix: the newest record of a step up to the fixed one, whether or not it is in the log.
  RowLog::Link fixed_record() const { return kept_; }
  // Whether the log went on from this record when this began: homes had no version that is newer, and the log all of
  // those.
  bool goes_on_from(const RowLog::Link& record) const;

  // The newest of each row, of steps up to the fixed one.
  RowVersions& versions() { return versions_; }

 private:
  bool advance();
  void keep_up_to(std::uint64_t step);

  LogStore& store_;
  std::deque<FollowedRecord> pending_;
  StepMark newest_;
  std::vector<RowLog::Link> begun_;  // the record before the log's first one when this began, and the log's
  RowLog::Link kept_;  // the newest that was taken
  RowVersions versions_;
};

}  // namespace holdfast

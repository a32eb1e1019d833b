// Live copy: the rows of a pool at the end of one step, and its dense state, while a writer goes on.
//
// Rows are copied as they are at that instant, each at another; beside that a thread follows the pool's log. What it
// found makes the copies right: laid over them, it gives the rows of the step (docs/MOVING.md has the argument).
//
// The order of calls is the store's (fixes_first): in place, fix, then every row, then settle; over a log store, every
// row, then fix, then settle.
//
// Invariants
// - Nothing is written and no lock is taken; the writer does not know.
// - The step is that of the newest dense state when fix was called (of the newest rows, in a pool that has none). A part
//   of a pool of several writers has no dense states: whoever copies all of them decides (fix_at), on a step that each
//   of them has committed, and of which none has merged a later one home.
// - After settle the copies and the corrections together are exact; or overtaken was thrown, and the copy begins anew.
// - Calls come from one thread.
#pragma once

#include <array>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/step_mark.h"
#include "commit/dense_copy.h"
#include "layout/superblock.h"
#include "media/medium.h"
#include "rows/row_table.h"
#include "rows/row_values.h"
#include "rows/row_versions.h"

namespace holdfast {

class LiveCopy {
 public:
  // Begins to follow. part: of a pool of several writers, which is not copied alone. Throws untrusted for a pool whose
  // rows mean nothing since the machine went down, format_mismatch where it is a part, or none, against what is said.
  explicit LiveCopy(const std::string& directory, bool part = false);
  ~LiveCopy();
  LiveCopy(const LiveCopy&) = delete;
  LiveCopy& operator=(const LiveCopy&) = delete;

  const format::PoolHeader& header() const { return superblock_->header(); }
  format::Level level() const { return medium_->level(); }
  const std::vector<format::TableRecord>& table_records() const { return superblock_->tables(); }
  const std::vector<RowTable>& tables() const { return tables_; }
  bool fixes_first() const;
  // Whether copy_rows gives a table's rows in order of their numbers.
  bool rows_ascend() const;
  // As the slots are now; nothing where they hold none.
  std::optional<std::uint64_t> newest_dense_step() const;

  struct Fixed {
    StepMark mark;
    std::optional<DenseCopy> dense;
  };
  // Decides on the step. Throws overtaken.
  Fixed fix();

  // Of a part: the newest step that is committed; says that the step is not going to be below `floor`; decides on it.
  std::uint64_t newest_step();
  void raise_floor(std::uint64_t floor);
  void fix_at(std::uint64_t step);

  // By table, how many rows homes had when this began; nothing where that is not known.
  std::optional<std::vector<std::uint64_t>> home_rows() const;
  // Names the newest record of a step up to the fixed one: position and checksum. After fix; nothing where rows lie in
  // place, or nothing was ever logged.
  using RecordName = std::pair<std::uint64_t, std::uint32_t>;
  std::optional<RecordName> fixed_record() const;
  // Whether everything that was written since that record was in the log when this began: then corrections have all of
  // it, and no row need be copied.
  bool log_goes_on_from(const RecordName& record) const;

  // Copies rows that an update ever wrote, from place `first` on in the order in which they lie in the pool, `count` at
  // most; moves `first` behind what was looked at (to the table's end, where that is all). Places begin with 0. Returns
  // how many rows that were.
  std::size_t copy_rows(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count);

  // Ends following. Throws overtaken; corrupted where a row does not hold.
  void settle();
  // After settle: rows that copy_rows may not have given as they were, likewise.
  std::size_t corrections(std::uint32_t table, std::uint64_t& first, const RowValues& out, std::size_t count);

 private:
  class Source;
  class InPlaceSource;
  class LogSource;

  void run();
  void stop();
  void check();
  void refuse_another_life() const;
  template <class Work>
  auto in_one_life(const Work& work) const;

  std::unique_ptr<Medium> medium_;
  std::unique_ptr<Superblock> superblock_;
  std::vector<RowTable> tables_;
  std::array<std::unique_ptr<File>, 2> dense_;
  std::uint64_t epoch_;

  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<Source> source_;
  std::condition_variable stopped_;
  bool fixing_ = false;  // the step may be older than the newest dense state, from now on
  std::optional<std::uint64_t> floor_;  // of a part
  bool stopping_ = false;
  std::exception_ptr failure_;
  std::thread thread_;
};

}  // namespace holdfast

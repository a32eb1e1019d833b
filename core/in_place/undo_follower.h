// Undo follower: the way back of rows in place, read while a writer goes on.
//
// It follows the undo log and keeps every record that it may need, until it is told which step to go back to; from then
// on it keeps the first before-image of each row that a later step overwrites.
//
// Invariants
// - A record is sealed before a row of it is overwritten. So whoever reads a row and then catches up has the
//   before-image of every change that it may have seen.
// - Records are taken along the chain alone, whole, from copies that hold their checksums.
// - A record that the writer took back (a forward pass whose result was thrown away) has changed no row: its
//   before-images are the rows as they were before its step, and do no harm.
// - Nothing is missed unnoticed: the commit record names the newest record of a committed step, and space is used again
//   only after the commit of its step. Where that record is not among those taken, overtaken is thrown.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "in_place/in_place_store.h"
#include "in_place/undo_log.h"
#include "layout/superblock.h"
#include "rows/row_versions.h"

namespace holdfast {

class UndoFollower {
 public:
  UndoFollower(Medium& medium, const Superblock& superblock, const InPlaceStore& store);

  // The end of the newest step that was committed when this began.
  const format::CommitRecord& begin() const { return begin_; }
  // Takes what was sealed since. It will not be asked to go back below `floor`.
  void follow(std::uint64_t floor);
  // It is this step that rows go back to. Throws overtaken where the writer gave up what that takes.
  void fix(std::uint64_t step);
  // Takes everything that was sealed before the call. Throws overtaken.
  void catch_up();

  // Of rows that steps after the fixed one overwrote: as they were at its end.
  RowVersions& versions() { return versions_; }

 private:
  struct Point {
    UndoLog::Link link;
    std::uint64_t end;  // where the next record is looked for
  };
  struct Taken {
    std::uint64_t step;
    std::vector<std::byte> bytes;
  };

  bool advance();
  std::optional<Taken> take_after(const Point& point) const;
  // A whole copy of the record at `position`, whose header is `expected`; nothing where it is gone.
  std::optional<Taken> take(std::uint64_t position, const format::RecordHeader& expected) const;
  void keep(const Taken& record);
  bool is_taken(const UndoLog::Link& link) const;
  void check_ring() const;

  const Superblock& superblock_;
  const InPlaceStore& store_;
  std::unique_ptr<File> ring_;
  UndoLog log_;
  format::CommitRecord begin_;
  std::vector<Point> chain_;  // what was taken, after where that began
  std::deque<Taken> pending_;  // while the step is not fixed
  std::optional<std::uint64_t> step_;
  RowVersions versions_;
};

}  // namespace holdfast

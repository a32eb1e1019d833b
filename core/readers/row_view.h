// Row view: the rows of a pool, seen without a lock and without changing them, whatever store keeps them.
//
// Invariants
// - Nothing is written, no file is opened for writing.
// - A writer may be at work. Then rows in place are as they are at that instant, each of them possibly in the middle of
//   an update; rows of a log store are whole, each as it was at some moment since the view was made.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/step_mark.h"
#include "commit/dense_slots.h"
#include "layout/superblock.h"
#include "media/medium.h"
#include "readers/repair.h"
#include "rows/row_table.h"
#include "step/collection.h"

namespace holdfast {

// What of the log recovery or readers need.
struct LogUse {
  std::uint64_t bytes;
  std::optional<std::uint64_t> merged_step;  // of a log store: home has the rows of this step at the latest
};

class RowView {
 public:
  explicit RowView(std::vector<RowTable> tables) : tables_(std::move(tables)) {}
  virtual ~RowView() = default;
  RowView(const RowView&) = delete;
  RowView& operator=(const RowView&) = delete;

  const std::vector<RowTable>& tables() const { return tables_; }
  // The newest step whose rows are all there.
  virtual StepMark newest() = 0;
  // Fills in rows [0, num_rows): weights and state, and the fresh bit of those that are untouched.
  virtual void read(std::uint32_t table, const WorkingRows& rows, std::size_t num_rows) = 0;
  // The plan's rows, one WorkingRows for each of its tables.
  virtual void read(const Plan& plan, const std::vector<WorkingRows>& rows) = 0;
  // The touched rows at or after `first`, ascending, `count` at most.
  virtual std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count) = 0;
  // Does every dense state count whose step is not after the newest commit record's?
  virtual bool commits_by_record() const = 0;
  virtual LogUse log_use() const = 0;
  // Everything that is wrong with what keeps the rows, and with the way back to the end of `step`.
  virtual std::vector<std::string> verify(std::uint64_t step) = 0;
  // Adds to the plan what may be put right of it. closed_step: where a pool that was closed cleanly says that it ended.
  virtual void plan_repair(std::optional<std::uint64_t> closed_step, RepairPlan& plan) = 0;

 private:
  std::vector<RowTable> tables_;
};

std::unique_ptr<RowView> open_row_view(const std::string& directory, Medium& medium, Superblock& superblock);

}  // namespace holdfast

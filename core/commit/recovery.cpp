#include "commit/recovery.h"

#include <string>

#include "base/error.h"
#include "layout/pool_files.h"

namespace holdfast {
namespace {

// A pool that was closed cleanly ends where it was closed: what is older, or not there, was lost.
void check_end(const Superblock& superblock, const StepMark& rows, const DenseSlots& dense) {
  const format::EpochRecord& closed = superblock.epoch();
  if (closed.clean == 0 || closed.has_steps == 0) return;
  const auto lost = [](const std::string& where, const char* what, std::uint64_t step) {
    throw Error(ErrorKind::corrupted,
                where + ": " + what + " step " + std::to_string(step) + ", where the pool was closed, is lost");
  };
  if (superblock.commit().step != closed.step)
    lost(superblock.place_of_older_commit(), "the commit record of", closed.step);
  if (rows.step != closed.step) lost("row-log-0000", "the record of", closed.step);
  if (dense.newest_step().value_or(format::no_position) != closed.dense_step) {
    lost(dense.place_of_idle(), "the dense state of", closed.dense_step);
  }
}

}  // namespace

std::optional<std::uint64_t> unfinished_return(const Superblock& superblock) {
  const bool in_place = superblock.header().store == static_cast<std::uint32_t>(format::Store::in_place);
  const format::EpochRecord& epoch = superblock.epoch();
  const format::CommitRecord& commit = superblock.commit();
  const bool returning = epoch.clean == 0 && epoch.has_steps != 0 && epoch.epoch > commit.epoch;
  if (!in_place || !returning || epoch.step >= commit.step) return std::nullopt;
  return epoch.step;
}

RecoveryPlan plan_recovery(const Superblock& superblock, const StepMark& rows, DenseSlots& dense, Recovery mode) {
  const bool clean = superblock.epoch().clean != 0;
  if (const auto broken = superblock.broken_records(); clean && !broken.empty()) {
    throw Error(ErrorKind::corrupted, broken.front());
  }
  dense.load(superblock.commit().epoch, rows.step, clean);
  check_end(superblock, rows, dense);
  const auto unfinished = unfinished_return(superblock);
  RecoveryPlan plan{rows, rows, dense.newest(unfinished.value_or(rows.step))};
  if (!plan.dense) {
    if (rows.step == 0) return plan;
    for (std::size_t i = 0; i < 2; ++i) {
      if (dense.reason(i) == "empty") continue;
      throw Error(ErrorKind::corrupted,
                  std::string(dense_names[i]) + ": " + dense.reason(i) + ", and the other slot holds no state either");
    }
    return plan;
  }
  const format::DenseHeader& header = plan.dense->header;
  if (mode == Recovery::exact || header.step == rows.step || unfinished) {
    plan.target = {header.step, header.cursor, header.row_updates};
  }
  return plan;
}

}  // namespace holdfast

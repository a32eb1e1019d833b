#include "recovery.h"

#include <string>

#include "error.h"
#include "pool_files.h"

namespace holdfast {

RecoveryPlan plan_recovery(const Superblock& superblock, const StepMark& rows, DenseSlots& dense, Recovery mode) {
  const bool clean = superblock.epoch().clean != 0;
  if (const auto broken = superblock.broken_records(); clean && !broken.empty()) {
    throw Error(ErrorKind::corrupted, broken.front());
  }
  dense.load(superblock.commit().epoch, rows.step, clean);
  RecoveryPlan plan{rows, rows, dense.newest(rows.step)};
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
  if (mode == Recovery::exact || header.step == rows.step) {
    plan.target = {header.step, header.cursor, header.row_updates};
  }
  return plan;
}

}  // namespace holdfast

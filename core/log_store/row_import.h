// Row import: rows that come from elsewhere, straight home, while the log holds no record.
//
// Invariants
// - Rows that neither log nor home has are written home: what a crash leaves of them is of rows that are not there yet.
// - Rows that home may have would be lost where they are torn. So they are records of the newest step, which merges take
//   home like any other: each is old or new.
// - Nothing else goes on meanwhile. What fails once rows are written is latched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "log_store/failure_latch.h"
#include "log_store/home_writer.h"
#include "log_store/log_records.h"
#include "log_store/store_view.h"
#include "rows/row_values.h"

namespace holdfast {

// What an import works over.
struct ImportStore : StoreView {
  HomeWriter& home_writer;
  FailureLatch& latch;
};

// through_log: appends a record of these rows at the end of the newest step, and merges it. Throws config where a row is
// not there, step where the log holds a record.
void import_rows(const ImportStore& store, std::uint32_t table, const ImportedRows& imported,
                 const std::function<void(const TableRows& rows)>& through_log);

}  // namespace holdfast

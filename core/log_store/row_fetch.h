// Row fetch: newest versions of rows, wherever they lie, many at once.
//
// Invariants
// - Where all of a call's rows are is looked up under one lock, and noted in the index until they are read: so each is as it
//   was then.
// - Of a row that neither the log nor home has nothing is read: it has its initial value.
// - Rows are read in the order of the files, in few long requests. A fetch that fails changes nothing.
#pragma once

#include <span>

#include "log_store/log_records.h"
#include "log_store/store_view.h"

namespace holdfast {

// As LogStore::fetch; by any number of threads.
void fetch_rows(const StoreView& store, std::span<const TableRows> tables);

}  // namespace holdfast

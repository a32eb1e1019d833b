// What there is to read of a log store, for those who change none of it.
#pragma once

#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

struct StoreView {
  const StoreTables& tables;
  StoreIo& io;
  const RowLog& log;
  LogIndex& index;  // where fetches are noted
  const Homes& homes;
};

}  // namespace holdfast

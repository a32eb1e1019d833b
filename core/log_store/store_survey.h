// Store survey: what a log store holds, read from one end to the other. It changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "log_store/store_view.h"
#include "rows/row_values.h"

namespace holdfast {

// What was read of a table's homes: so many rows; it goes on at place `next`.
struct HomeRead {
  std::size_t num_rows;
  std::uint64_t next;
};

namespace store_survey {

// As LogStore's.
std::vector<std::uint64_t> touched_rows(const StoreView& store, std::uint32_t table, std::uint64_t first,
                                        std::size_t count);
HomeRead read_home(const StoreView& store, std::uint32_t table, std::uint64_t first, const RowValues& out,
                   std::size_t count, std::vector<std::uint64_t>& torn);
// Images that do not hold, by file and offset, 100 at most: at home, of rows that the index does not name; and in the log.
std::vector<std::string> verify_homes(const StoreView& store);
void verify_log(const StoreView& store, std::vector<std::string>& problems);

}  // namespace store_survey
}  // namespace holdfast

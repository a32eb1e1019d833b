// Store survey: what a log store holds, read from one end to the other.
//
// Invariants
// - It changes nothing. Of what is appended or merged beside it any may be there.
// - The log is looked at before home: a row that a merge takes home meanwhile is found in either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

// What was read of a table's homes: so many rows; it goes on at place `next`.
struct HomeRead {
  std::size_t num_rows;
  std::uint64_t next;
};

class StoreSurvey {
 public:
  StoreSurvey(const StoreTables& tables, StoreIo& io, const RowLog& log, LogIndex& index, const Homes& homes)
      : tables_(tables), io_(io), log_(log), index_(index), homes_(homes) {}

  // As LogStore's.
  std::vector<std::uint64_t> touched_rows(std::uint32_t table, std::uint64_t first, std::size_t count);
  HomeRead read_home(std::uint32_t table, std::uint64_t first, const WorkingRows& out, std::size_t count,
                     std::vector<std::uint64_t>& torn) const;

  // Every image that does not hold, by file and offset, 100 problems at most: at home, of rows that the index does not name;
  // and in the log.
  std::vector<std::string> verify_homes() const;
  void verify_log(std::vector<std::string>& problems) const;

 private:
  std::vector<std::uint64_t> rows_at_home(std::uint32_t table, std::uint64_t first, std::uint64_t end,
                                          std::size_t count) const;
  std::vector<std::uint64_t> rows_with_address(std::uint32_t table, std::uint64_t first, std::uint64_t end,
                                               std::size_t count) const;
  std::vector<std::uint64_t> rows_with_tag(std::uint32_t table, std::uint64_t first, std::uint64_t end,
                                           std::size_t count) const;
  void verify_home(std::uint32_t table, const Home& home, std::vector<std::string>& problems) const;
  void verify_record(const RowLog::Live& record, std::vector<std::string>& problems) const;

  const StoreTables& tables_;
  StoreIo& io_;
  const RowLog& log_;
  LogIndex& index_;
  const Homes& homes_;
};

}  // namespace holdfast

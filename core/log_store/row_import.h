// Row import: rows that come from elsewhere, straight home, while the log holds no record.
//
// Invariants
// - Rows that neither log nor home has are written home: what a crash leaves of them is of rows that are not there yet.
// - Rows that home may have would be lost where they are torn. So they are records of the newest step, which merges take
//   home like any other: each is old or new.
// - Nothing else goes on meanwhile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "log_store/home_writer.h"
#include "log_store/homes.h"
#include "log_store/log_records.h"
#include "log_store/store_parts.h"

namespace holdfast {

class RowImport {
 public:
  // Appends a record of these rows at the end of the newest step, and merges it.
  using ThroughLog = std::function<void(const TableRows& rows)>;

  RowImport(const StoreTables& tables, StoreIo& io, const Homes& homes, HomeWriter& home_writer,
            std::uint64_t ring_bytes, const ThroughLog& through_log)
      : tables_(tables),
        io_(io),
        homes_(homes),
        home_writer_(home_writer),
        ring_bytes_(ring_bytes),
        through_log_(through_log) {}

  // Throws config where the arrays do not fit the table.
  void check(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
             std::span<const float> state) const;
  // They fit. state: zeros where it is empty.
  void write(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
             std::span<const float> state) const;

 private:
  // Rows, their weights and their state, if they have some.
  struct Imported {
    std::span<const std::uint64_t> rows;
    const std::byte* weights;
    const float* state;
  };

  void write_some(std::uint32_t table, const Imported& imported) const;
  void write_fresh(std::uint32_t table, const Imported& imported, std::span<const std::size_t> which) const;
  void write_over(std::uint32_t table, const Imported& imported, std::vector<std::size_t> which) const;

  const StoreTables& tables_;
  StoreIo& io_;
  const Homes& homes_;
  HomeWriter& home_writer_;
  const std::uint64_t ring_bytes_;
  const ThroughLog& through_log_;
};

}  // namespace holdfast

// Store sweep: newest versions read in long pieces, by whoever wants most of what a log store has.
//
// Invariants
// - A piece's rows are looked up first, then it is read, then its images are given as they lie in the buffer. Each is as it
//   was at some time in the call: a merge that has taken a row home when it is looked up has written it, and one that begins
//   later waits for this fetch.
// - It changes nothing, and holds others up for a few rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

// A row's newest version, where it was read to.
struct SweptRow {
  std::uint64_t row;
  const std::byte* weights;
  const std::byte* state;
};

// Of one of a table's homes, images [first, end).
struct HomeStretch {
  std::uint32_t table;
  std::uint32_t home;
  std::uint64_t first;
  std::uint64_t end;
};

class StoreSweep {
 public:
  using Take = std::function<void(std::uint32_t table, std::span<const SweptRow> rows)>;
  using IsWanted = std::function<bool(std::uint32_t table)>;

  StoreSweep(const StoreTables& tables, StoreIo& io, const RowLog& log, LogIndex& index, const Homes& homes)
      : tables_(tables), io_(io), log_(log), index_(index), homes_(homes) {}

  // As LogStore's.
  std::vector<HomeStretch> home_stretches(std::uint32_t table, std::uint64_t bytes) const;
  void sweep_home(const HomeStretch& stretch, const Take& take);
  void sweep_log(std::uint64_t back, std::uint64_t bytes, const IsWanted& is_wanted, const Take& take);
  std::vector<bool> may_be_swept(std::uint32_t table, std::span<const std::uint64_t> rows) const;

 private:
  // A row whose newest version is in the log.
  struct LoggedRow {
    std::uint64_t location;  // ascends with the ring's bytes
    std::uint64_t row;
    std::uint32_t table;
  };

  std::uint64_t begin_fetch(bool reads_log);
  std::vector<std::size_t> not_in_log(std::uint32_t table, std::span<const std::uint64_t> rows) const;
  std::vector<LoggedRow> rows_in_log_behind(std::uint64_t back, std::uint64_t bytes, const IsWanted& is_wanted);
  std::size_t take_logged(std::span<const LoggedRow> logged, const SectorBuffer& buffer, const Take& take);
  void give_swept(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte* const> images,
                  const Take& take, const std::function<std::string(std::size_t)>& place) const;

  const StoreTables& tables_;
  StoreIo& io_;
  const RowLog& log_;
  LogIndex& index_;
  const Homes& homes_;
};

}  // namespace holdfast

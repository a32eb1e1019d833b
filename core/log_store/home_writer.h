// Home writer: the one that writes homes, for merges and imports.
//
// Invariants
// - One thread at a time writes. Nobody reads a row at home while it is being written there: a merge waits for the fetches
//   that had begun before it, and those that begin later find the rows that it moves in the log; an import is alone.
// - What is read and written is whole units of the device, or blocks: what a version does not change in them is written
//   with the bytes that it had. Only sectors are atomic, and that is enough: an image that shares its sector is old or new,
//   one that has several has them to itself, and what a torn merge wrote, the log has.
// - Which rows home has, homes say before the rows are written; it is durable, after them, before a checkpoint rests on it.
//   Where the log does not have the rows, as in an import, the checkpoint gives bits up before the first is written, and takes
//   them back once they are durable; addresses count when they and their images are durable.
// - What a merge wrote that was given up is not relied on: the next one that takes those rows writes it again, then syncs.
// - What writes home latches its failures.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "log_store/failure_latch.h"
#include "log_store/homes.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

// Of a table: a version of a row that goes home, and where.
struct HomeVersion {
  std::uint64_t row;
  std::uint64_t image;  // where among the images
  std::uint64_t address = 0;
  std::uint32_t home = 0;
};

// Of what is read or written at once.
struct PartSize {
  std::size_t bytes;
  std::size_t requests;
};

class SectorRuns;

class HomeWriter {
 public:
  struct Written {
    std::size_t versions;
    std::size_t requests;
  };

  HomeWriter(const StoreTables& tables, StoreIo& io, RowLog& log, Homes& homes, std::mutex& finders,
             FailureLatch& latch)
      : tables_(tables), io_(io), log_(log), homes_(homes), finders_(finders), latch_(latch) {}

  // Says where at home the versions go, and sorts them by it. Rows without an address get one, those of which the log was
  // told last first: rows that are wanted often, as a rule, which so come to lie together. Throws full.
  void settle(std::uint32_t table, std::vector<HomeVersion>& versions);
  // Writes as many of the settled versions, from the first on, as may be written at once.
  Written write(std::uint32_t table, std::span<const HomeVersion> versions, const std::byte* images,
                const SectorBuffer& buffer, const PartSize& most);
  // What was written of the table since is durable.
  void sync_written(std::uint32_t table);
  // Which rows are home, whose images are durable: the next checkpoint may rest on it.
  void sync_rows();

  // These versions are going to be imported, of rows that neither log nor home has; and were settled since.
  void begin_import(std::uint32_t table, std::span<const HomeVersion> versions);
  void note_import(std::uint32_t table, std::span<const HomeVersion> versions);
  // What was imported is durable, and counts.
  void sync_imports();

 private:
  Written write_some(std::uint32_t table, std::span<const HomeVersion> versions, const std::byte* images,
                     const SectorBuffer& buffer, const PartSize& most);
  std::optional<std::uint64_t> make_rows_durable();
  void read_beside(std::uint32_t table, const SectorRuns& runs);
  void add_bits(std::span<const std::uint64_t> numbers);

  const StoreTables& tables_;
  StoreIo& io_;
  RowLog& log_;
  Homes& homes_;
  std::mutex& finders_;
  FailureLatch& latch_;
};

}  // namespace holdfast

// Homes: the files with all tables' rows as they were when they were merged last, and which rows those are.
//
// Invariants
// - Which rows home has is known: of a row that neither the log nor home has nothing is read. Home's addresses say it; in
//   pools before version 5, where rows lie by number, HomeBits, but for pools made before those were, and for homes that
//   were adopted.
// - Who looks for a row holds `finders`, the log index's mutex, since the row may be in the log instead. HomeWriter alone
//   changes what homes have, and holds it meanwhile; what it has not changed itself it looks at without.
// - What is read is whole units of the device, which may be larger than sectors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "log_store/home.h"
#include "log_store/home_bits.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

// Rows of a home in memory, ascending by address, in whole units of the device.
struct HomePiece {
  const Home* home;
  std::uint64_t first_address;
  std::vector<std::uint64_t> rows;  // by address
  std::uint64_t offset;  // in its file, of what is read
  std::uint64_t bytes;
  SpareBuffers::Borrowed data;

  const std::byte* image(const RowLayout& layout, std::size_t i) const {
    return data.data() + (layout.offset_of(first_address + i) - offset);
  }
};

class Homes {
 public:
  // Makes the files, sparse; adopt: they are there, and stay as they are. Returns how many rows they have, where that is
  // known. Throws full; corrupted where one that is adopted is missing, another pool's, or of another size than it needs.
  static std::optional<std::uint64_t> create(const std::string& directory, const std::vector<RowTable>& tables,
                                             Caching caching, bool adopt);

  // Opens them, for the log's checkpoint, which says nothing of how many rows they have from now on where they do not know.
  Homes(const std::string& directory, const StoreTables& tables, const LogStoreOptions& options, StoreIo& io,
        RowLog& log, std::mutex& finders);
  // After the log's checkpoint: of a row that it leaves to home, home's addresses know by then.
  void read_addresses(const RowLog& log);

  // A table's, by row; one, or one for each shard that this writer owns.
  std::span<const Home> of(std::uint32_t table) const { return homes_.at(table); }
  std::span<Home> of(std::uint32_t table) { return homes_.at(table); }  // for who writes
  HomeBits* bits() const { return bits_.get(); }  // none: home may have any row
  // Of a row that is in one; throws config otherwise.
  std::size_t home_of(std::uint32_t table, std::uint64_t row) const;
  bool has(std::uint32_t table, std::uint64_t row) const;
  std::optional<std::uint64_t> address_of(const Home& home, std::uint64_t row) const {
    return home.address_of(row, bits_.get());
  }
  std::size_t unit_bytes() const;  // of their files, the greatest

  // By table, how many rows its homes have room for, or have where they lie by first touch.
  std::vector<std::uint64_t> num_rows() const;
  // Of the tables, as far as they lie here: how many rows a block of home has, and how many blocks.
  double rows_per_block() const;
  double num_blocks() const;
  std::size_t memory_bytes() const;

  // Where the next images of the home at or after the address and before `end` lie that are not in a hole, about `bytes`
  // of them, and whose they are; none where only holes follow.
  std::optional<HomePiece> place_piece(std::uint32_t table, const Home& home, std::uint64_t address,
                                       std::uint64_t bytes, std::uint64_t end) const;
  void read_piece(HomePiece& piece) const;
  // Both, of what the home has.
  std::optional<HomePiece> next_piece(std::uint32_t table, const Home& home, std::uint64_t address,
                                      std::uint64_t bytes) const;

 private:
  const StoreTables& tables_;
  StoreIo& io_;
  std::mutex& finders_;
  const bool writable_;
  std::vector<std::vector<Home>> homes_;  // by table
  std::unique_ptr<HomeBits> bits_;
};

}  // namespace holdfast

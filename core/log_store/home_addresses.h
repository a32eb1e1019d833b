// Home addresses: of a home whose rows lie by first touch, which row each image is of. A row gets the next address when it
// is written home for the first time, and keeps it. So a home is as dense as the rows that were ever updated, and rows that
// began together lie together.
//
// Invariants
// - The file names rows in the order of their addresses. It is written behind its end alone, but for the last block, whose
//   sectors keep what they say; its header says how many count.
// - A header that counts rows is written when their names are durable. It is durable, and so are their images, before the
//   checkpoint after which the log has no version of them any more. Whatever lies behind those that count was left by a
//   merge that did not come to its end: the log has those rows, and they are given addresses anew.
// - A row has an address or a version in the log if, and only if, it was ever updated or imported. An address of which the
//   image was not written yet is of a row that the log has: nobody reads it.
// - A lost name loses its row: what does not hold is corrupted. That a header which counts fewer was put back is seen by
//   the checkpoint, which says how many rows all homes have.
// - Only one thread at a time adds and syncs; whoever finds meanwhile is kept apart by the caller's mutex while it adds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "media/block_file.h"
#include "media/block_queue.h"
#include "rows/address_map.h"

namespace holdfast {

class HomeAddresses {
 public:
  // Of the file of a home that has so many rows.
  static std::uint64_t file_bytes(std::uint64_t num_rows);
  // seed: what its checksums go on from (identity.h).
  HomeAddresses(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint64_t num_rows, std::uint32_t seed);

  // Reads the file, once. Throws corrupted. Who reads beside a writer may be a moment early: what does not hold is looked at
  // again.
  void read();
  // How many rows the header counts, without reading them.
  std::uint64_t read_count() const;

  // Where row number `row` of the home has its image.
  std::optional<std::uint64_t> find(std::uint64_t row) const { return map_.find(row); }
  void prefetch(std::uint64_t row) const { map_.prefetch(row); }
  std::optional<std::uint64_t> next_row(std::uint64_t row) const { return map_.next(row); }
  // Gives the row, which has none, the next address. Throws full where 2^32 - 1 rows have one.
  std::uint64_t add(std::uint64_t row);
  // What was added is durable, and counts.
  void sync();
  // The header is on the device, whatever became of the sync of the process that wrote it.
  void write_header_again();

  std::uint64_t count() const { return map_.size(); }
  std::size_t memory_bytes() const { return map_.memory_bytes(); }
  // The rows of `count` addresses from `first` on, as the file names them. Throws corrupted.
  std::vector<std::uint64_t> rows_at(std::uint64_t first, std::uint64_t count) const;

 private:
  void load(std::span<const std::uint64_t> rows);
  void write_header(std::uint64_t count);

  std::unique_ptr<BlockFile> file_;
  BlockQueue& queue_;
  std::uint64_t num_rows_;
  std::uint32_t seed_;
  AddressMap map_;
  std::uint64_t durable_count_ = 0;
  std::vector<std::uint64_t> unwritten_;  // rows from the last block's first on, by address
};

}  // namespace holdfast

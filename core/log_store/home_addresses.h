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
// - A lost name loses its row: what does not hold is corrupted, and checksums go on from a seed of the file's own, so that
//   what another home's file has does not hold. That a header which counts fewer was put back is seen by the checkpoint,
//   which says how many rows all homes have.
// - Only one thread at a time adds and syncs; whoever finds meanwhile is kept apart by the caller's mutex. That thread
//   itself may find without.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/format.h"
#include "layout/label.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "rows/address_map.h"

namespace holdfast {

class HomeAddresses {
 public:
  // Of the file of a home that has so many rows.
  static std::uint64_t file_bytes(std::uint64_t num_rows);
  // role: which of the pool's files it is; seed: the pool's (identity.h).
  HomeAddresses(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint64_t num_rows, const FileRole& role,
                std::uint32_t seed);

  // Reads the files, each once, on all processors. num_rows: of all of them, about. Throws corrupted. Who reads beside a
  // writer may be a moment early: what does not hold is looked at again.
  static void read_all(std::span<HomeAddresses* const> homes, std::uint64_t num_rows);
  // How many rows the header counts, without reading them.
  std::uint64_t read_count() const;

  // Where row number `row` of the home has its image.
  std::optional<std::uint64_t> find(std::uint64_t row) const { return map_.find(row); }
  std::optional<std::uint64_t> next_row(std::uint64_t row) const { return map_.next(row); }
  void prefetch(std::uint64_t row) const { map_.prefetch(row); }
  // Gives these rows, which have none and are all different, the next addresses, in their order; returns the first. Whoever
  // finds meanwhile holds `finders`, which is held for moments. Throws full where 2^32 - 1 rows have one: then nothing was
  // added, or a part of them from the first on.
  std::uint64_t add(std::span<const std::uint64_t> rows, std::mutex& finders);
  void set_dial(Dial* dial) { file_->set_dial(dial); }
  // What was added is durable, and counts.
  void sync();
  // The header is on the device, whatever became of the sync of the process that wrote it.
  void write_header_again();

  std::uint64_t count() const { return map_.size(); }
  std::uint64_t durable_count() const { return durable_count_; }  // for whoever adds and syncs
  std::size_t memory_bytes() const { return map_.memory_bytes(); }
  // The rows of `count` addresses from `first` on, as the file names them. Throws corrupted.
  std::vector<std::uint64_t> rows_at(std::uint64_t first, std::uint64_t count) const;

 private:
  format::HomeAddressesHeader read_header() const;
  std::uint32_t seed(bool is_own) const { return is_own ? own_seed_ : pool_seed_; }
  // With a thread for each part of the memory.
  void read(AddressMap::Loading::Memory& memory);
  void load(std::uint64_t count, AddressMap::Loading::Memory& memory);
  template <class Visit>
  void visit_sectors(std::uint64_t first_block, std::uint64_t num_blocks, std::uint64_t first, std::uint64_t end,
                     const SectorBuffer& buffer, const Visit& visit) const;
  void write_header(std::uint64_t count);

  std::unique_ptr<BlockFile> file_;
  BlockQueue& queue_;
  std::uint64_t num_rows_;
  std::uint32_t pool_seed_;
  std::uint32_t own_seed_;
  bool has_own_seed_ = true;  // its checksums go on from that, not from the pool's
  AddressMap map_;
  std::uint64_t durable_count_ = 0;
  std::vector<std::uint64_t> unwritten_;  // rows from the last block's first on, by address
};

}  // namespace holdfast

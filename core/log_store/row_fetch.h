// Row fetch: newest versions of rows, wherever they lie, many at once.
//
// Invariants
// - Where all of a call's rows are is looked up under one lock, and noted in the index until they are read: so each is as it
//   was then.
// - Of a row that neither the log nor home has nothing is read: it is untouched, and has its initial value, a function of
//   (seed, table, row).
// - Rows are read in the order of the files, in few long requests. A failed fetch changes nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "log_store/homes.h"
#include "log_store/log_index.h"
#include "log_store/log_records.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

class RowFetch {
 public:
  RowFetch(const StoreTables& tables, StoreIo& io, const RowLog& log, LogIndex& index, const Homes& homes)
      : tables_(tables), io_(io), log_(log), index_(index), homes_(homes), kernels_(best_kernels()) {}

  // As LogStore::fetch; for any number of threads.
  void fetch(std::span<const TableRows> tables);

 private:
  // One row to read: where it lies, and which row of which of the caller's tables it is.
  struct Item {
    std::uint64_t offset;  // of the image, in the file
    std::uint32_t request;
    std::uint32_t file;  // 0: the log, else 1 + which home
    std::size_t row;
  };
  static bool lies_before(const Item& a, const Item& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  }
  // A row that nobody has: of a table of the caller's, and which of its rows.
  struct Untouched {
    std::uint32_t request;
    std::size_t row;
  };
  struct Resolved {
    std::vector<Item> items;  // of homes, then of the log, each in the order of the files
    std::size_t num_in_log = 0;
    std::vector<Untouched> untouched;
  };
  struct Reads {
    std::uint64_t bytes = 0;
    std::uint64_t requests = 0;
  };

  // Returns the number of the fetch that has begun.
  std::uint64_t resolve(std::span<const TableRows> tables, Resolved& found);
  std::size_t bytes_around(const RowLayout& layout) const;
  const BlockFile& file_of(const TableRows& request, const Item& item) const;
  std::size_t read_items(std::span<const TableRows> tables, std::span<const Item> items, const SectorBuffer& buffer,
                         Reads& reads);
  void take_image(const TableRows& request, const Item& item, const std::byte* image) const;
  void take_initial(const TableRows& request, std::size_t u) const;

  const StoreTables& tables_;
  StoreIo& io_;
  const RowLog& log_;
  LogIndex& index_;
  const Homes& homes_;
  const Kernels& kernels_;
};

}  // namespace holdfast

// Home: the file with a table's rows in one shard, as they were when they were merged last, and which image is whose. In
// order of first touch, or, in pools before version 5, of their numbers.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/identity.h"
#include "layout/label.h"
#include "log_store/home_addresses.h"
#include "log_store/home_bits.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "rows/row_image.h"
#include "rows/row_table.h"

namespace holdfast {

struct Home {
  std::uint64_t first;  // of a table's rows: those up to `end`
  std::uint64_t end;
  std::unique_ptr<BlockFile> file;
  std::unique_ptr<HomeAddresses> addresses;  // none: rows lie by number
  std::uint64_t first_number;  // of its rows, in the store's home bits
  bool is_written = false;  // and has not been synced since
  bool is_importing = false;  // rows that were imported are among that
  std::uint64_t end_of_images = 0;  // no address behind it was ever written

  std::uint64_t number_of(std::uint64_t row) const { return first_number + (row - first); }
  // That it has, or has room for where rows lie by number.
  std::uint64_t num_images() const { return addresses ? addresses->count() : end - first; }
  // The image of a row that may be at home; nothing where it is known not to be. bits: of the store, if it has some.
  std::optional<std::uint64_t> address_of(std::uint64_t row, const HomeBits* bits) const {
    if (addresses) return addresses->find(row - first);
    if (bits != nullptr && !bits->may_have(number_of(row))) return std::nullopt;
    return row - first;
  }
};

RowLayout layout_of(const RowTable& table);
// Its files, from the pool's directory.
std::vector<LabelledName> home_files(const RowTable& table, std::size_t number, const RowPiece& piece);

void create_home(const std::string& directory, const RowTable& table, std::size_t number, const RowPiece& piece);
// Throws corrupted where a file is missing, another pool's, or of another size than it needs.
Home open_home(const std::string& directory, const RowTable& table, std::size_t number, const RowPiece& piece,
               Caching caching, BlockWatcher* watcher, Opening opening, BlockQueue& queue);

// A store that lacks a file is damaged, not absent: throws corrupted where it is missing.
const std::string& existing(const std::string& path);

}  // namespace holdfast

// What the parts of a log store share: how it is opened, which tables it has, and what they read and write with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/identity.h"
#include "log_store/log_store_counters.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "media/spare_buffers.h"
#include "rows/row_image.h"
#include "rows/row_table.h"

namespace holdfast {

struct LogStoreOptions {
  Caching caching = Caching::direct;
  BlockQueue::Way way = BlockQueue::Way::io_uring;
  BlockWatcher* watcher = nullptr;  // for tests
  Dial* dial = nullptr;  // of the homes' device; null: as it is
  Dial* log_dial = nullptr;  // of the log's
  bool writable = true;
  std::uint64_t ring_bytes = 0;  // that the log was made with; 0: whatever it has
  Identity identity{};  // of the pool
  std::size_t merge_bytes = std::size_t{64} << 20;  // of versions that a merge collects before it writes them
  std::size_t merge_slots = 8192;  // of the index that it looks at at a time, while fetches and appends wait

  Opening opening() const { return writable ? Opening::read_write : Opening::read_only; }
};

struct StoreTable {
  RowTable what;
  RowLayout layout;
};
using StoreTables = std::vector<StoreTable>;  // by number

// Every thread may use it.
struct StoreIo {
  explicit StoreIo(BlockQueue::Way way) : queue(way) {}

  BlockQueue queue;
  SpareBuffers spare;
  // Of log and homes, the greatest: what is read and written as a whole. Settled when all are open.
  std::size_t unit_bytes = 0;
  SharedCounters counters;

  void note_fetched(std::uint64_t rows, std::uint64_t bytes, std::uint64_t requests) {
    counters.change([&](LogStoreCounters& of) {
      of.fetched_rows += rows;
      of.fetched_bytes += bytes;
      of.fetch_requests += requests;
    });
  }
};

// Of a message about an image that does not hold. place: of the image.
inline std::string damaged_row(const std::string& place, std::uint32_t table, std::uint64_t row) {
  return place + ": row " + std::to_string(row) + " of table " + std::to_string(table) + " does not hold its checksum";
}

}  // namespace holdfast

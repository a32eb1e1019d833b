// How a log store is opened.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/identity.h"
#include "media/block_file.h"
#include "media/block_queue.h"

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

}  // namespace holdfast

// Log writer: the way of packed records into the log, and of the log's oldest records out of it.
//
// Invariants
// - A record that append wrote is in the log and in the index at one instant; it is durable after the next sync.
// - A device may tell one of those who sync at the same time, and only that one, that it lost what all of them wrote. So the
//   checkpoint that gives records up waits for a sync of the log that is under way, and is not written if that failed.
// - What writes the log latches its failures.
// - One thread appends; sync may be called from any.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>

#include "log_store/failure_latch.h"
#include "log_store/log_index.h"
#include "log_store/log_records.h"
#include "log_store/row_log.h"
#include "log_store/store_parts.h"

namespace holdfast {

class LogWriter {
 public:
  LogWriter(RowLog& log, LogIndex& index, SharedCounters& counters, FailureLatch& latch)
      : log_(log), index_(index), counters_(counters), latch_(latch) {}

  // Returns the record's bytes, or nothing where the ring has no room now.
  std::optional<std::uint64_t> append(const PackedRecord& packed) {
    const std::optional<std::uint64_t> position = index_.room_for(packed.bytes());
    if (!position) return std::nullopt;
    std::byte* const data = packed.buffer.data();
    latch_.latching([&] { index_.append(log_.write(packed.header, *position, data), data); });
    counters_.change([&](LogStoreCounters& counters) {
      counters.appended_rows += packed.num_rows;
      counters.appended_row_bytes += packed.row_bytes;
      counters.appended_bytes += packed.bytes();
    });
    return packed.bytes();
  }

  void sync() {
    const std::lock_guard turn(sync_mutex_);
    latch_.latching([&] { log_.sync(); });
  }

  // The `count` oldest records, which are the stretch, are durable at home: their space may be used again, and no recovery
  // goes before `merged_step`.
  void give_up(const LogStretch& stretch, std::size_t count, std::uint64_t merged_step) {
    latch_.latching([&] {
      {
        const std::lock_guard turn(sync_mutex_);
        latch_.require_unfailed();
      }
      log_.checkpoint_without(count, merged_step);
      index_.forget(stretch, count);
    });
  }

 private:
  RowLog& log_;
  LogIndex& index_;
  SharedCounters& counters_;
  FailureLatch& latch_;
  std::mutex sync_mutex_;
};

}  // namespace holdfast

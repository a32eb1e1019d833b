#include "log_store/log_writer.h"

namespace holdfast {

std::optional<std::uint64_t> LogWriter::append(const PackedRecord& packed) {
  const std::optional<std::uint64_t> position = index_.room_for(packed.bytes());
  if (!position) return std::nullopt;
  latch_.latching([&] { index_.append(log_.write(packed.header(), *position, packed.data()), packed.data()); });
  counters_.change([&](LogStoreCounters& counters) {
    counters.appended_rows += packed.num_rows();
    counters.appended_row_bytes += packed.row_bytes();
    counters.appended_bytes += packed.bytes();
  });
  return packed.bytes();
}

void LogWriter::sync() {
  const std::lock_guard turn(sync_mutex_);
  latch_.latching([&] { log_.sync(); });
}

void LogWriter::give_up(const LogStretch& stretch, std::size_t count, std::uint64_t merged_step) {
  latch_.latching([&] {
    {
      const std::lock_guard turn(sync_mutex_);
      latch_.require_unfailed();
    }
    log_.checkpoint_without(count, merged_step);
    index_.forget(stretch, count);
  });
}

}  // namespace holdfast

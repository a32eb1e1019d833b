// What a log store counted since it was opened.
#pragma once

#include <cstdint>
#include <mutex>

namespace holdfast {

// Bytes since the store was opened. (appended + home_written) / bytes of the images is the write amplification.
struct LogStoreCounters {
  std::uint64_t fetched_rows;
  std::uint64_t fetched_bytes;  // read for them
  std::uint64_t fetch_requests;
  std::uint64_t log_rows_fetched;  // of fetched_rows: those that the log had
  std::uint64_t initial_rows;  // of fetches: untouched ones, for which nothing was read
  std::uint64_t appended_rows;
  std::uint64_t appended_row_bytes;  // of the rows' images
  std::uint64_t appended_bytes;
  std::uint64_t merges;
  std::uint64_t merged_bytes;  // of the log, given up
  std::uint64_t standing_bytes;  // of later records that stood when a merge chose its rows: each merge's mean, added up
  std::uint64_t merged_rows;  // written home
  std::uint64_t placed_rows;  // of these: ones that got their address then
  std::uint64_t placed_bytes;  // of their images
  std::uint64_t merge_log_bytes_read;  // of the log, by merges
  std::uint64_t merge_log_requests;
  std::uint64_t home_bytes_read;
  std::uint64_t home_bytes_written;
  std::uint64_t home_read_requests;
  std::uint64_t home_write_requests;
  std::uint64_t home_sectors_changed;  // of those written: the ones that got a new version of a row
};

// The same, counted by any thread.
class SharedCounters {
 public:
  template <class Change>
  void change(const Change& change_counters) {
    const std::lock_guard lock(mutex_);
    change_counters(counters_);
  }
  LogStoreCounters read() const {
    const std::lock_guard lock(mutex_);
    return counters_;
  }

 private:
  mutable std::mutex mutex_;
  LogStoreCounters counters_{};
};

}  // namespace holdfast

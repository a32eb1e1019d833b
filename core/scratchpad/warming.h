// Warming: the threads that fill the scratchpad of a pool that was opened again, beside the first steps.
//
// What was hot is known without a file that would have to be kept: the row log holds the newest versions of the rows that
// were updated last, so these come first, the newest of them first, and the log is read from one end to the other. Then,
// of tables whose rows all have room in the scratchpad, comes what is at home, in file order: a sequential read of
// gigabytes takes seconds, where fetching the same rows one by one takes minutes.
//
// Invariants
// - It changes no bit of training: a row comes in as it is below, and only where nobody brought it in before (Scratchpad
//   says why that is its newest version).
// - Nothing rests on it. Whatever fails ends it, silently: who needs the row that could not be read, is told.
// - It gives way: it has a few reads in flight, where fetches have a hundred, and holds no lock while it reads. It
//   evicts nothing.
// - stop ends it within a part of each thread, some ten thousand rows.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <thread>
#include <vector>

#include "log_store/log_store.h"
#include "rows/row_table.h"
#include "scratchpad/scratchpad.h"

namespace holdfast {

class Warming {
 public:
  // Begins. Both outlive it.
  Warming(LogStore& store, Scratchpad& scratchpad);
  ~Warming();
  Warming(const Warming&) = delete;
  Warming& operator=(const Warming&) = delete;

  void stop() noexcept;

  std::uint64_t num_rows() const { return num_rows_.load(std::memory_order_relaxed); }  // that came in
  bool is_over() const { return num_running_.load(std::memory_order_acquire) == 0; }

 private:
  // Rows of one table, and where they are read to.
  struct Part {
    std::vector<std::uint64_t> rows;
    std::vector<std::byte> weights;
    std::vector<float> state;
  };
  using Parts = std::vector<Part>;  // by table; a thread's own
  struct Range {
    std::uint32_t table;
    std::uint64_t first;
    std::uint64_t end;
  };

  void run(bool log_first);
  void warm_from_log(Parts& parts);
  void warm_from_log(Parts& parts, std::span<const LoggedRow> logged);
  void warm_from_home(Parts& parts);
  void bring(Parts& parts, std::span<const std::uint32_t> tables);

  LogStore& store_;
  Scratchpad& scratchpad_;
  const std::vector<RowTable> tables_;
  std::vector<Range> ranges_;  // of home, in file order
  std::atomic<std::size_t> next_range_{0};
  std::atomic<std::uint64_t> num_rows_{0};
  std::atomic<unsigned> num_running_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;  // last
};

}  // namespace holdfast

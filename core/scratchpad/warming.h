// Warming: the threads that fill the scratchpad of a pool that was opened again, before the first steps and beside them.
//
// What was hot is known without a file that would have to be kept: the row log holds the newest versions of the rows that
// were updated last, so these come first, the newest of them first. Then, of tables whose rows all have room in the
// scratchpad, comes what is at home, in the order of the files: long reads bring gigabytes in seconds, where fetching the
// same rows one by one takes minutes.
//
// Invariants
// - It changes no bit of training: a row comes in as it is below, and only where nobody brought it in before (Scratchpad
//   says why that is its newest version).
// - Nothing rests on it. Whatever fails ends it, silently: who needs the row that could not be read, is told.
// - It holds no lock while it reads. It evicts nothing.
// - stop ends it within a part of each thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include "log_store/log_store.h"
#include "scratchpad/scratchpad.h"

namespace holdfast {

class Warming {
 public:
  // Begins, before the first merge. Both outlive it.
  Warming(LogStore& store, Scratchpad& scratchpad);
  ~Warming();
  Warming(const Warming&) = delete;
  Warming& operator=(const Warming&) = delete;

  void stop() noexcept;

  std::uint64_t num_rows() const { return num_rows_.load(std::memory_order_relaxed); }  // that came in
  bool is_over() const { return num_running_.load(std::memory_order_acquire) == 0; }

 private:
  void run(bool log_first);
  void warm_from_log();
  void warm_from_home();
  void bring(std::uint32_t table, std::span<const SweptRow> rows);
  void note_looked_at(std::uint64_t rows);

  LogStore& store_;
  Scratchpad& scratchpad_;
  std::vector<HomeStretch> stretches_;
  std::uint64_t all_rows_;  // that are going to be looked at
  std::atomic<std::uint64_t> rows_looked_at_{0};
  std::atomic<std::size_t> next_stretch_{0};
  std::atomic<std::uint64_t> num_rows_{0};
  std::atomic<unsigned> num_running_;
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;  // last
};

}  // namespace holdfast

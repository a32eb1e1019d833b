#include "scratchpad/warming.h"

#include <algorithm>

#include "base/native_thread.h"

namespace holdfast {
namespace {

constexpr unsigned num_threads = 4;  // some read while others copy
constexpr std::uint64_t part_bytes = std::uint64_t{2} << 20;  // of home, that are read at a time
constexpr std::uint64_t stretch_bytes = std::uint64_t{64} << 20;  // of the log, whose rows are listed at a time

}  // namespace

Warming::Warming(LogStore& store, Scratchpad& scratchpad)
    : store_(store), scratchpad_(scratchpad), all_rows_(store.index_entries()), num_running_(num_threads) {
  const auto num_tables = static_cast<std::uint32_t>(store_.tables().size());
  for (std::uint32_t table = 0; table < num_tables; ++table) {
    if (!scratchpad_.holds_all(table)) continue;
    for (const HomeStretch& stretch : store_.home_stretches(table, part_bytes)) {
      stretches_.push_back(stretch);
      all_rows_ += stretch.end - stretch.first;
    }
  }
  threads_.reserve(num_threads);  // a thread that has no place in it would end the process
  // Of the store alone: holds may ask when this is gone.
  scratchpad_.begin_sweep([of = &store_](std::uint32_t table, std::span<const std::uint64_t> rows) {
    return of->may_be_swept(table, rows);
  });
  try {
    for (unsigned i = 0; i < num_threads; ++i) {
      threads_.push_back(start_thread("hf-warm", [this, i] { run(i == 0); }));
    }
  } catch (...) {
    stop();
    throw;
  }
}

Warming::~Warming() { stop(); }

void Warming::stop() noexcept {
  stopping_ = true;
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
  scratchpad_.end_sweep();
}

void Warming::run(bool log_first) {
  give_way();
  try {
    if (log_first) warm_from_log();
    warm_from_home();
  } catch (...) {  // whoever needs those rows meets the same, and says so
    stopping_ = true;
  }
  if (num_running_.fetch_sub(1, std::memory_order_acq_rel) == 1) scratchpad_.end_sweep();
}

// The newest first: where room ends, the oldest stay out.
void Warming::warm_from_log() {
  const std::uint64_t used = store_.used_bytes();
  const auto is_wanted = [this](std::uint32_t table) { return scratchpad_.has_free_slots(table); };
  for (std::uint64_t back = 0; back < used && !stopping_; back += stretch_bytes) {
    store_.sweep_log(back, stretch_bytes, is_wanted, [this](std::uint32_t table, std::span<const SweptRow> rows) {
      if (stopping_) return;
      bring(table, rows);
      note_looked_at(rows.size());
    });
  }
}

void Warming::warm_from_home() {
  while (!stopping_) {
    const std::size_t next = next_stretch_.fetch_add(1, std::memory_order_relaxed);
    if (next >= stretches_.size()) return;
    const HomeStretch& stretch = stretches_[next];
    store_.sweep_home(stretch, [this](std::uint32_t table, std::span<const SweptRow> rows) { bring(table, rows); });
    note_looked_at(stretch.end - stretch.first);
  }
}

void Warming::bring(std::uint32_t table, std::span<const SweptRow> rows) {
  num_rows_.fetch_add(scratchpad_.warm(table, rows), std::memory_order_relaxed);
}

void Warming::note_looked_at(std::uint64_t rows) {
  const std::uint64_t all = rows_looked_at_.fetch_add(rows, std::memory_order_relaxed) + rows;
  scratchpad_.note_sweep(static_cast<double>(all) / static_cast<double>(all_rows_));
}

}  // namespace holdfast

#include "scratchpad/warming.h"

#include <algorithm>

#include "base/native_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t part_rows = 16384;  // that are read at a time
constexpr unsigned num_threads = 2;  // one reads while the other copies
constexpr std::uint64_t stretch_bytes = std::uint64_t{64} << 20;  // of the log, whose rows are listed at a time

}  // namespace

Warming::Warming(LogStore& store, Scratchpad& scratchpad)
    : store_(store), scratchpad_(scratchpad), tables_(store.tables()), num_running_(num_threads) {
  for (std::uint32_t table = 0; table < tables_.size(); ++table) {
    if (!scratchpad_.holds_all(table)) continue;
    for (const RowPiece& piece : tables_[table].owned_pieces()) {
      for (std::uint64_t first = piece.first; first < piece.end(); first += part_rows) {
        ranges_.push_back({table, first, std::min(piece.end(), first + part_rows)});
      }
    }
  }
  threads_.reserve(num_threads);  // a thread that has no place in it would end the process
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
}

void Warming::run(bool log_first) {
  give_way();
  try {
    Parts parts(tables_.size());
    if (log_first) warm_from_log(parts);
    warm_from_home(parts);
  } catch (...) {  // whoever needs those rows meets the same, and says so
    stopping_ = true;
  }
  num_running_.fetch_sub(1, std::memory_order_release);
}

// The newest first: where room ends, the oldest stay out.
void Warming::warm_from_log(Parts& parts) {
  const std::uint64_t used = store_.used_bytes();
  for (std::uint64_t back = 0; back < used && !stopping_; back += stretch_bytes) {
    const std::vector<LoggedRow> logged = store_.rows_in_log_behind(back, stretch_bytes);
    for (std::size_t first = 0; first < logged.size() && !stopping_; first += part_rows) {
      warm_from_log(parts, std::span(logged).subspan(first, std::min(part_rows, logged.size() - first)));
    }
  }
}

void Warming::warm_from_log(Parts& parts, std::span<const LoggedRow> logged) {
  std::vector<std::uint32_t> tables;
  for (const LoggedRow& row : logged) {
    Part& part = parts[row.table];
    if (part.rows.empty()) tables.push_back(row.table);
    part.rows.push_back(row.row);
  }
  std::ranges::sort(tables);
  for (const std::uint32_t table : tables) {
    std::ranges::sort(parts[table].rows);
    scratchpad_.keep_absent(table, parts[table].rows);
    if (!scratchpad_.has_free_slots(table)) parts[table].rows.clear();
  }
  bring(parts, tables);
}

void Warming::warm_from_home(Parts& parts) {
  while (!stopping_) {
    const std::size_t next = next_range_.fetch_add(1, std::memory_order_relaxed);
    if (next >= ranges_.size()) return;
    const Range& range = ranges_[next];
    parts[range.table].rows = scratchpad_.absent(range.table, range.first, range.end);
    bring(parts, {&range.table, 1});
  }
}

// The rows of these tables' parts, which are empty afterwards.
void Warming::bring(Parts& parts, std::span<const std::uint32_t> tables) {
  std::vector<TableRows> wanted;
  for (const std::uint32_t table : tables) {
    Part& part = parts[table];
    if (part.rows.empty()) continue;
    part.weights.resize(std::max(part.weights.size(), part.rows.size() * tables_[table].weight_bytes()));
    part.state.resize(std::max(part.state.size(), part.rows.size() * tables_[table].spec.state_floats));
    wanted.push_back({table, part.rows.size(), {part.rows.data(), part.weights.data(), part.state.data()}});
  }
  if (wanted.empty()) return;
  store_.fetch(wanted);
  std::size_t num_warmed = 0;
  for (const TableRows& rows : wanted) num_warmed += scratchpad_.warm(rows);
  num_rows_.fetch_add(num_warmed, std::memory_order_relaxed);
  for (const std::uint32_t table : tables) parts[table].rows.clear();
}

}  // namespace holdfast

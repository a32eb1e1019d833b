#include "scratchpad/warming.h"

#include <algorithm>

#include "base/native_thread.h"

namespace holdfast {
namespace {

constexpr std::size_t part_rows = 16384;  // that are read at a time
constexpr std::uint64_t stretch_bytes = std::uint64_t{64} << 20;  // of the log, whose rows are listed at a time

}  // namespace

Warming::Warming(LogStore& store, Scratchpad& scratchpad)
    : store_(store),
      scratchpad_(scratchpad),
      tables_(store.tables()),
      parts_(tables_.size()),
      thread_(start_thread("hf-warm", [this] { run(); })) {}

Warming::~Warming() { stop(); }

void Warming::stop() noexcept {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
}

void Warming::run() {
  try {
    warm_from_log();
    warm_from_home();
  } catch (...) {  // whoever needs those rows meets the same, and says so
  }
  parts_.clear();
  is_over_.store(true, std::memory_order_release);
}

// The newest first: where room ends, the oldest stay out.
void Warming::warm_from_log() {
  const std::uint64_t used = store_.used_bytes();
  for (std::uint64_t back = 0; back < used && !stopping_; back += stretch_bytes) {
    const std::vector<LoggedRow> logged = store_.rows_in_log_behind(back, stretch_bytes);
    for (std::size_t first = 0; first < logged.size() && !stopping_; first += part_rows) {
      warm_from_log(std::span(logged).subspan(first, std::min(part_rows, logged.size() - first)));
    }
  }
}

void Warming::warm_from_log(std::span<const LoggedRow> logged) {
  std::vector<std::uint32_t> tables;
  for (const LoggedRow& row : logged) {
    Part& part = parts_[row.table];
    if (part.rows.empty()) tables.push_back(row.table);
    part.rows.push_back(row.row);
  }
  std::ranges::sort(tables);
  for (const std::uint32_t table : tables) {
    std::ranges::sort(parts_[table].rows);
    scratchpad_.keep_absent(table, parts_[table].rows);
    if (!scratchpad_.has_free_slots(table)) parts_[table].rows.clear();
  }
  bring(tables);
}

void Warming::warm_from_home() {
  for (std::uint32_t table = 0; table < tables_.size(); ++table) {
    if (!scratchpad_.holds_all(table)) continue;
    for (const RowPiece& piece : tables_[table].owned_pieces()) {
      for (std::uint64_t first = piece.first; first < piece.end() && !stopping_; first += part_rows) {
        const std::uint64_t end = std::min(piece.end(), first + part_rows);
        parts_[table].rows = scratchpad_.absent(table, first, end);
        bring({&table, 1});
      }
    }
  }
}

// The rows of these tables' parts, which are empty afterwards.
void Warming::bring(std::span<const std::uint32_t> tables) {
  std::vector<TableRows> wanted;
  for (const std::uint32_t table : tables) {
    Part& part = parts_[table];
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
  for (const std::uint32_t table : tables) parts_[table].rows.clear();
}

}  // namespace holdfast

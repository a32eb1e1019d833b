// Store sweep: newest versions read in long pieces, by whoever wants most of what a log store has.
//
// Invariants
// - A piece's rows are looked up first, then it is read, then its images are given as they lie in the buffer. Each is as it
//   was at some time in the call: a merge that has taken a row home when it is looked up has written it, and one that begins
//   later waits for this fetch.
// - It changes nothing, and holds others up for a few rows at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "log_store/store_view.h"

namespace holdfast {

// A row's newest version, where it was read to.
struct SweptRow {
  std::uint64_t row;
  const std::byte* weights;
  const std::byte* state;
};

// Of one of a table's homes, images [first, end).
struct HomeStretch {
  std::uint32_t table;
  std::uint32_t home;
  std::uint64_t first;
  std::uint64_t end;
};

namespace store_sweep {

using Take = std::function<void(std::uint32_t table, std::span<const SweptRow> rows)>;
using IsWanted = std::function<bool(std::uint32_t table)>;

// As LogStore's.
std::vector<HomeStretch> home_stretches(const StoreView& store, std::uint32_t table, std::uint64_t bytes);
void sweep_home(const StoreView& store, const HomeStretch& stretch, const Take& take);
void sweep_log(const StoreView& store, std::uint64_t back, std::uint64_t bytes, const IsWanted& is_wanted,
               const Take& take);
std::vector<bool> may_be_swept(const StoreView& store, std::uint32_t table, std::span<const std::uint64_t> rows);

}  // namespace store_sweep
}  // namespace holdfast

// Shards: which of a pool's shards each row of a table is in, and the number by which the core knows it.
//
// Invariants
// - A pool of several writers has S = 2^b shards, for good. A table is *whole* (all rows in one shard) or *split* over
//   all S. Rows of a split table go round: of each stripe of S consecutive rows every shard gets one, so shards differ
//   by one row at most; a mixer says at which shard a stripe begins, so rows at a regular distance spread, too.
//   Tables are turned against one another (first_shard): the first rows of all, often the hot ones, do not meet.
// - A row's *place* is its number wherever rows are addressed: plans, logs, tags, scratchpad. Of a split table it is
//   shard << stride_bits | local, of a whole one, and in a pool without shards, the row's own number. In a shard,
//   places ascend with rows and have no gaps. Places of different rows differ, and all are below end_place.
// - What must not depend on shards is computed from the row's own number: initial values, stochastic rounding.
// - A shard's places begin at a multiple of 32768, so that arrays of rows, bits or tags do at a page.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>

#include "base/counter_rng.h"
#include "base/format.h"
#include "base/places.h"

namespace holdfast {

using format::max_shards;
inline constexpr std::uint32_t min_stride_bits = 15;

// Shards of a pool that one writer has.
using ShardSet = std::bitset<max_shards>;

struct ShardLayout {
  std::uint64_t num_rows = 0;  // of the table, over all shards
  std::uint32_t shard_bits = 0;
  std::uint32_t stride_bits = 0;  // 0: whole
  std::uint32_t first_shard = 0;  // of a whole table: the one with its rows; of a split one: what it is turned by

  static ShardLayout whole(std::uint64_t num_rows, std::uint32_t shard = 0) { return {num_rows, 0, 0, shard}; }
  // num_shards is a power of two.
  static ShardLayout split(std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard = 0) {
    ShardLayout layout{num_rows, 0, min_stride_bits, first_shard};
    while (std::uint32_t{1} << layout.shard_bits < num_shards) ++layout.shard_bits;
    while (num_shards * layout.stride() < num_rows) ++layout.stride_bits;
    return layout;
  }

  bool is_split() const { return stride_bits != 0; }
  std::uint64_t num_shards() const { return std::uint64_t{1} << shard_bits; }  // that the table is cut into
  std::uint64_t stride() const { return std::uint64_t{1} << stride_bits; }  // of a split table: places per shard
  // All places are below.
  std::uint64_t end_place() const { return is_split() ? num_shards() << stride_bits : num_rows; }

  std::uint64_t place_of(std::uint64_t row) const {
    if (!is_split()) return row;
    const std::uint64_t stripe = row >> shard_bits;
    return ((row + first_shard + counter_rng::mix64(stripe)) & (num_shards() - 1)) << stride_bits | stripe;
  }
  std::uint64_t row_of(std::uint64_t place) const { return own_row(shard_bits, stride_bits, first_shard, place); }

  std::uint32_t shard_of(std::uint64_t place) const {
    return is_split() ? static_cast<std::uint32_t>(place >> stride_bits) : first_shard;
  }
  std::uint32_t shard_of_row(std::uint64_t row) const { return shard_of(place_of(row)); }
  std::uint64_t local_of(std::uint64_t place) const { return is_split() ? place & (stride() - 1) : place; }
  // Of the shard's rows, which have the rows_in(shard) places from there on.
  std::uint64_t first_place(std::uint32_t shard) const { return is_split() ? std::uint64_t{shard} << stride_bits : 0; }
  std::uint64_t rows_in(std::uint32_t shard) const {
    if (!is_split()) return shard == first_shard ? num_rows : 0;
    if (shard >= num_shards()) return 0;
    const std::uint64_t stripes = num_rows >> shard_bits;  // whole ones; what is left is the beginning of another
    const std::uint64_t lane = (shard - first_shard - counter_rng::mix64(stripes)) & (num_shards() - 1);
    return stripes + (lane < (num_rows & (num_shards() - 1)) ? 1 : 0);
  }

  // Whether a row is there, and whether it is in one of these shards: places come from files and from the network.
  bool is_place(std::uint64_t place) const { return place < end_place() && local_of(place) < rows_in(shard_of(place)); }
  bool holds(std::uint64_t place, const ShardSet& owned) const { return is_place(place) && owned[shard_of(place)]; }
};

}  // namespace holdfast

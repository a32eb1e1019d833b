// Key shards: in which of a table's rows a key may lie.
//
// Invariants
// - A key's shard is a function of (pool seed, table, key): the same on every rank that routes or owns, for good. So a pool
//   is dealt out anew without a key changing its row.
// - It has nothing in common with where a directory keeps the key, so the keys of one shard spread over a directory.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "base/counter_rng.h"

namespace holdfast {

// Of a table whose ids are keys: `seed` for key_shard.
inline std::uint64_t key_shard_seed(std::uint64_t pool_seed, std::uint64_t table) {
  return counter_rng::absorb(counter_rng::absorb(counter_rng::shards_of_keys, pool_seed), table);
}

// num_shards: that the table is cut into, a power of two.
inline std::uint64_t key_shard(std::uint64_t seed, std::uint64_t key, std::uint64_t num_shards) {
  return counter_rng::absorb(seed, key) & (num_shards - 1);
}

struct KeyShards {
  static constexpr std::uint32_t not_here = std::numeric_limits<std::uint32_t>::max();

  // Rows [first, first + num_rows) of one shard.
  struct Piece {
    std::uint64_t first;
    std::uint64_t num_rows;
  };

  std::vector<Piece> pieces;  // that are here, ascending
  std::vector<std::uint32_t> piece_of;  // of each of the table's shards, or not_here
  std::uint64_t seed = 0;

  // A table that lies in one.
  static KeyShards whole(std::uint64_t num_rows) { return {{{0, num_rows}}, {0}}; }

  std::uint64_t num_shards() const { return piece_of.size(); }
  std::uint64_t shard_of_key(std::uint64_t key) const { return key_shard(seed, key, num_shards()); }
  std::uint32_t piece_of_key(std::uint64_t key) const { return piece_of[shard_of_key(key)]; }
};

}  // namespace holdfast

// A pool's records as Python gets them: tables, header, commits, shards, traffic.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "layout/superblock.h"
#include "rows/shards.h"
#include "step/row_backend.h"

namespace holdfast {

struct TableSpec {
  std::string name;
  std::uint64_t num_embeddings;
  std::uint32_t embedding_dim;
  std::uint32_t dtype;
  std::uint32_t optimizer;
  std::uint32_t pooling;
  float init_low;
  float init_high;
  std::uint32_t first_shard;
  std::uint32_t table_shards;
  std::uint32_t keys;
  std::uint64_t ttl_steps;
  std::uint64_t max_keys;
  std::uint32_t admit_after;
  std::vector<std::uint32_t> turned_away;  // empty: zeros
  std::vector<std::uint32_t> stay;
};

format::TableRecord record_of(const TableSpec& spec);
std::vector<TableSpec> specs_of(const std::vector<format::TableRecord>& records);

nanobind::bytes to_bytes(std::span<const std::byte> data);

// level: as it is now.
nanobind::dict to_dict(const format::PoolHeader& header, format::Level level);
nanobind::dict to_dict(const format::CommitRecord& commit);
nanobind::dict to_dict(const Traffic& traffic);
nanobind::dict to_dict(const Dial::Counts& counts);

// The shards of one writer of several.
template <class Pool>
std::vector<std::uint32_t> owned_by(const Pool& pool) {
  std::vector<std::uint32_t> shards;
  if (!pool.shards()) return shards;
  const ShardSet owned = shards_of(*pool.shards());
  for (std::uint32_t shard = 0; shard < max_shards; ++shard) {
    if (owned[shard]) shards.push_back(shard);
  }
  return shards;
}

template <class Pool>
std::optional<nanobind::bytes> group_of(const Pool& pool) {
  if (!pool.shards()) return std::nullopt;
  return nanobind::bytes(pool.shards()->group_uuid, sizeof(pool.shards()->group_uuid));
}

}  // namespace holdfast

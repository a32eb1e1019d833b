// Row table: what a pool's rows are, whatever keeps them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/identity.h"
#include "kernels/kernels.h"
#include "keys/key_policy.h"
#include "rows/shards.h"

namespace holdfast {

// A table's rows in one shard, as they lie in that shard's files: local rows [0, num_rows), places from `first` on.
struct RowPiece {
  std::uint32_t shard;
  std::uint64_t first;
  std::uint64_t num_rows;

  std::uint64_t end() const { return first + num_rows; }
};

// Which image of its home a row has, in a log store: that of its number, or the next one when it is written home for the
// first time (home_addresses.h). by_row: in pools before version 5.
enum class HomeOrder { by_first_touch, by_row };

struct RowTable {
  RowSpec spec;
  std::uint64_t num_rows;  // rows are below: of a table in shards, the end of its places
  std::string name{};
  std::optional<ShardLayout> layout{};  // of a pool of several writers
  std::vector<RowPiece> pieces{};       // there: those that this writer owns, by place
  Identity identity{};                  // of whoever owns the rows: of the group, where there is one
  HomeOrder home_order = HomeOrder::by_first_touch;
  KeyPolicy key_policy{};  // of a table with keys

  std::size_t weight_bytes() const { return std::size_t{spec.dim} * bytes_of(spec.dtype); }
  std::size_t state_bytes() const { return std::size_t{spec.state_floats} * 4; }
  bool has_keys() const { return spec.key_floats != 0; }

  // What this writer has of the table; all of it, where the pool has no other writer.
  std::vector<RowPiece> owned_pieces() const { return layout ? pieces : std::vector<RowPiece>{{0, 0, num_rows}}; }
  std::uint64_t owned_rows() const {
    std::uint64_t rows = 0;
    for (const RowPiece& piece : owned_pieces()) rows += piece.num_rows;
    return rows;
  }
  // Whether rows [first, first + count) are there, in one piece.
  bool has_range(std::uint64_t first, std::uint64_t count) const {
    if (!layout) return first <= num_rows && count <= num_rows - first;
    const auto piece = piece_before(first);
    return count == 0 || (piece != pieces.end() && first < piece->end() && count <= piece->end() - first);
  }
  // Of ascending rows, the first that this writer does not have. Their fresh bits do not count.
  std::optional<std::uint64_t> first_foreign(std::span<const std::uint64_t> rows) const {
    const auto row_at = [](std::uint64_t row) { return row & ~fresh_bit; };
    if (!layout) {
      if (rows.empty() || row_at(rows.back()) < num_rows) return std::nullopt;
      return *std::ranges::lower_bound(rows, num_rows, {}, row_at) & ~fresh_bit;
    }
    for (auto row = rows.begin(); row != rows.end();) {
      const auto piece = piece_before(row_at(*row));
      if (piece == pieces.end() || row_at(*row) >= piece->end()) return row_at(*row);
      row = std::ranges::lower_bound(row, rows.end(), piece->end(), {}, row_at);
    }
    return std::nullopt;
  }

 private:
  std::vector<RowPiece>::const_iterator piece_before(std::uint64_t row) const {
    const auto after = std::ranges::upper_bound(pieces, row, {}, &RowPiece::first);
    return after == pieces.begin() ? pieces.end() : after - 1;
  }
};

// Where a table's rows lie in memory, row r's weights and state at r times their size. Beside `ranges` there is nothing:
// those have the rows that this writer has.
struct RowMapping {
  std::byte* weights;
  float* state;  // null when the optimizer keeps none
  std::vector<std::span<std::byte>> ranges{};
};

// How a table's rows are cut into shards; nothing in a pool without.
inline std::optional<ShardLayout> shard_layout_of(const format::TableRecord& record) {
  if (record.table_shards == 0) return std::nullopt;
  if (record.table_shards == 1) return ShardLayout::whole(record.num_embeddings, record.first_shard);
  return ShardLayout::split(record.num_embeddings, record.table_shards, record.first_shard);
}

// Of a table with keys.
inline KeyPolicy key_policy_of(const format::TableRecord& record, std::uint64_t seed, std::uint64_t number) {
  return {record.ttl_steps, record.max_keys,
          KeyAdmission(seed, number, record.admit_after, std::to_array(record.turned_away)),
          KeyStay(std::to_array(record.stay))};
}

// The tables of a pool, by number; `owned`: its writer's shards, where it has some; `identity`: whose the rows are.
inline std::vector<RowTable> row_tables_of(const std::vector<format::TableRecord>& records, std::uint64_t seed,
                                           const ShardSet& owned = {}, const Identity& identity = {},
                                           HomeOrder home_order = HomeOrder::by_first_touch) {
  std::vector<RowTable> tables;
  for (std::size_t i = 0; i < records.size(); ++i) {
    const format::TableRecord& record = records[i];
    RowTable table{
        {record.embedding_dim, static_cast<RowDtype>(record.dtype), static_cast<RowOptimizer>(record.optimizer),
         record.state_floats, seed, i, record.init_low, record.init_high},
        record.num_embeddings,
        record.name};
    if (record.id_map == static_cast<std::uint32_t>(format::IdMap::dynamic)) {
      table.spec.key_floats = key_record_floats;
      table.key_policy = key_policy_of(record, seed, i);
    }
    table.identity = identity;
    table.home_order = home_order;
    table.spec.tag_seed = identity.seed();
    table.layout = shard_layout_of(record);
    if (table.layout) {
      table.num_rows = table.layout->end_place();
      if (!table.has_keys()) {  // else initial values and rounding go by keys
        table.spec.shard_bits = table.layout->shard_bits;
        table.spec.stride_bits = table.layout->stride_bits;
        table.spec.first_shard = table.layout->first_shard;
      }
      for (std::uint32_t shard = 0; shard < max_shards; ++shard) {
        const std::uint64_t rows = owned[shard] ? table.layout->rows_in(shard) : 0;
        if (rows != 0) table.pieces.push_back({shard, table.layout->first_place(shard), rows});
      }
    }
    tables.push_back(std::move(table));
  }
  return tables;
}

// The file of a table's rows in one shard, from the pool's directory; the shards of several writers lie beside these.
inline std::string row_file_name(const RowTable& table, std::uint32_t shard, std::size_t number, const char* what) {
  char name[80];
  std::snprintf(name, sizeof(name), "%sshard-%04u/table-%04zu.%s", table.layout ? "../../" : "", shard, number, what);
  return name;
}

}  // namespace holdfast

#include "step/key_rows.h"

#include <algorithm>
#include <cstring>

#include "base/counter_rng.h"

namespace holdfast {
namespace {

constexpr std::size_t rows_at_once = 1 << 14;

bool is_its_keys(const RowTable& table, std::uint64_t oldest, const WorkingRows& rows, std::size_t u) {
  const KeyRecord record = key_record(table, rows, u);
  return record.updates != 0 && record.key == rows.keys[u] && record.step >= oldest;
}

std::uint64_t directory_seed(const RowTable& table) {
  std::uint64_t seed = counter_rng::absorb(table.spec.seed, table.spec.table);
  if (const auto& uuid = table.identity.uuid()) {
    for (const std::uint8_t byte : *uuid) seed = counter_rng::absorb(seed, byte);
  }
  return seed;
}

// Of those rows that this writer has.
KeyShards key_shards_of(const RowTable& table) {
  const std::uint64_t num_shards = table.layout && table.layout->is_split() ? table.layout->num_shards() : 1;
  KeyShards shards{{}, {}, key_shard_seed(table.spec.seed, table.spec.table)};
  shards.piece_of.assign(num_shards, KeyShards::not_here);
  for (const RowPiece& piece : table.owned_pieces()) {
    shards.piece_of[num_shards == 1 ? 0 : piece.shard] = static_cast<std::uint32_t>(shards.pieces.size());
    shards.pieces.push_back({piece.first, piece.num_rows});
  }
  return shards;
}

}  // namespace

KeyRecord key_record(const RowTable& table, const WorkingRows& rows, std::size_t u) {
  KeyRecord record;
  std::memcpy(&record, rows.state + (u + 1) * table.spec.state_floats - key_record_floats, sizeof(record));
  return record;
}

void start_key(const RowTable& table, const WorkingRows& rows, std::size_t u) {
  best_kernels().initial_row(table.spec, rows.keys[u], rows.weights + u * table.weight_bytes());
  std::memset(rows.state + u * table.spec.state_floats, 0, table.state_bytes());
}

bool start_fresh_keys(const RowTable& table, std::uint64_t oldest, const WorkingRows& rows, std::size_t begin,
                      std::size_t end) {
  bool others = false;
  for (std::size_t u = begin; u < end; ++u) {
    if (is_its_keys(table, oldest, rows, u)) continue;
    if ((rows.rows[u] & fresh_bit) != 0) {
      start_key(table, rows, u);
    } else {
      others = true;
    }
  }
  return others;
}

void start_keys(const RowTable& table, std::uint64_t oldest, const WorkingRows& rows, std::size_t begin,
                std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    if (!is_its_keys(table, oldest, rows, u)) start_key(table, rows, u);
  }
}

Plan rows_in_store(const Plan& plan) {
  Plan stored;
  stored.spec = plan.spec;
  stored.tables.resize(plan.tables.size());
  for (std::size_t t = 0; t < plan.tables.size(); ++t) {
    const TablePlan& table = plan.tables[t];
    stored.tables[t].rows.assign(table.rows.begin(),
                                 table.rows.begin() + static_cast<std::ptrdiff_t>(table.num_placed));
    stored.tables[t].num_placed = table.num_placed;
  }
  return stored;
}

bool has_keys(const Plan& plan) {
  return std::ranges::any_of(plan.spec->tables, [](const auto& table) { return table.keys != nullptr; });
}

TableKeys keys_of(const RowTable& table, std::uint64_t step,
                  const std::function<std::vector<std::uint64_t>(std::uint64_t, std::size_t)>& touched_rows,
                  const std::function<void(const WorkingRows&, std::size_t)>& read) {
  const bool leaves_keys = table.key_policy.leaves_keys();
  TableKeys keys{std::make_shared<KeyDirectory>(table.name, key_shards_of(table), directory_seed(table), leaves_keys),
                 KeyAges(table.key_policy)};
  std::vector<std::byte> weights(rows_at_once * table.weight_bytes());
  std::vector<float> state(rows_at_once * table.spec.state_floats);
  std::vector<KeyRecord> records;
  for (std::uint64_t first = 0; first < table.num_rows;) {
    std::vector<std::uint64_t> rows = touched_rows(first, rows_at_once);
    if (rows.empty()) break;
    first = rows.back() + 1;
    const WorkingRows found{rows.data(), weights.data(), state.data()};
    read(found, rows.size());
    records.clear();
    for (std::size_t u = 0; u < rows.size(); ++u) {
      rows[u] &= ~fresh_bit;
      records.push_back(key_record(table, found, u));
      if (leaves_keys && records.back().updates != 0) keys.ages.add(records.back().step, 1);
    }
    keys.directory->add(rows, records);
  }
  keys.directory->pass(step, keys.ages.leave_behind(step));
  return keys;
}

void count_update(const RowTable& table, const WorkingRows& rows, std::size_t num_rows, std::uint64_t step,
                  KeyAges& ages) {
  for (std::size_t u = 0; u < num_rows; ++u) {
    const KeyRecord record = key_record(table, rows, u);
    if (record.updates != 0) ages.remove(record.step);
  }
  ages.add(step, num_rows);
}

}  // namespace holdfast

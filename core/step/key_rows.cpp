#include "step/key_rows.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "base/counter_rng.h"

namespace holdfast {
namespace {

constexpr std::size_t rows_at_once = 1 << 14;

bool is_its_keys(const RowTable& table, const LivingKeys& living, const WorkingRows& rows, std::size_t u) {
  const KeyRecord record = key_record(table, rows, u);
  return record.updates != 0 && record.key == rows.keys[u] && living.count(rows.rows[u], record);
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

TableAges table_ages(const RowTable& table) {
  if (!table.layout || !table.layout->is_split()) return TableAges(table.key_policy);
  return TableAges(table.key_policy, table.layout->num_shards(), table.layout->stride_bits);
}

void count_admissions(const RowTable& table, const WorkingRows& rows, std::size_t num_rows, TableKeys& keys) {
  const KeyAdmission& admission = table.key_policy.admission;
  for (std::size_t u = 0; u < num_rows; ++u) {
    const std::uint64_t updates = key_record(table, rows, u).updates;
    if (admission.admits(rows.keys[u], updates)) continue;
    ++(admission.admits(rows.keys[u], updates + 1) ? keys.admitted : keys.held_back);
  }
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

bool start_fresh_keys(const RowTable& table, const LivingKeys& living, const WorkingRows& rows, std::size_t begin,
                      std::size_t end) {
  bool others = false;
  for (std::size_t u = begin; u < end; ++u) {
    if (is_its_keys(table, living, rows, u)) continue;
    if ((rows.rows[u] & fresh_bit) != 0) {
      start_key(table, rows, u);
    } else {
      others = true;
    }
  }
  return others;
}

void start_keys(const RowTable& table, const LivingKeys& living, const WorkingRows& rows, std::size_t begin,
                std::size_t end) {
  for (std::size_t u = begin; u < end; ++u) {
    if (!is_its_keys(table, living, rows, u)) start_key(table, rows, u);
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
  TableKeys keys{
      std::make_shared<KeyDirectory>(table.name, key_shards_of(table), directory_seed(table), table.key_policy),
      table_ages(table)};
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
      const KeyRecord& record = records.back();
      if (!leaves_keys || record.updates == 0) continue;
      keys.ages.of_shard(keys.ages.shard_of(rows[u])).add(record.step, keys.ages.level_of(record.updates), 1);
    }
    keys.directory->add(rows, records);
  }
  keys.directory->pass(step, keys.ages.leave_behind(step));
  keys.left_before = keys.ages.num_left();
  return keys;
}

void count_update(const RowTable& table, const WorkingRows& rows, std::size_t num_rows, std::uint64_t step,
                  TableKeys& keys) {
  if (!table.key_policy.admission.admits_all()) count_admissions(table, rows, num_rows, keys);
  if (!table.key_policy.leaves_keys()) return;
  TableAges& ages = keys.ages;
  const bool counts_updates = table.key_policy.stay.counts_updates();
  std::vector<std::uint8_t> levels(counts_updates ? num_rows : 0);
  for (std::size_t u = 0; u < num_rows;) {
    const std::size_t shard = ages.shard_of(rows.rows[u]);  // they ascend
    KeyAges& of_shard = ages.of_shard(shard);
    std::array<std::uint64_t, KeyStay::num_levels> updated{};
    for (; u < num_rows && ages.shard_of(rows.rows[u]) == shard; ++u) {
      const KeyRecord record = key_record(table, rows, u);
      if (record.updates != 0) of_shard.remove(record.step, ages.level_of(record.updates));
      const std::uint8_t level = ages.level_of(record.updates + (record.updates != ~std::uint32_t{0} ? 1 : 0));
      ++updated[level];
      if (counts_updates) levels[u] = level;
    }
    for (std::size_t level = 0; level < updated.size(); ++level) {
      of_shard.add(step, static_cast<std::uint8_t>(level), updated[level]);
    }
  }
  if (counts_updates) keys.directory->note_levels({rows.rows, num_rows}, levels);
}

}  // namespace holdfast

// The directory of keys, and the table that it is made of, against models.
//
//   test_key_directory [SEED [CALLS]]
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/counter_rng.h"
#include "base/growing_table.h"
#include "check.h"
#include "keys/key_directory.h"
#include "keys/living_keys.h"
#include "thrown.h"

namespace holdfast {
namespace {

struct Entry {
  std::uint64_t key;
  std::uint32_t value;  // 0: empty
};
struct EntryPolicy {
  using Slot = Entry;
  using Key = std::uint64_t;
  static constexpr std::size_t full_percent = 80;
  static constexpr std::size_t grown_percent = 64;
  static constexpr std::size_t group_slots = 4;
  static constexpr std::size_t run_slots = 0;
  std::uint64_t seed = 0;
  bool all_collide = false;
  std::uint64_t hash(std::uint64_t key) const {
    return all_collide ? ~std::uint64_t{0} - key % 3 : counter_rng::absorb(seed, key);
  }
  static std::uint64_t key_of(const Entry& entry) { return entry.key; }
  static bool is_empty(const Entry& entry) { return entry.value == 0; }
};

// all_collide: hashes at the very end of the table, so that runs reach over it, while it grows as well.
void random_calls_agree_with_a_map(std::mt19937_64& random, bool all_collide) {
  GrowingTable<EntryPolicy> table({random(), all_collide});
  std::unordered_map<std::uint64_t, std::uint32_t> model;
  std::vector<std::uint64_t> keys = {0, ~std::uint64_t{0}};
  const std::size_t num_keys = all_collide ? 300 : 5000;
  while (keys.size() < num_keys) keys.push_back(keys.size() % 2 == 0 ? random() : random() % num_keys);
  for (int round = 0; round < 30; ++round) {
    const std::uint64_t percent_inserted = 20 + random() % 70;
    for (std::size_t i = 0; i < num_keys; ++i) {
      const std::uint64_t key = keys[random() % keys.size()];
      Entry* const entry = table.find(key);
      const auto known = model.find(key);
      CHECK((entry == nullptr) == (known == model.end()));
      if (entry != nullptr) CHECK(entry->key == key && entry->value == known->second);
      if (const Entry* const near = table.find_near(key, table.hash(key)); near != nullptr) {
        CHECK(entry == nullptr ? near->value == 0 : near == entry);
      }
      const auto value = static_cast<std::uint32_t>(1 + random() % 1000);
      if (random() % 100 < percent_inserted) {
        if (entry != nullptr) {
          entry->value = value;
        } else {
          table.insert({key, value});
        }
        model[key] = value;
      } else if (entry != nullptr) {
        table.erase(key);
        model.erase(known);
      }
    }
    CHECK(table.size() == model.size());
    std::unordered_map<std::uint64_t, std::uint32_t> visited;
    for (std::size_t slot = 0; slot != table.num_slots();) {
      slot = table.visit(slot, 7, [&](const Entry& entry) { CHECK(visited.emplace(entry.key, entry.value).second); });
    }
    CHECK(visited == model);
  }
}

std::vector<std::int64_t> placed(KeyDirectory& directory, const std::vector<std::int64_t>& keys) {
  std::vector<std::int64_t> rows(keys.size());
  directory.place(keys, rows.data());
  return rows;
}

// As many keys as a table of a small service has; `key_of` gives the i-th.
template <class KeyOf>
void every_key_keeps_a_row_of_its_own(const char* what, const KeyOf& key_of) {
  check::context = what;
  constexpr std::int64_t num_keys = 2'000'000;
  constexpr std::int64_t batch = 4096;
  KeyDirectory directory("t", KeyShards::whole(num_keys), 7);
  for (std::int64_t first = 0; first < num_keys; first += batch) {
    std::vector<std::int64_t> keys;
    for (std::int64_t i = first; i < std::min(num_keys, first + batch); ++i) keys.push_back(key_of(i));
    const std::vector<std::int64_t> rows = placed(directory, keys);
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == first + static_cast<std::int64_t>(i));
    // What came earlier, some of it.
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = key_of(static_cast<std::int64_t>(i) * first / batch);
    std::vector<std::int64_t> found(keys.size());
    directory.find(keys, found.data());
    for (std::size_t i = 0; i < keys.size(); ++i) CHECK(found[i] == static_cast<std::int64_t>(i) * first / batch);
  }
  CHECK(directory.num_keys() == static_cast<std::size_t>(num_keys));
  CHECK(directory.num_rows_used() == static_cast<std::uint64_t>(num_keys));
  CHECK(directory.memory_bytes() <= 25 * static_cast<std::size_t>(num_keys));
}

// Keys come and go, step by step: a window that moves over them, some of them from anywhere, half of them chosen so that
// they share all but a few bits. The model says of each row whose it is, and of each key what row it had last and when.
void keys_that_come_and_go_have_rows_of_their_own(std::mt19937_64& random, std::uint64_t num_keys,
                                                  std::uint64_t num_calls, const KeyStay& stay) {
  constexpr std::size_t of_step = 4096;
  constexpr std::uint32_t none = ~std::uint32_t{0};
  const std::uint64_t universe = 2 * num_keys;
  const KeyPolicy policy{.ttl_steps = num_keys / of_step / 4, .max_keys = num_keys / 2, .stay = stay};
  KeyDirectory directory("t", KeyShards::whole(num_keys), random(), policy);
  TableAges table_ages(policy);
  KeyAges& ages = table_ages.of_shard(0);
  LivingKeys living;
  std::vector<std::uint32_t> row_of(universe, none), step_of(universe), updates_of(universe), key_of(num_keys, none);
  std::vector<std::uint32_t> ids(of_step);
  std::vector<std::int64_t> keys(of_step), rows(of_step);
  std::uint64_t num_reused = 0, num_anew = 0;
  const auto lives = [&](std::uint32_t id) {
    return step_of[id] != 0 && living.count(0, KeyRecord{id, step_of[id], updates_of[id]});
  };
  for (std::uint32_t step = 1; std::uint64_t{step} * of_step <= num_calls; ++step) {
    const std::uint64_t window = step * std::uint64_t{of_step / 8};
    for (std::size_t i = 0; i < of_step; ++i) {
      const std::uint64_t at = random() % 16 == 0 ? random() : window + random() % (num_keys / 8);
      ids[i] = static_cast<std::uint32_t>(at % universe);
      const std::uint64_t chosen = ~((std::uint64_t{ids[i]} & 0xffff) << 48 | std::uint64_t{ids[i]} >> 16 << 12);
      keys[i] = static_cast<std::int64_t>(ids[i] % 2 == 0 ? counter_rng::mix64(ids[i]) : chosen);
    }
    directory.place(keys, rows.data());
    for (std::size_t i = 0; i < of_step; ++i) {
      const std::uint32_t id = ids[i];
      const auto row = static_cast<std::uint32_t>(rows[i]);
      const std::uint32_t before = key_of[row];
      if (lives(id)) CHECK(row_of[id] == row);
      if (before != none && before != id) {
        CHECK(row_of[before] != row || !lives(before));
        ++num_reused;
      }
      if (!lives(id) && step_of[id] != 0) ++num_anew;
      if (step_of[id] != step) {
        if (lives(id)) {
          ages.remove(step_of[id], table_ages.level_of(updates_of[id]));
          ++updates_of[id];
        } else {
          updates_of[id] = 1;
        }
        ages.add(step, table_ages.level_of(updates_of[id]), 1);
      }
      row_of[id] = row;
      key_of[row] = id;
      step_of[id] = step;
    }
    if (stay.counts_updates()) {
      std::ranges::sort(ids, {}, [&](std::uint32_t id) { return row_of[id]; });
      std::vector<std::uint64_t> updated;
      std::vector<std::uint8_t> levels;
      for (const std::uint32_t id : ids) {
        updated.push_back(row_of[id]);
        levels.push_back(KeyStay::level_of(updates_of[id]));
      }
      directory.note_levels(updated, levels);
    }
    living = table_ages.leave_behind(step);
    directory.pass(step, living);
  }
  CHECK(num_reused > num_calls / 100);
  CHECK(num_anew > num_calls / 1000);
  // Nobody's newest row was lost, either.
  for (std::uint32_t id = 0; id < universe; ++id) CHECK(!lives(id) || key_of[row_of[id]] == id);
}

void a_key_without_a_row_is_said_to_have_none() {
  KeyDirectory directory("t", KeyShards::whole(10), 1);
  placed(directory, {5, -5});
  const std::vector<std::int64_t> keys = {4, -5, 5};
  std::vector<std::int64_t> rows(3);
  directory.find(keys, rows.data());
  CHECK((rows == std::vector<std::int64_t>{KeyDirectory::no_row, 1, 0}));
  CHECK(directory.num_keys() == 2);
}

void a_table_without_a_row_left_is_full_and_keeps_its_keys() {
  KeyDirectory directory("clicks", KeyShards::whole(3), 1);
  CHECK((placed(directory, {7, 8, 7}) == std::vector<std::int64_t>{0, 1, 0}));
  CHECK(kind_thrown_by([&] { placed(directory, {9, 10}); }) == ErrorKind::full);
  CHECK((placed(directory, {9, 8, 7}) == std::vector<std::int64_t>{2, 1, 0}));
}

void a_directory_is_filled_from_records() {
  KeyDirectory directory("t", KeyShards::whole(8), 1);
  // Rows 1 and 4 were never a key's; key 50 left row 2 and came back in row 6; key 60 left row 5 for row 3.
  const std::vector<std::uint64_t> rows = {0, 2, 3, 4, 5, 6};
  const std::vector<KeyRecord> records = {{40, 9, 1}, {50, 3, 7}, {60, 8, 2}, {0, 0, 0}, {60, 7, 2}, {50, 9, 1}};
  directory.add(rows, records);
  CHECK(directory.num_keys() == 3);
  CHECK((placed(directory, {40, 50, 60}) == std::vector<std::int64_t>{0, 6, 3}));
  // The others, and only these, are free.
  std::vector<std::int64_t> free = placed(directory, {1, 2, 3, 4, 5});
  std::sort(free.begin(), free.end());
  CHECK((free == std::vector<std::int64_t>{1, 2, 4, 5, 7}));
  CHECK(kind_thrown_by([&] { placed(directory, {6}); }) == ErrorKind::full);
}

// Three owners of eight shards, whose rows lie apart; keys come, and the pool is opened again by others.
void keys_lie_in_their_shards_whoever_owns_them(std::mt19937_64& random) {
  constexpr std::uint64_t num_shards = 8;
  constexpr std::uint64_t stride = 1 << 15;
  constexpr std::uint64_t of_shard = 600;
  const std::uint64_t seed = key_shard_seed(random(), 3);
  const auto shards_of = [&](const std::vector<std::uint32_t>& owned) {
    KeyShards shards{{}, std::vector<std::uint32_t>(num_shards, KeyShards::not_here), seed};
    for (const std::uint32_t shard : owned) {
      shards.piece_of[shard] = static_cast<std::uint32_t>(shards.pieces.size());
      shards.pieces.push_back({shard * stride, of_shard});
    }
    return shards;
  };
  const std::vector<std::vector<std::uint32_t>> before = {{0, 3, 6}, {1, 2}, {4, 5, 7}},
                                                after = {{0, 1, 2, 3}, {4, 5, 6, 7}};
  std::vector<std::unique_ptr<KeyDirectory>> owners;
  for (const auto& owned : before) owners.push_back(std::make_unique<KeyDirectory>("t", shards_of(owned), random()));
  std::unordered_map<std::int64_t, std::int64_t> row_of;
  std::unordered_map<std::int64_t, std::int64_t> key_of;
  const auto owner_of = [&](const std::vector<std::vector<std::uint32_t>>& dealt, std::int64_t key) {
    const auto shard = static_cast<std::uint32_t>(key_shard(seed, static_cast<std::uint64_t>(key), num_shards));
    return static_cast<std::size_t>(
        std::ranges::find_if(dealt, [&](const auto& owned) { return std::ranges::count(owned, shard) != 0; }) -
        dealt.begin());
  };
  for (int i = 0; i < 3000; ++i) {
    const auto key = static_cast<std::int64_t>(i % 2 == 0 ? random() : random() % 500);
    const std::size_t owner = owner_of(before, key);
    const std::int64_t row = placed(*owners[owner], {key}).front();
    const std::uint64_t shard = key_shard(seed, static_cast<std::uint64_t>(key), num_shards);
    CHECK(static_cast<std::uint64_t>(row) / stride == shard && static_cast<std::uint64_t>(row) % stride < of_shard);
    CHECK(row_of.emplace(key, row).first->second == row);
    CHECK(key_of.emplace(row, key).first->second == key);
    // Others neither give it a row nor say that it has none.
    KeyDirectory& other = *owners[(owner + 1) % owners.size()];
    std::int64_t nowhere;
    CHECK(kind_thrown_by([&] { placed(other, {key}); }) == ErrorKind::data);
    CHECK(kind_thrown_by([&] { other.find(std::span(&key, 1), &nowhere); }) == ErrorKind::data);
  }
  // Dealt out anew, each has the keys of its shards, in the rows that they had.
  for (std::size_t o = 0; o < after.size(); ++o) {
    std::vector<std::uint64_t> rows;
    std::vector<KeyRecord> records;
    for (const auto& [row, key] : key_of) {
      if (owner_of(after, key) == o) rows.push_back(static_cast<std::uint64_t>(row));
    }
    std::ranges::sort(rows);
    for (const std::uint64_t row : rows) {
      records.push_back({static_cast<std::uint64_t>(key_of.at(static_cast<std::int64_t>(row))), 4, 1});
    }
    KeyDirectory directory("t", shards_of(after[o]), random());
    directory.add(rows, records);
    CHECK(directory.num_keys() == rows.size());
    std::vector<std::int64_t> keys;
    for (const KeyRecord& record : records) keys.push_back(static_cast<std::int64_t>(record.key));
    const std::vector<std::int64_t> found = placed(directory, keys);
    for (std::size_t i = 0; i < rows.size(); ++i) CHECK(static_cast<std::uint64_t>(found[i]) == rows[i]);
    // A row with a key of another shard is somebody's mistake, or worse.
    std::swap(records.front(), records.back());
    KeyDirectory damaged("t", shards_of(after[o]), random());
    CHECK(kind_thrown_by([&] { damaged.add(rows, records); }) == ErrorKind::corrupted);
  }
  // Full is a shard, by name.
  KeyDirectory small("t", {{{5 * stride, 2}}, {0}, seed}, 1);
  placed(small, {1, 2});
  CHECK(kind_thrown_by([&] { placed(small, {3}); }) == ErrorKind::full);
}

// A row's record has 32 bits for the step: where keys leave by that, one more would make all of them seem gone.
void keys_that_leave_by_steps_are_refused_beyond_the_last_that_is_counted() {
  constexpr std::uint64_t last = ~std::uint32_t{0};
  for (const std::uint64_t ttl_steps : {0, 20}) {
    KeyDirectory directory("t", KeyShards::whole(8), 1, {.ttl_steps = ttl_steps});
    directory.pass(last - KeyDirectory::steps_ahead, {});
    const std::vector<std::int64_t> rows = placed(directory, {40, 50});
    directory.pass(last - KeyDirectory::steps_ahead + 1, {});
    if (ttl_steps == 0) {
      CHECK(placed(directory, {40, 50}) == rows);
    } else {
      CHECK(kind_thrown_by([&] { placed(directory, {40, 50}); }) == ErrorKind::step);
    }
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  std::mt19937_64 random(check::seed_from(argc, argv));
  check::context = "random calls";
  random_calls_agree_with_a_map(random, false);
  check::context = "random calls, one hash";
  random_calls_agree_with_a_map(random, true);
  every_key_keeps_a_row_of_its_own("one after another", [](std::int64_t i) { return i; });
  every_key_keeps_a_row_of_its_own("scattered", [](std::int64_t i) {
    return static_cast<std::int64_t>(counter_rng::mix64(static_cast<std::uint64_t>(i)));
  });
  every_key_keeps_a_row_of_its_own("multiples of a power of two", [](std::int64_t i) { return i << 40; });
  const std::uint64_t num_calls = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 10'000'000;
  check::context = "keys that come and go";
  keys_that_come_and_go_have_rows_of_their_own(random, 200'000, num_calls, {});
  check::context = "keys that come and go, and stay for being updated often";
  keys_that_come_and_go_have_rows_of_their_own(random, 200'000, num_calls / 4, KeyStay({0, 2, 4, 8, 40}));
  check::context = "directory";
  a_key_without_a_row_is_said_to_have_none();
  a_table_without_a_row_left_is_full_and_keeps_its_keys();
  a_directory_is_filled_from_records();
  keys_lie_in_their_shards_whoever_owns_them(random);
  keys_that_leave_by_steps_are_refused_beyond_the_last_that_is_counted();
  return check::passed();
}

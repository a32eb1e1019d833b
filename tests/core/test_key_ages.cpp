// Which keys are left behind, against a look at all records; and that what a run counts from step to step is what an
// opening counts anew, whatever became of the rows that keys left.
//
//   test_key_ages [SEED [ROUNDS]]
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "keys/living_keys.h"

namespace holdfast {
namespace {

std::uint64_t score_of(const KeyPolicy& policy, const KeyRecord& record) {
  return record.step + policy.stay.of_updates(record.updates);
}

// By the words of the rule, over all records that there are.
std::vector<bool> living_by_a_look_at_all(const KeyPolicy& policy, const std::vector<KeyRecord>& rows,
                                          std::uint64_t step) {
  std::uint64_t newest = 0;
  for (const KeyRecord& row : rows) newest = std::max<std::uint64_t>(newest, row.updates != 0 ? row.step : 0);
  const auto is_young = [&](const KeyRecord& row) {
    return policy.ttl_steps == 0 || score_of(policy, row) + policy.ttl_steps >= step + 1;
  };
  std::vector<std::uint64_t> best;
  for (const KeyRecord& row : rows) {
    if (row.updates != 0 && is_young(row)) best.push_back(score_of(policy, row));
  }
  std::ranges::sort(best, std::greater());
  std::uint64_t least = 0;
  if (policy.max_keys != 0 && best.size() > policy.max_keys) {
    const std::uint64_t first_too_many = best[policy.max_keys];
    const bool all_of_it_may_go = first_too_many < newest + policy.stay.of_updates(1);
    least = all_of_it_may_go ? first_too_many + 1 : best[policy.max_keys - 1];
  }
  std::vector<bool> living;
  for (const KeyRecord& row : rows) {
    living.push_back(row.updates != 0 && is_young(row) && (score_of(policy, row) >= least || row.step == newest));
  }
  return living;
}

KeyStay random_stay(std::mt19937_64& random) {
  KeyStay::Steps steps{};
  auto of_level = static_cast<std::uint32_t>(random() % 2 == 0 ? 0 : random() % 4);
  for (std::uint32_t& of_this : steps) {
    of_this = of_level;
    of_level += static_cast<std::uint32_t>(random() % 3 == 0 ? random() % 30 : random() % 3);
  }
  return KeyStay(steps);
}

// Keys come and go in a few rows, some of which are given to others as soon as their keys are left behind.
void a_run_and_every_opening_leave_the_same_keys_behind(std::mt19937_64& random) {
  KeyPolicy policy;
  if (random() % 3 != 0) policy.max_keys = 1 + random() % 12;
  if (policy.max_keys == 0 || random() % 2 == 0) policy.ttl_steps = 1 + random() % 15;
  if (random() % 4 != 0) policy.stay = random_stay(random);
  const std::uint64_t num_keys = 4 + random() % 60;
  const std::uint64_t of_step = 1 + random() % 6;
  std::vector<KeyRecord> rows(num_keys);
  TableAges run(policy);
  LivingKeys living;
  std::vector<bool> is_living(rows.size());
  std::uint64_t most = 0;
  std::int64_t left = 0;
  for (std::uint32_t step = 1; step < 120; ++step) {
    std::uint64_t updated = 0;
    if (random() % 8 != 0) {  // else a step without the table
      const std::uint64_t middle = random() % 2 == 0 ? step / 3 : 0;
      std::vector<std::uint64_t> keys;
      while (keys.size() < of_step) {
        const std::uint64_t key = 1 + (middle + (random() % (random() % 4 == 0 ? num_keys : 5))) % num_keys;
        if (std::ranges::find(keys, key) == keys.end()) keys.push_back(key);
        if (random() % 4 == 0) break;
      }
      for (const std::uint64_t key : keys) {
        // Its own row, where it has one still; else one that was left, as often as not the one that it had.
        std::optional<std::size_t> at;
        for (std::size_t r = 0; r < rows.size(); ++r) {
          if (is_living[r] && rows[r].key == key) at = r;
        }
        if (!at) {
          std::vector<std::size_t> free;
          for (std::size_t r = 0; r < rows.size(); ++r) {
            if (!is_living[r] && (rows[r].updates == 0 || rows[r].step < step)) free.push_back(r);
          }
          if (free.empty()) {
            rows.push_back({});
            is_living.push_back(false);
            at = rows.size() - 1;
          } else {
            at = free[random() % free.size()];
          }
        }
        KeyRecord& row = rows[*at];
        const std::uint32_t before = is_living[*at] ? row.updates : 0;
        if (before != 0) run.of_shard(0).remove(row.step, run.level_of(before));
        row = {key, step, before + 1};
        run.of_shard(0).add(step, run.level_of(row.updates), 1);
        is_living[*at] = true;
        ++updated;
      }
    }
    const std::vector<bool> was_living = is_living;
    living = run.leave_behind(step);
    TableAges opening(policy);
    for (const KeyRecord& row : rows) {
      if (row.updates != 0) opening.of_shard(0).add(row.step, opening.level_of(row.updates), 1);
    }
    const LivingKeys anew = opening.leave_behind(step);
    const std::vector<bool> by_a_look = living_by_a_look_at_all(policy, rows, step);
    std::uint64_t count = 0;
    std::int64_t spared = 0;
    const KeyBounds& bounds = run.of_shard(0).bounds();
    for (std::size_t r = 0; r < rows.size(); ++r) {
      is_living[r] = rows[r].updates != 0 && living.count(r, rows[r]);
      count += is_living[r] ? 1 : 0;
      CHECK(is_living[r] == by_a_look[r]);
      CHECK(is_living[r] == (rows[r].updates != 0 && anew.count(r, rows[r])));
      CHECK(was_living[r] || !is_living[r]);
      left += was_living[r] && !is_living[r] ? 1 : 0;
      spared += is_living[r] && score_of(policy, rows[r]) < std::max(bounds.by_age, bounds.by_room) ? 1 : 0;
    }
    // An opening goes on as the run would have.
    CHECK(run.num_left() == left + spared);
    if (random() % 5 == 0) {
      run = opening;
      left = run.num_left() - spared;
    }
    most = std::max(most, count);
  }
  if (policy.max_keys != 0 && !policy.stay.counts_updates()) CHECK(most <= std::max(policy.max_keys, of_step));
}

// Keys that were updated often are not kept for good where there are too many of them.
void the_number_of_keys_has_a_bound_however_often_they_were_updated() {
  KeyStay::Steps steps{};
  for (std::size_t level = 0; level < steps.size(); ++level) steps[level] = (1u << level) - 1;
  const KeyPolicy policy{.max_keys = 10, .stay = KeyStay(steps)};
  TableAges ages(policy);
  std::vector<KeyRecord> rows(40);
  LivingKeys living;
  for (std::uint32_t step = 1; step <= 400; ++step) {
    // Forty keys take turns, four in each step.
    for (std::uint64_t i = 0; i < 4; ++i) {
      const std::size_t r = (step * 4 + i) % rows.size();
      const bool lives = rows[r].updates != 0 && living.count(r, rows[r]);
      if (lives) ages.of_shard(0).remove(rows[r].step, ages.level_of(rows[r].updates));
      rows[r] = {r, step, lives ? rows[r].updates + 1 : 1};
      ages.of_shard(0).add(step, ages.level_of(rows[r].updates), 1);
    }
    living = ages.leave_behind(step);
    std::uint64_t count = 0;
    for (std::size_t r = 0; r < rows.size(); ++r) count += rows[r].updates != 0 && living.count(r, rows[r]) ? 1 : 0;
    CHECK(count <= 10 + 4 + 4);  // those of the lowest score that stays, and of the newest step
  }
}

// Two of each four keys come all the time, the others once.
void a_key_that_was_updated_often_outlives_one_that_was_updated_later() {
  KeyStay::Steps steps{};
  std::fill(steps.begin() + 2, steps.end(), 6);
  const KeyPolicy policy{.max_keys = 3, .stay = KeyStay(steps)};
  TableAges ages(policy);
  KeyAges& of = ages.of_shard(0);
  for (std::uint32_t step = 1; step <= 4; ++step) {
    if (step > 1) of.remove(step - 1, KeyStay::level_of(step - 1));
    of.add(step, KeyStay::level_of(step), 1);
    ages.leave_behind(step);
  }
  for (std::uint32_t step = 5; step <= 8; ++step) {
    of.add(step, 0, 1);
    const LivingKeys living = ages.leave_behind(step);
    CHECK(living.count(0, {1, 4, 4}));
    CHECK(living.count(0, {2, step, 1}));
    CHECK(step < 8 || !living.count(0, {2, 5, 1}));
  }
}

void shards_count_for_themselves() {
  const KeyPolicy policy{.max_keys = 8};
  TableAges ages(policy, 4, 15);
  for (std::uint32_t step = 1; step <= 5; ++step) ages.of_shard(1).add(step, 0, 1);
  ages.of_shard(3).add(1, 0, 1);
  CHECK(ages.shard_of(3ull << 15 | 77 | fresh_bit) == 3);
  const LivingKeys living = ages.leave_behind(5);
  CHECK(living.count(1ull << 15 | 5, {1, 4, 1}) && !living.count(1ull << 15 | 5, {1, 3, 1}));
  CHECK(living.count(3ull << 15 | 5, {1, 1, 1}));
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  std::mt19937_64 random(check::seed_from(argc, argv));
  const std::uint64_t rounds = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 2000;
  check::context = "a run and openings";
  for (std::uint64_t round = 0; round < rounds; ++round) a_run_and_every_opening_leave_the_same_keys_behind(random);
  check::context = "bounds";
  the_number_of_keys_has_a_bound_however_often_they_were_updated();
  a_key_that_was_updated_often_outlives_one_that_was_updated_later();
  shards_count_for_themselves();
  return check::passed();
}

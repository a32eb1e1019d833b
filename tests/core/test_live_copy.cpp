// A live copy is the pool at the end of its step, whatever the run does between any two of its moves; and where the run
// wrote over what was still to be read, it says so. Everything here happens in a scripted order.
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "in_place/undo_follower.h"
#include "layout/pool_files.h"
#include "log_store/log_store.h"
#include "log_store/row_log_follower.h"
#include "readers/live_copy.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

// Every row of a table as rows_of_pool gives them: initial values where nothing was copied.
class Assembled {
 public:
  explicit Assembled(const LiveCopy& copy) {
    for (std::uint32_t t = 0; t < copy.tables().size(); ++t) {
      const RowTable& table = copy.tables()[t];
      weights_.emplace_back(table.num_rows * table.weight_bytes());
      state_.emplace_back(table.num_rows * table.state_bytes());
      for (std::uint64_t row = 0; row < table.num_rows; ++row) {
        initial_weights(table, {&row, 1}, weights_[t].data() + row * table.weight_bytes());
      }
    }
  }

  // Takes what `read` gives, a few rows at a time; `between` is run after each time.
  void take(const std::vector<RowTable>& tables,
            const std::function<std::size_t(std::uint32_t, std::uint64_t&, const RowValues&, std::size_t)>& read,
            const std::function<void()>& between) {
    constexpr std::size_t count = 37;
    for (std::uint32_t t = 0; t < tables.size(); ++t) {
      const RowTable& table = tables[t];
      std::vector<std::uint64_t> rows(count);
      std::vector<std::byte> values(count * value_bytes(table));
      for (std::uint64_t first = 0; first < table.num_rows;) {
        const std::size_t got = read(t, first, {rows.data(), values.data()}, count);
        for (std::size_t i = 0; i < got; ++i) {
          const std::byte* const row = values.data() + i * value_bytes(table);
          std::memcpy(weights_[t].data() + rows[i] * table.weight_bytes(), row, table.weight_bytes());
          std::memcpy(state_[t].data() + rows[i] * table.state_bytes(), row + table.weight_bytes(),
                      table.state_bytes());
        }
        between();
      }
    }
  }

  std::vector<std::byte> all() const {
    std::vector<std::byte> all;
    for (std::size_t t = 0; t < weights_.size(); ++t) {
      all.insert(all.end(), weights_[t].begin(), weights_[t].end());
      all.insert(all.end(), state_[t].begin(), state_[t].end());
    }
    return all;
  }

 private:
  std::vector<std::vector<std::byte>> weights_;
  std::vector<std::vector<std::byte>> state_;
};

// Copies while `between` goes on with the run after every move; checks the result against a run of its own.
LiveCopy::Fixed copied_exactly(const std::string& path, const std::function<void()>& between) {
  LiveCopy copy(path);
  Assembled rows(copy);
  between();
  std::optional<LiveCopy::Fixed> fixed;
  if (copy.fixes_first()) fixed = copy.fix();
  rows.take(
      copy.tables(),
      [&](std::uint32_t t, std::uint64_t& first, const RowValues& out, std::size_t count) {
        return copy.copy_rows(t, first, out, count);
      },
      between);
  if (!fixed) fixed = copy.fix();
  between();
  copy.settle();
  rows.take(
      copy.tables(),
      [&](std::uint32_t t, std::uint64_t& first, const RowValues& out, std::size_t count) {
        return copy.corrections(t, first, out, count);
      },
      [] {});
  check::context += ", of step " + std::to_string(fixed->mark.step);
  CHECK(rows.all() == reference(fixed->mark.step));
  CHECK(fixed->mark.cursor == fixed->mark.step * Script{}.num_bags);
  return std::move(*fixed);
}

void a_copy_beside_a_run_is_the_end_of_one_step() {
  for (const format::Store store : {format::Store::in_place, format::Store::log}) {
    for (const std::uint32_t interval : {1u, 3u}) {
      for (const std::uint64_t begin : {0u, 1u, 7u}) {
        for (const bool ahead : {false, true}) {
          check::context = "store " + std::to_string(static_cast<int>(store)) + ", dense interval " +
                           std::to_string(interval) + ", begun after " + std::to_string(begin) +
                           (ahead ? ", ahead" : "");
          const TemporaryDirectory directory;
          make_pool(directory.path(), 1 << 20, store);
          Run run(directory.path(), {.dense_interval = interval});
          while (run.pool.step() < begin) run.step(ahead);
          copied_exactly(directory.path(), [&] { run.step(ahead); });
        }
      }
    }
  }
}

void a_copy_of_a_pool_at_rest_is_its_newest_step() {
  for (const format::Store store : {format::Store::in_place, format::Store::log}) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    {
      Run run(directory.path(), {});
      while (run.pool.step() < 6) run.step(false);
      run.pool.close();
    }
    const LiveCopy::Fixed fixed = copied_exactly(directory.path(), [] {});
    CHECK(fixed.mark.step == 6);
    CHECK(fixed.dense && fixed.dense->tensors.size() == 500 * sizeof(double));
  }
}

// Forward passes that are thrown away take their records back, and others come in their place.
void records_that_were_taken_back_do_no_harm() {
  check::context = "thrown away";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20);
  Run run(directory.path(), {});
  while (run.pool.step() < 3) run.step(false);
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  const auto tables = superblock.row_tables();
  const InPlaceStore store(*medium, tables, false, false);
  UndoFollower follower(*medium, superblock, store);
  follower.fix(3);
  for (int turn = 0; turn < 3; ++turn) {
    auto kept = run.pool.capture(run.plan(100 + static_cast<std::uint64_t>(turn)));
    auto thrown_away = run.pool.capture(run.plan(200));
    auto behind = run.pool.capture(run.plan(300));
    run.pool.flush();  // they are sealed
    follower.follow(0);
    thrown_away.reset();
    run.pool.capture(run.plan(400));  // the one behind moves up
    run.pool.flush();
    follower.follow(0);
    kept.reset();
    behind.reset();
    run.step(false);
    follower.follow(0);
    run.step(true);
    run.step(true);
    follower.follow(0);
  }
  follower.catch_up();
  const auto expected = reference(3);
  const RowTable& table = tables[0];
  std::vector<std::uint64_t> rows(table.num_rows);
  std::vector<std::byte> values(table.num_rows * value_bytes(table));
  const std::size_t got = follower.versions().read(0, 0, {rows.data(), values.data()}, rows.size());
  CHECK(got > 100);
  for (std::size_t i = 0; i < got; ++i) {
    CHECK(std::memcmp(values.data() + i * value_bytes(table), expected.data() + rows[i] * table.weight_bytes(),
                      table.weight_bytes()) == 0);
  }
}

void a_log_that_comes_round_is_noticed() {
  check::context = "undo log";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 16384);
  Run run(directory.path(), {.grow_log = false});
  while (run.pool.step() < 3) run.step(false);
  run.pool.flush();
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  const InPlaceStore store(*medium, superblock.row_tables(), false, false);
  for (const std::uint64_t steps : {1u, 2u, 3u, 4u, 5u, 8u, 13u}) {
    UndoFollower follower(*medium, superblock, store);
    follower.fix(run.pool.step());
    for (std::uint64_t i = 0; i < steps; ++i) run.step(false);
    run.pool.flush();
    if (steps == 1) {
      follower.catch_up();
    } else if (steps > 4) {  // a record takes more than a fifth of the log
      CHECK(kind_thrown_by([&] { follower.catch_up(); }) == ErrorKind::overtaken);
    }
    run.pool.flush();
  }

  check::context = "given up before it was asked for";
  UndoFollower late(*medium, superblock, store);
  CHECK(kind_thrown_by([&] { late.fix(3); }) == ErrorKind::overtaken);
}

void a_row_log_that_comes_round_is_noticed() {
  check::context = "row log";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 96 << 10, format::Store::log);
  Run run(directory.path(), {});
  while (run.pool.step() < 3) run.step(false);
  run.pool.flush();
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  LogStore store(directory.path(), superblock.row_tables(), {.writable = false, .identity = superblock.identity()});
  store.scan();
  RowLogFollower follower(store);
  while (run.pool.step() < 60) run.step(false);
  run.pool.flush();
  const auto fix = [&] {
    try {
      follower.fix(60);
    } catch (const Error& error) {  // a record that scan had found does not hold any more
      throw Error(error.kind() == ErrorKind::corrupted ? ErrorKind::overtaken : error.kind(), error.what());
    }
  };
  CHECK(kind_thrown_by(fix) == ErrorKind::overtaken);
}

void a_pool_that_is_opened_anew_is_noticed() {
  for (const format::Store store : {format::Store::in_place, format::Store::log}) {
    check::context = "opened anew, store " + std::to_string(static_cast<int>(store));
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    {
      Run run(directory.path(), {});
      while (run.pool.step() < 3) run.step(false);
      run.pool.close();
    }
    LiveCopy copy(directory.path());
    copy.fix();
    Run run(directory.path(), {});
    run.step(false);
    run.pool.flush();
    // A follower meets a record that no checkpoint of its life has announced.
    if (store == format::Store::log) CHECK(kind_thrown_by([&] { copy.newest_step(); }) == ErrorKind::overtaken);
    CHECK(kind_thrown_by([&] { copy.settle(); }) == ErrorKind::overtaken);
  }
}

// What an earlier life logged is not in this one's chain.
void a_copy_does_not_go_back_behind_the_life_that_it_began_in() {
  check::context = "behind the life";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20);
  {
    Run run(directory.path(), {});
    while (run.pool.step() < 3) run.step(false);
    run.pool.close();
  }
  const Run run(directory.path(), {});
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  const InPlaceStore store(*medium, superblock.row_tables(), false, false);
  UndoFollower follower(*medium, superblock, store);
  CHECK(kind_thrown_by([&] { follower.fix(2); }) == ErrorKind::overtaken);
  UndoFollower at_its_beginning(*medium, superblock, store);
  at_its_beginning.fix(3);
  at_its_beginning.catch_up();
}

void a_log_that_is_made_larger_is_noticed() {
  check::context = "a larger log";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 16384);
  Run run(directory.path(), {.grow_log = true});
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  const InPlaceStore store(*medium, superblock.row_tables(), false, false);
  UndoFollower follower(*medium, superblock, store);
  follower.fix(0);
  run.step(false);
  run.pool.flush();
  CHECK(kind_thrown_by([&] { follower.catch_up(); }) == ErrorKind::overtaken);
}

// Until a step is fixed, records of steps that it cannot be are dropped as they come.
void what_was_followed_before_a_step_is_fixed_is_not_kept() {
  check::context = "followed before";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20);
  Run run(directory.path(), {});
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  const auto tables = superblock.row_tables();
  const InPlaceStore store(*medium, tables, false, false);
  UndoFollower follower(*medium, superblock, store);
  for (const std::uint64_t floor : {2u, 4u}) {
    while (run.pool.step() < floor + 1) run.step(false);
    run.pool.flush();
    follower.follow(floor);
  }
  follower.fix(5);
  while (run.pool.step() < 8) run.step(false);
  run.pool.flush();
  follower.catch_up();
  const auto expected = reference(5);
  const RowTable& table = tables[0];
  std::vector<std::uint64_t> rows(table.num_rows);
  std::vector<std::byte> values(table.num_rows * value_bytes(table));
  const std::size_t got = follower.versions().read(0, 0, {rows.data(), values.data()}, rows.size());
  CHECK(got > 50);
  for (std::size_t i = 0; i < got; ++i) {
    CHECK(std::memcmp(values.data() + i * value_bytes(table), expected.data() + rows[i] * table.weight_bytes(),
                      table.weight_bytes()) == 0);
  }
}

// A row that does not hold its checksum is one that is being written, if the log has it, and damaged if not.
void a_damaged_row_is_named_when_the_copy_settles() {
  for (const format::Store store : {format::Store::in_place, format::Store::log}) {
    check::context = "a damaged row, store " + std::to_string(static_cast<int>(store));
    const TemporaryDirectory directory;
    Script script;
    script.row_checksums = true;
    make_pool(directory.path(), 64 << 10, store, script);
    {
      Run run(directory.path(), {}, script);
      while (run.pool.step() < 40) run.step(false);
      run.pool.empty_log();
      run.pool.close();
    }
    const char* const what = store == format::Store::log ? "home" : "weights";
    std::fstream file(directory.path() + "/shard-0000/table-0000." + what,
                      std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(3);
    file.put('\x5a');
    file.close();
    LiveCopy copy(directory.path());
    if (copy.fixes_first()) copy.fix();
    Assembled(copy).take(
        copy.tables(),
        [&](std::uint32_t t, std::uint64_t& first, const RowValues& out, std::size_t count) {
          return copy.copy_rows(t, first, out, count);
        },
        [] {});
    if (!copy.fixes_first()) copy.fix();
    CHECK(kind_thrown_by([&] { copy.settle(); }) == ErrorKind::corrupted);
  }
}

void a_step_that_the_row_log_does_not_have_is_not_fixed() {
  check::context = "a step to come";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20, format::Store::log);
  Run run(directory.path(), {});
  const auto medium = open_pool_medium(directory.path());
  const Superblock superblock(*medium, false);
  {
    LiveCopy copy(directory.path());
    CHECK(!copy.fixed_record().has_value() && !copy.log_goes_on_from({format::no_position, 0}));
  }
  while (run.pool.step() < 3) run.step(false);
  run.pool.flush();
  LogStore store(directory.path(), superblock.row_tables(), {.writable = false, .identity = superblock.identity()});
  store.scan();
  RowLogFollower follower(store);
  CHECK(kind_thrown_by([&] { follower.fix(4); }) == ErrorKind::overtaken);
  follower.fix(3);
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::a_copy_beside_a_run_is_the_end_of_one_step();
  holdfast::a_copy_of_a_pool_at_rest_is_its_newest_step();
  holdfast::records_that_were_taken_back_do_no_harm();
  holdfast::a_log_that_comes_round_is_noticed();
  holdfast::a_row_log_that_comes_round_is_noticed();
  holdfast::a_pool_that_is_opened_anew_is_noticed();
  holdfast::a_copy_does_not_go_back_behind_the_life_that_it_began_in();
  holdfast::a_log_that_is_made_larger_is_noticed();
  holdfast::what_was_followed_before_a_step_is_fixed_is_not_kept();
  holdfast::a_damaged_row_is_named_when_the_copy_settles();
  holdfast::a_step_that_the_row_log_does_not_have_is_not_fixed();
  return 0;
}

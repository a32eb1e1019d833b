// What a pool refuses: verbs out of turn, plans and rows that are not its own, batches for which there is no room. Each is
// an error with its kind, and the pool is as it was: it trains on to the same rows.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t last_step = 6;
constexpr format::Store stores[] = {format::Store::in_place, format::Store::log};

std::string name_of(format::Store store) { return store == format::Store::log ? "log store" : "in place"; }

// Runs `refusals` in the middle of a run, which must end as if there had been none.
void beside_a_run(const std::string& path, const OpenOptions& options, const std::function<void(Run&)>& refusals) {
  static const std::vector<std::byte> expected = reference(last_step);
  {
    Run run(path, options);
    run.write_dense();
    while (run.pool.step() < 3) run.step(false);
    refusals(run);
    CHECK(run.pool.step() == 3);
    while (run.pool.step() < last_step) run.step(false);
    run.pool.close();
  }
  CHECK(rows_of_pool(path) == expected);
  CHECK(Reader(path).verify().empty());
}

void verbs_out_of_turn_are_refused() {
  for (const format::Store store : stores) {
    check::context = "verbs out of turn, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    beside_a_run(directory.path(), {}, [](Run& run) {
      Pool& pool = run.pool;
      const std::vector<std::uint64_t> rows = {1};
      const std::vector<std::byte> weights(8 * sizeof(float));
      const auto imports = [&] { pool.import_rows(0, rows, weights, {}); };
      const std::vector<std::byte> structure(2);
      const Pool::Dense dense{structure, {}, 0};
      CHECK(kind_thrown_by(imports) == ErrorKind::step);  // trained
      CHECK(kind_thrown_by([&] { pool.commit_dense({9, 9, 9}, dense); }) == ErrorKind::step);  // it has tables
      auto capture = pool.capture(run.plan(4));
      CHECK(kind_thrown_by([&] { pool.write_dense(dense); }) == ErrorKind::step);
      std::vector<float> out(16 * 12);
      CHECK(kind_thrown_by([&] { pool.scale_gradients(*capture, 2, out.data(), out.data()); }) == ErrorKind::config);
      capture.reset();
    });
    Pool pool(directory.path(), {});
    CHECK(pool.step() == last_step);
    const std::vector<std::byte> weights(8 * sizeof(float));
    CHECK(kind_thrown_by([&] { pool.import_rows(0, 1, weights, {}); }) == ErrorKind::step);  // in a later life, too
  }
}

// A step whose rows are updated has a dense state of its own.
void no_dense_state_is_written_beside_a_step_that_was_updated() {
  for (const format::Store store : stores) {
    check::context = "an updated step, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    {
      Run run(directory.path(), {});
      run.step(false, false);
      CHECK(kind_thrown_by([&] { run.write_dense(); }) == ErrorKind::step);
      run.commit_step(1);
      while (run.pool.step() < last_step) run.step(false);
      run.pool.close();
    }
    CHECK(rows_of_pool(directory.path()) == reference(last_step));
  }
}

void a_pool_of_dense_states_alone_goes_forward() {
  check::context = "dense states alone";
  const TemporaryDirectory directory;
  Pool::create(directory.path(), {1, 64 << 10}, {});
  const std::vector<std::byte> structure(2);
  const Pool::Dense dense{structure, {}, 0};
  {
    Pool pool(directory.path(), {});
    pool.commit_dense({3, 30, 3}, dense);
    pool.flush();
    for (const std::uint64_t step : {2u, 3u}) {
      CHECK(kind_thrown_by([&] { pool.commit_dense({step, 30, 3}, dense); }) == ErrorKind::step);
    }
    pool.commit_dense({5, 50, 5}, dense);
    pool.close();
  }
  Pool pool(directory.path(), {});
  CHECK(pool.step() == 5 && pool.dense_state()->header.cursor == 50);
}

void what_is_closed_is_refused() {
  for (const format::Store store : stores) {
    check::context = "a closed pool, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    Run run(directory.path(), {});
    run.step(false);
    const auto plan = run.plan(2);
    run.pool.close();
    run.pool.close();  // again does nothing
    std::vector<float> out(16 * 12);
    CHECK(kind_thrown_by([&] { run.pool.evaluate(*plan, out.data()); }) == ErrorKind::step);
    CHECK(kind_thrown_by([&] { run.pool.capture(plan); }) == ErrorKind::step);
    CHECK(kind_thrown_by([&] { run.pool.flush(); }) == ErrorKind::step);
    CHECK(kind_thrown_by([&] { run.pool.announce(plan); }) == ErrorKind::step);
    CHECK(kind_thrown_by([&] { run.pool.import_rows(0, 0, {}, {}); }) == ErrorKind::step);
    CHECK(kind_thrown_by([&] { run.pool.import_values(0, {}, {}); }) == ErrorKind::step);
  }
}

// A worker of a DataLoader has the pool's memory and must not have the pool.
void the_child_of_a_fork_neither_uses_nor_closes_the_pool() {
  for (const format::Store store : stores) {
    check::context = "a fork, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    beside_a_run(directory.path(), {}, [](Run& run) {
      run.pool.flush();
      const pid_t child = ::fork();
      CHECK(child >= 0);
      if (child == 0) {
        run.pool.close();
        ::_exit(kind_thrown_by([&] { run.pool.flush(); }) == ErrorKind::step ? 0 : 1);
      }
      int status = -1;
      CHECK(::waitpid(child, &status, 0) == child && status == 0);
    });
  }
}

// The medium that a dial makes slow is asked for rows, their state and their checksums: the rows are the same.
void a_dialled_pool_has_the_same_rows() {
  for (const bool row_checksums : {false, true}) {
    check::context = row_checksums ? "a dial, with checksums" : "a dial";
    const TemporaryDirectory directory;
    Script script;
    script.row_checksums = row_checksums;
    make_pool(directory.path(), 1 << 20, format::Store::in_place, script);
    OpenOptions options;
    options.dial = DialSpec{1e10, 1e10, 1e10, 1e-7, 1e-7, 64, 64, 1e-6, 1e6};
    {
      Run run(directory.path(), options, script);
      while (run.pool.step() < last_step) run.step(true);
      CHECK(run.pool.dial_counts().has_value());
      run.pool.close();
    }
    CHECK(rows_of_pool(directory.path()) == reference(last_step));
  }
}

// Plans are of the tables that they were made with, whoever is asked to look them up.
void plans_and_rows_of_another_pool_are_refused() {
  for (const format::Store store : stores) {
    check::context = "another pool's, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    Script wider;
    wider.tables[1].embedding_dim = 8;
    wider.tables[1].state_floats = state_floats_of(RowOptimizer::adam, 8);
    Script longer;
    longer.tables[0].num_embeddings = 301;
    Script more;
    more.tables.push_back(table_record("c", 50, 4, RowOptimizer::adam));
    beside_a_run(directory.path(), {}, [&](Run& run) {
      for (const Script& script : {wider, longer, more}) {
        const TemporaryDirectory of_script;
        make_pool(of_script.path(), 1 << 20, store, script);
        Run foreign(of_script.path(), {}, script);
        const auto plan = foreign.plan(4);
        std::vector<float> out(16 * 32);
        CHECK(kind_thrown_by([&] { run.pool.capture(plan); }) == ErrorKind::config);
        CHECK(kind_thrown_by([&] { run.pool.announce(plan); }) == ErrorKind::config);
        CHECK(kind_thrown_by([&] { run.pool.capture_ahead(plan); }) == ErrorKind::config);
        CHECK(kind_thrown_by([&] { run.pool.evaluate(*plan, out.data()); }) == ErrorKind::config);
        CHECK(kind_thrown_by([&] { run.pool.materialize(*plan); }) == ErrorKind::config);
      }
      run.pool.keep_rows(0, {4, 5});
      CHECK(kind_thrown_by([&] { run.pool.keep_rows(2, {1}); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { run.pool.keep_rows(0, {5, 4}); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { run.pool.keep_rows(0, {5, 5}); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { run.pool.keep_rows(0, {5, 300}); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { (void)run.pool.mapping(2); }) == ErrorKind::config);
    });
  }
}

void rows_that_do_not_fit_are_not_imported() {
  for (const format::Store store : stores) {
    check::context = "imports, " + name_of(store);
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    Run run(directory.path(), {});
    const std::vector<std::byte> weights(2 * 8 * sizeof(float));
    const std::vector<float> state(2);
    const auto refused = [&](const std::vector<std::uint64_t>& rows, std::size_t weight_bytes, std::size_t floats) {
      const auto import = [&] {
        run.pool.import_rows(0, rows, std::span(weights).first(weight_bytes), std::span(state).first(floats));
      };
      return kind_thrown_by(import) == ErrorKind::config;
    };
    CHECK(refused({5, 300}, weights.size(), 2));
    CHECK(refused({5, 6}, weights.size() - 4, 2));
    CHECK(refused({5, 6}, weights.size(), 1));
    auto capture = run.pool.capture(run.plan(1));
    CHECK(kind_thrown_by([&] { run.pool.import_rows(0, 5, weights, state); }) == ErrorKind::step);
    capture.reset();
    while (run.pool.step() < last_step) run.step(false);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(last_step));
  }
}

// A log without room for a batch is no reason to lose the run.
void a_batch_larger_than_the_log_is_refused_before_it_is_captured() {
  check::context = "a batch larger than the log";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 12288);
  beside_a_run(directory.path(), {.grow_log = false}, [&](Run& run) {
    Script script;
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> offsets = {0};
    std::vector<std::uint32_t> features = {0, 1};
    for (const auto& table : script.tables) {
      for (std::uint64_t row = 0; row < 300; ++row) {
        ids.push_back(static_cast<std::int64_t>(row % table.num_embeddings));
        offsets.push_back(static_cast<std::int64_t>(ids.size()));
      }
    }
    const auto plan = std::make_shared<Plan>(*run.plan(4));
    plan_batch({ids.data(), offsets.data(), true, nullptr, 300, features}, true, *plan);
    CHECK(kind_thrown_by([&] { run.pool.capture(plan); }) == ErrorKind::batch_too_large);
  });
}

// What cannot be captured ahead is captured in its turn.
void the_next_batch_is_captured_ahead_once_and_of_one_forward_pass() {
  check::context = "captured ahead";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20);
  beside_a_run(directory.path(), {}, [](Run& run) {
    const auto next = run.plan(5);
    CHECK(!run.pool.capture_ahead(next));  // of nothing
    {
      auto first = run.pool.capture(run.plan(4));
      auto second = run.pool.capture(run.plan(104));
      CHECK(!run.pool.capture_ahead(next));
    }
    auto only = run.pool.capture(run.plan(4));
    only.reset();
    CHECK(!run.pool.capture_ahead(next));  // its forward pass was thrown away
    only = run.pool.capture(run.plan(4));
    const auto of_others = std::make_shared<Plan>(*next);
    of_others->spec = std::make_shared<CollectionSpec>(*next->spec);
    CHECK(!run.pool.capture_ahead(of_others));  // whose rows would not be forwarded
    CHECK(run.pool.capture_ahead(next));
    CHECK(!run.pool.capture_ahead(next));
    const auto behind = run.pool.capture(run.plan(104));  // which takes the one ahead back
    CHECK(behind != nullptr);
  });
}

// With an interval dense states are written part by part; the next one waits for no step.
void a_dense_state_that_is_on_its_way_is_finished_before_the_next() {
  for (const format::Store store : stores) {
    check::context = "dense states, " + name_of(store);
    const TemporaryDirectory directory(TemporaryDirectory::Place::disk);  // memory has none on their way
    make_pool(directory.path(), 1 << 20, store);
    {
      Run run(directory.path(), {.dense_interval = 50});
      run.write_dense();
      run.step(false);
      for (std::uint64_t step = 2; step <= last_step; ++step) {
        run.step(false, false);
        const std::string structure = "{\"step\": " + std::to_string(step) + "}";
        const std::vector<double> tensor(5000, static_cast<double>(step));
        const DenseTensor dense{tensor.data(), tensor.size() * sizeof(double), 0};
        const Pool::Dense state{
            {reinterpret_cast<const std::byte*>(structure.data()), structure.size()}, {&dense, 1}, dense.bytes};
        run.pool.commit(step * 16, &state);
      }
      run.pool.flush();
      CHECK(run.pool.durable_step() == last_step);
      run.pool.close();
    }
    Pool pool(directory.path(), {});
    CHECK(pool.step() == last_step && pool.dense_state()->header.step == last_step);
    pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(last_step));
  }
}

// Steps may update nothing: what was captured ahead of such a one is taken back.
void a_step_without_an_update_takes_back_what_was_captured_ahead() {
  check::context = "a step without an update";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 1 << 20);
  {
    Run run(directory.path(), {});
    while (run.pool.step() < 3) run.step(false);
    auto capture = run.pool.capture(run.plan(4));
    CHECK(run.pool.capture_ahead(run.plan(5)));
    run.commit_step(4);
    capture.reset();
    run.pool.flush();
    CHECK(run.pool.step() == 4);
    run.pool.close();
  }
  CHECK(rows_of_pool(directory.path()) == reference(3));
  Pool pool(directory.path(), {});
  CHECK(pool.step() == 4 && pool.recovery().clean);
}

// An open-ended log, that is: the forward passes of a step are as many as its user makes. Rows that were captured move
// along, and are what they were.
void a_log_grows_beneath_the_forward_passes_of_a_step() {
  check::context = "many forward passes";
  Script script;
  script.num_passes = 40;
  for (const std::uint32_t dense_interval : {1u, 7u}) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), 4096, format::Store::in_place, script);
    Run run(directory.path(), {.dense_interval = dense_interval, .grow_log = true}, script);
    run.write_dense();
    const auto first = run.pool.capture(run.plan(1));
    std::vector<float> before(16 * 12);
    run.pool.lookup(*first, before.data());
    const std::uint64_t log_bytes = run.pool.log_bytes();
    std::vector<std::shared_ptr<Capture>> more;
    while (run.pool.log_bytes() == log_bytes) more.push_back(run.pool.capture(run.plan(100 + more.size())));
    CHECK(more.size() > 1);
    std::vector<float> after(before.size());
    run.pool.lookup(*first, after.data());
    CHECK(before == after);
    more.clear();
    while (run.pool.step() < last_step) run.step(false);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(last_step, script));
  }
}

// A step that recovery may take back.
void a_log_does_not_grow_beneath_what_recovery_needs() {
  check::context = "what recovery needs";
  const TemporaryDirectory directory;
  make_pool(directory.path(), 4096);
  Run run(directory.path(), {.dense_interval = 20, .grow_log = true});
  run.write_dense();
  run.step(false);
  const std::uint64_t log_bytes = run.pool.log_bytes();
  std::vector<std::shared_ptr<Capture>> more;
  const auto fills_it = [&] {
    while (more.size() < 1000) more.push_back(run.pool.capture(run.plan(100 + more.size())));
  };
  CHECK(kind_thrown_by(fills_it) == ErrorKind::batch_too_large);
  CHECK(!more.empty() && run.pool.log_bytes() == log_bytes);
  more.clear();
  while (run.pool.step() < last_step) run.step(false);
  run.pool.close();
  CHECK(rows_of_pool(directory.path()) == reference(last_step));
}

// A log of a given size has room for few steps. That is known in time by what a step takes, not by what a record does.
void a_log_of_a_few_steps_runs_low_in_time_whatever_a_step_is_made_of() {
  Script script;
  script.num_passes = 5;
  constexpr std::uint64_t steps = 30;
  const std::vector<std::byte> expected = reference(steps, script);
  for (const std::uint64_t log_bytes : {24 << 10, 28 << 10, 40 << 10, 56 << 10, 96 << 10}) {
    check::context = "a log of " + std::to_string(log_bytes) + " bytes";
    const TemporaryDirectory directory;
    make_pool(directory.path(), log_bytes, format::Store::in_place, script);
    Run run(directory.path(), {.dense_interval = 1000, .grow_log = false}, script);
    run.write_dense();
    while (run.pool.step() < steps) run.step(false);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == expected);
  }
}

// Whoever verifies a pool of which everything is lost wants to know so, and no list of a million rows.
void a_hundred_damaged_rows_are_named() {
  check::context = "many damaged rows";
  const TemporaryDirectory directory;
  Script script;
  script.row_checksums = true;
  make_pool(directory.path(), 1 << 20, format::Store::in_place, script);
  {
    Run run(directory.path(), {}, script);
    while (run.pool.step() < last_step) run.step(false);
    run.pool.close();
  }
  std::fstream file(directory.path() + "/shard-0000/table-0000.weights",
                    std::ios::binary | std::ios::in | std::ios::out);
  const std::vector<char> damage(300 * 8 * sizeof(float), '\x5a');
  file.write(damage.data(), static_cast<std::streamsize>(damage.size()));
  file.close();
  const auto problems = Reader(directory.path()).verify();
  CHECK(problems.size() == 100);
  for (const std::string& problem : problems) CHECK(problem.find("does not hold its checksum") != std::string::npos);
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  verbs_out_of_turn_are_refused();
  what_is_closed_is_refused();
  the_child_of_a_fork_neither_uses_nor_closes_the_pool();
  a_dialled_pool_has_the_same_rows();
  plans_and_rows_of_another_pool_are_refused();
  rows_that_do_not_fit_are_not_imported();
  a_batch_larger_than_the_log_is_refused_before_it_is_captured();
  the_next_batch_is_captured_ahead_once_and_of_one_forward_pass();
  a_dense_state_that_is_on_its_way_is_finished_before_the_next();
  no_dense_state_is_written_beside_a_step_that_was_updated();
  a_pool_of_dense_states_alone_goes_forward();
  a_step_without_an_update_takes_back_what_was_captured_ahead();
  a_log_grows_beneath_the_forward_passes_of_a_step();
  a_log_does_not_grow_beneath_what_recovery_needs();
  a_log_of_a_few_steps_runs_low_in_time_whatever_a_step_is_made_of();
  a_hundred_damaged_rows_are_named();
  return check::passed();
}

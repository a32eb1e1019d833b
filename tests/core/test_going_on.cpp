// A writer's pool goes on in another group without being opened again: from the step that the group agrees on, whatever
// was committed after it, or captured and updated and not committed. And wherever the power is cut meanwhile, that step
// can be gone back to.
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "check.h"
#include "recording.h"
#include "recording_medium.h"
#include "recording_watcher.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t log_bytes = 60 << 10;
constexpr std::uint64_t newest = 6;

Script rows_only() {
  Script script;
  script.has_dense = false;
  return script;
}

InGroup agreeing_on(std::uint64_t step) {
  return {[step](const Survey& survey) {
            CHECK(survey.rows.step >= step);
            return StepMark{step, step * rows_only().num_bags, step};
          },
          [] {}};
}

OpenOptions in_group(std::uint64_t step, std::uint64_t scratchpad_bytes = 1 << 20) {
  OpenOptions options;
  options.scratchpad_bytes = scratchpad_bytes;
  options.group = agreeing_on(step);
  return options;
}

// What the pool's rows are when it is opened at the end of `step` and trained up to `last`.
std::vector<std::byte> rows_after(const std::string& path, std::uint64_t step, std::uint64_t last) {
  {
    Run run(path, in_group(step), rows_only());
    while (run.pool.step() < last) run.step(false);
    run.pool.close();
  }
  return rows_of_pool(path);
}

// Up to `newest`, and in the next step up to the end of its update; with batches that are announced.
void train_into_a_step(Run& run, std::uint64_t recoverable) {
  while (run.pool.step() < newest) {
    run.step_ahead(2);
    run.pool.flush();  // a medium that is recorded is read by whoever writes, as a whole
  }
  run.pool.note_group_durable(recoverable);
  run.step(false, false);
  run.pool.flush();
  run.forget_plans();
}

void it_goes_on_from_any_step_that_the_group_agrees_on() {
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    for (const std::uint64_t victim_bytes : {0U, 1U, 4U << 10, 16U << 10}) {
      if (victim_bytes != 0 && store == format::Store::in_place) continue;
      for (std::uint64_t step = 3; step <= newest; ++step) {
        OpenOptions options = in_group(0, std::uint64_t{victim_bytes == 0 ? 1U << 20 : 12U << 10});
        if (victim_bytes != 0) options.victims = VictimOptions{.bytes = victim_bytes};
        const TemporaryDirectory directory;
        make_pool(directory.path(), log_bytes, store);
        {
          Run run(directory.path(), options, rows_only());
          train_into_a_step(run, 3);
          const std::uint64_t epoch = run.pool.epoch();
          run.pool.go_on(agreeing_on(step));
          CHECK(run.pool.step() == step && run.pool.row_updates() == step);
          CHECK(run.pool.epoch() == epoch + 1);
          CHECK(run.pool.recovery().rows_step == newest && run.pool.recovery().rows_restored != 0);
          while (run.pool.step() < newest + 3) run.step_ahead(2);
          run.pool.go_on(agreeing_on(newest + 3));  // with announced batches, and nothing to take back
          run.forget_plans();
          while (run.pool.step() < newest + 5) run.step(false);
          run.pool.close();
        }
        CHECK(rows_of_pool(directory.path()) == reference(newest + 5));
      }
    }
  }
}

void where_the_group_refuses_it_stays_at_its_step() {
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), log_bytes, store);
    Run run(directory.path(), in_group(0), rows_only());
    train_into_a_step(run, 3);
    const Error refusal(ErrorKind::config, "no");
    const auto refuses = [&](const InGroup& group) {
      CHECK(kind_thrown_by([&] { run.pool.go_on(group); }) == ErrorKind::config);
      CHECK(run.pool.step() == newest);
    };
    refuses({[&](const Survey&) -> StepMark { throw refusal; }, [] {}});
    refuses({agreeing_on(4).agree, [&] { throw refusal; }});
    run.pool.go_on(agreeing_on(4));
    while (run.pool.step() < newest) run.step(false);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(newest));
  }
}

void a_power_cut_at_any_point_of_it_leaves_the_step_that_it_goes_back_to() {
  constexpr std::uint64_t step = 4;
  constexpr std::uint64_t states_at_each_point = 8;
  set_num_threads(1);  // a medium that is recorded is read by whoever writes, as a whole
  std::mt19937_64 random(1);
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), log_bytes, store);
    const std::size_t unit_bytes = store == format::Store::in_place ? word_bytes : format::sector_bytes;
    Disk disk(directory.path(), unit_bytes);
    Journal journal;
    RecordingWatcher watcher(directory.path(), journal);
    std::size_t began = 0;
    {
      Run run(directory.path(), in_group(0), rows_only(),
              std::make_unique<RecordingMedium>(directory.path(), unit_bytes, &journal), &watcher);
      train_into_a_step(run, step);
      began = journal.events().size();
      run.pool.go_on(agreeing_on(step));
      run.step(false);
      run.pool.flush();
      run.pool.close();
    }
    const auto at_step = reference(step);
    std::size_t number = 0;
    std::size_t cuts = 0;
    for (const Event& event : journal.events()) {
      std::visit(disk, event);
      if (++number < began) continue;
      for (const Arrival& arrival : disk.states(states_at_each_point, random)) {
        const TemporaryDirectory left;
        disk.leave(left.path(), arrival);
        CHECK(rows_after(left.path(), step, step) == at_step);
        ++cuts;
      }
    }
    CHECK(cuts > 20);
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::it_goes_on_from_any_step_that_the_group_agrees_on();
  holdfast::where_the_group_refuses_it_stays_at_its_step();
  holdfast::a_power_cut_at_any_point_of_it_leaves_the_step_that_it_goes_back_to();
  return check::passed();
}

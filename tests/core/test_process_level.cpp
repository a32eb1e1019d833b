// A pool at level `process` whose machine goes down: its rows may be from any moment, and it says so.
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <variant>

#include "base/error.h"
#include "base/parallel.h"
#include "check.h"
#include "crash_states.h"
#include "readers/reader.h"
#include "recording_medium.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

constexpr std::uint64_t num_steps = 8;
constexpr std::uint64_t log_bytes = 16 << 10;

bool looks_closed(const std::string& directory) {
  try {
    return Reader(directory).epoch().clean != 0;
  } catch (const Error&) {
    return false;
  }
}

void an_open_pool_never_looks_closed_after_a_power_cut(std::uint64_t seed) {
  const Script script;
  const Expected expected(script, num_steps);
  const TemporaryDirectory directory;
  make_pool(directory.path(), log_bytes);
  {
    Run run(directory.path(), {.grow_log = false});
    while (run.pool.step() < 2) run.step(false);
    run.pool.close();
  }
  Disk disk(directory.path(), word_bytes);
  Journal journal;
  {
    Run run(directory.path(), {.grow_log = false}, script,
            std::make_unique<RecordingMedium>(directory.path(), word_bytes, &journal, format::Level::process));
    run.after_verb = [&] { run.pool.dense_state(); };  // waits for the background
    while (run.pool.step() < num_steps) run.step(false);
    run.pool.close();
  }
  const TemporaryDirectory cut;
  std::mt19937_64 random(seed);
  std::uint64_t num_closed = 0;
  std::uint64_t num_open = 0;
  for (const Event& event : journal.events()) {
    std::visit([&](const auto& what) { disk(what); }, event);
    if (!std::holds_alternative<Point>(event)) continue;
    for (int i = 0; i < 4; ++i) {
      disk.leave(cut.path(), disk.drawn(random));
      const bool is_closed = looks_closed(cut.path());
      ++(is_closed ? num_closed : num_open);
      if (is_closed) CHECK(rows_of_pool(cut.path()) == expected.rows(Reader(cut.path()).commit().step));
    }
  }
  CHECK(num_closed != 0 && num_open != 0);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  set_num_threads(1);
  an_open_pool_never_looks_closed_after_a_power_cut(seed);
  return check::passed();
}

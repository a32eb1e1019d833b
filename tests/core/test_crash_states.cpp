// Every state that a power cut may leave of an in-place pool on byte-addressable memory: at every fence of a short run, a
// sample of what may have arrived is made into a pool, opened, compared and trained on. And that this finds the bug where
// the protocol leaves a flush out.
//
// Usage: test_crash_states [seed [states at each point]]
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "error.h"
#include "parallel.h"
#include "pool_files.h"
#include "recording_medium.h"
#include "scripted_run.h"
#include "superblock.h"

namespace holdfast {
namespace {

constexpr std::uint64_t num_steps = 8;
constexpr std::uint64_t log_bytes = 16 << 10;  // turns over within the run

struct Shape {
  std::uint32_t dense_interval;
  bool ahead;  // the next batch is captured before this one's update
};

// What the pool is at the end of each step, whatever happened on the way there.
class Expected {
 public:
  Expected() {
    for (std::uint64_t step = 0; step <= num_steps; ++step) rows_.push_back(reference(step));
  }
  const std::vector<std::byte>& rows(std::uint64_t step) const { return rows_.at(step); }

 private:
  std::vector<std::vector<std::byte>> rows_;
};

// A life of a pool on a recording. What it stored is in the files when it is closed.
struct Life {
  Life(std::string of_pool, const Shape& of_run, std::shared_ptr<Recording> on = nullptr)
      : directory(std::move(of_pool)),
        shape(of_run),
        recording(on ? std::move(on) : std::make_shared<Recording>(directory)),
        run(directory, {.dense_interval = shape.dense_interval, .grow_log = false},
            std::make_unique<RecordingMedium>(recording)) {
    run.after_verb = [this] { run.pool.dense_state(); };  // waits for the background
  }
  void train() {
    if (!run.pool.dense_state()) run.write_dense();
    while (run.pool.step() < num_steps) run.step(shape.ahead);
  }
  void close() {
    run.pool.close();
    std::mt19937_64 random;
    recording->leave(directory, Recording::Arrived::all, random);
  }

  std::string directory;
  Shape shape;
  std::shared_ptr<Recording> recording;
  Run run;
};

// What is wrong with the pool that a power cut left; nothing where it is at the end of a step from `durable` to `begun`,
// whole, and trains on to the rows of a run without a cut.
std::string problem_of(const std::string& directory, const Shape& shape, const Expected& expected,
                       std::uint64_t durable, std::uint64_t begun) {
  try {
    {
      Life life(directory, shape);
      Run& run = life.run;
      const std::uint64_t step = run.pool.step();
      if (step < durable)
        return "step " + std::to_string(durable) + " was durable, and it is back at " + std::to_string(step);
      if (step > begun) return "it is at step " + std::to_string(step) + ", which had not begun";
      const auto dense = run.pool.dense_state();
      if (step != 0 && (!dense || dense->header.step != step)) return "no dense state of step " + std::to_string(step);
      if (step != 0) {
        const std::string structure(reinterpret_cast<const char*>(dense->structure.data()), dense->structure.size());
        if (structure != "{\"step\": " + std::to_string(step) + "}") return "dense state " + structure;
      }
      life.close();
      if (rows_of_pool(directory) != expected.rows(step))
        return "rows that are not those of step " + std::to_string(step);
    }
    Life life(directory, shape);
    life.train();
    life.close();
    if (rows_of_pool(directory) != expected.rows(num_steps)) return "it trains on to other rows";
    const auto problems = Reader(directory).verify();
    if (!problems.empty()) return "verify: " + problems.front();
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// Up to the first state that is not what it should be.
struct Found {
  std::uint64_t points = 0;
  std::uint64_t states = 0;
  std::string problem;
};

using Forgets = std::function<bool(const SeenFlush&)>;

// Trains through a recording, and cuts the power at every fence in `states_per_point` ways.
Found cut_everywhere(const Shape& shape, const Expected& expected, std::uint64_t seed, std::uint64_t states_per_point,
                     const Forgets& forgets = nullptr) {
  const TemporaryDirectory directory;
  const TemporaryDirectory cut;
  make_pool(directory.path(), log_bytes);
  const auto recording = std::make_shared<Recording>(directory.path());
  if (forgets) recording->forgets = forgets;
  Found found;
  Run* run = nullptr;
  recording->at_point = [&] {
    ++found.points;
    const std::uint64_t durable = run == nullptr ? 0 : run->pool.durable_step();
    const std::uint64_t begun = run == nullptr ? 0 : run->pool.step() + 1;
    const std::uint64_t states = recording->num_open() == 0 ? 1 : states_per_point;
    for (std::uint64_t i = 0; i < states && found.problem.empty(); ++i) {
      // Everything follows from the seed, the point and the number of the state.
      std::mt19937_64 random(seed + 1000003 * found.points + i);
      std::filesystem::remove_all(cut.path());
      std::filesystem::create_directory(cut.path());
      using Arrived = Recording::Arrived;
      recording->leave(cut.path(), i == 0 ? Arrived::none : i == 1 ? Arrived::all : Arrived::drawn, random);
      const std::string problem = problem_of(cut.path(), shape, expected, durable, begun);
      ++found.states;
      if (problem.empty()) continue;
      found.problem = "point " + std::to_string(found.points) + ", state " + std::to_string(i) + ": " + problem;
    }
  };
  Life life(directory.path(), shape, recording);
  run = &life.run;
  life.train();
  life.close();
  return found;
}

void no_power_cut_loses_a_durable_step(std::uint64_t seed, std::uint64_t states_per_point, const Expected& expected) {
  Found all;
  for (const Shape& shape : {Shape{1, false}, Shape{1, true}, Shape{3, true}}) {
    check::context = "dense interval " + std::to_string(shape.dense_interval) + (shape.ahead ? ", captured ahead" : "");
    const Found found = cut_everywhere(shape, expected, seed, states_per_point);
    if (!found.problem.empty()) check::fail(__FILE__, __LINE__, found.problem.c_str());
    CHECK(found.points > 50);
    all.points += found.points;
    all.states += found.states;
  }
  std::printf("%llu states after power cuts at %llu points\n", static_cast<unsigned long long>(all.states),
              static_cast<unsigned long long>(all.points));
}

// Each is an ordering that the protocol rests on.
struct Omission {
  const char* what;
  Forgets forgets;
};

std::vector<Omission> omissions() {
  return {
      {"the payload of undo records",
       [](const SeenFlush& f) { return f.file == log_name && f.bytes != sizeof(format::RecordHeader); }},
      {"the headers of undo records",
       [](const SeenFlush& f) { return f.file == log_name && f.bytes == sizeof(format::RecordHeader); }},
      {"rows", [](const SeenFlush& f) { return f.file.ends_with(".weights"); }},
      {"the rows' optimizer states", [](const SeenFlush& f) { return f.file.ends_with(".state"); }},
      {"which rows are touched", [](const SeenFlush& f) { return f.file.ends_with(".touched"); }},
      {"the payload of dense states", [](const SeenFlush& f) { return f.file.starts_with("dense") && f.offset != 0; }},
      {"the headers of dense states", [](const SeenFlush& f) { return f.file.starts_with("dense") && f.offset == 0; }},
      {"the superblock's records", [](const SeenFlush& f) { return f.file == superblock_name; }},
  };
}

void a_flush_that_is_left_out_is_found(std::uint64_t seed, const Expected& expected) {
  for (const Omission& omission : omissions()) {
    check::context = std::string("without flushing ") + omission.what;
    const Found found = cut_everywhere({1, false}, expected, seed, 12, omission.forgets);
    std::printf("%s: found by state %llu, %s\n", check::context.c_str(), static_cast<unsigned long long>(found.states),
                found.problem.c_str());
    CHECK(!found.problem.empty());
  }
}

bool looks_closed(const std::string& directory) {
  try {
    return Reader(directory).epoch().clean != 0;
  } catch (const Error&) {
    return false;
  }
}

// At level `process` a power cut may leave rows of any moment: then the pool must not say that it was closed.
void an_open_pool_never_looks_closed_after_a_power_cut(std::uint64_t seed, const Expected& expected) {
  check::context = "level process";
  const TemporaryDirectory directory;
  const TemporaryDirectory cut;
  make_pool(directory.path(), log_bytes);
  {
    Run run(directory.path(), {.grow_log = false});
    while (run.pool.step() < 2) run.step(false);
    run.pool.close();
  }
  const auto recording = std::make_shared<Recording>(directory.path());
  std::mt19937_64 random(seed);
  std::uint64_t num_closed = 0;
  std::uint64_t num_open = 0;
  recording->at_point = [&] {
    for (int i = 0; i < 4; ++i) {
      recording->leave(cut.path(), Recording::Arrived::drawn, random);
      const bool is_closed = looks_closed(cut.path());
      ++(is_closed ? num_closed : num_open);
      if (is_closed) CHECK(rows_of_pool(cut.path()) == expected.rows(Reader(cut.path()).commit().step));
    }
  };
  Run run(directory.path(), {.grow_log = false}, std::make_unique<RecordingMedium>(recording, format::Level::process));
  run.after_verb = [&] { run.pool.dense_state(); };
  while (run.pool.step() < num_steps) run.step(false);
  run.pool.close();
  CHECK(num_closed != 0 && num_open != 0);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  const std::uint64_t states_per_point = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 10;
  check::replay_command += " " + std::to_string(states_per_point);
  set_num_threads(1);  // which stores come before which flush is a function of the run
  const Expected expected;
  no_power_cut_loses_a_durable_step(seed, states_per_point, expected);
  a_flush_that_is_left_out_is_found(seed, expected);
  an_open_pool_never_looks_closed_after_a_power_cut(seed, expected);
  return check::passed();
}

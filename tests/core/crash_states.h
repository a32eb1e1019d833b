// Cuts the power of a short scripted run at every point of it, and judges what that leaves.
//
// - A run is recorded once; what it may leave behind follows from the recording.
// - A point is wherever something was stored or became durable, or where more was reported durable. At each one, states
//   that a cut may leave are made into pools, opened, compared and trained on.
// - At some points, and wherever something is open that was not before, the pool is opened again on a recording of its
//   own: after a power cut, after the process alone has died (all that it stored is there, and still open), or, on a
//   block device, after a sync that failed (all that it stored is there for whoever reads it, and only a part of it is
//   ever going to arrive). The power is cut at every point of that life.
// - Everything follows from the seed and the number of the point.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/error.h"
#include "base/parallel.h"
#include "check.h"
#include "layout/superblock.h"
#include "recording.h"
#include "recording_medium.h"
#include "recording_watcher.h"
#include "scripted_run.h"
#include "temporary_directory.h"

namespace holdfast {

struct Shape {
  std::string what;
  format::Store store;
  std::size_t unit_bytes;  // of what is mapped
  Script script;
  std::uint64_t num_steps;
  std::uint64_t log_bytes;
  std::uint32_t dense_interval;
  bool ahead = false;  // the next batch is captured before this one's update
  bool late_merges = false;  // none writes anything before a step waits for room
  bool gives_up_merges = false;  // the pool is closed in the middle of one
  Updates updates = Updates::by_pool;
  bool reads_in_place = false;
  bool grows_log = false;
  // Makes the medium that takes down in a journal what is stored and flushed; by default a double in memory.
  std::function<std::unique_ptr<Medium>(const std::string& directory, Journal& journal)> medium = nullptr;
};

// What a pool is at the end of each step, whatever happened on the way there.
class Expected {
 public:
  Expected(const Script& script, std::uint64_t num_steps) {
    for (std::uint64_t step = 0; step <= num_steps; ++step) rows_.push_back(reference(step, script));
  }
  const Bytes& rows(std::uint64_t step) const { return rows_.at(step); }

 private:
  std::vector<Bytes> rows_;
};

// A life of a pool, recorded where there is a journal. What it stored is in the files when it is closed.
class Life {
 public:
  Life(std::string directory, const Shape& shape, Journal* journal = nullptr, Recovery recovery = Recovery::exact)
      : shape_(shape), journal_(journal), directory_(std::move(directory)) {
    std::unique_ptr<Medium> medium;
    if (journal != nullptr && shape.medium) {
      medium = shape.medium(directory_, *journal);
    } else {
      auto recording = std::make_unique<RecordingMedium>(directory_, shape.unit_bytes, journal);
      recording_ = recording.get();
      medium = std::move(recording);
    }
    if (journal != nullptr) watcher_.emplace(directory_, *journal);
    run_.emplace(directory_,
                 OpenOptions{.recovery = recovery, .dense_interval = shape.dense_interval, .grow_log = shape.grows_log},
                 shape.script, std::move(medium), watcher_ ? &*watcher_ : nullptr);
    run_->updates = shape.updates;
    run_->reads_in_place = shape.reads_in_place;
    if (journal == nullptr) return;
    run_->after_verb = [this] { settle(); };
    journal->ask([this] { return pool().durable_step(); });
  }
  ~Life() {
    if (journal_ != nullptr) journal_->ask(nullptr);
    if (watcher_) watcher_->release_merge();
  }

  Pool& pool() { return run_->pool; }
  void train(std::uint64_t last_step) {
    if (journal_ != nullptr) settle();
    if (shape_.script.has_dense && !pool().dense_state()) run_->write_dense();
    while (pool().step() < last_step) step();
  }
  void close() {
    if (!shape_.gives_up_merges) release_merge();
    pool().close();
    if (recording_ != nullptr) recording_->save();
  }

 private:
  // Some merges stand still while further steps are committed, until a step waits for the room that they are going to
  // make.
  void step() {
    if (journal_ != nullptr) journal_->begin_step(pool().step() + 1);
    run_->step(shape_.ahead);
    if (!watcher_) return;
    const bool is_released = !shape_.late_merges && !shape_.gives_up_merges && random_() % 4 == 0;
    if (watcher_->holds_merge() && is_released) release_merge();
    if (watcher_->holds_merge()) return;
    const std::uint64_t count = shape_.late_merges ? 1 : 1 + random_() % longest_merge;
    watcher_->hold_merge_in(count, [this] {
      const Merging merging = pool().merging();
      return merging == Merging::awaited || merging == Merging::given_up;
    });
  }
  void release_merge() {
    if (!watcher_) return;
    watcher_->hold_merge_in(0);
    watcher_->release_merge();
    settle();
  }
  // So that each run is the same: returns when nothing is going on in the background.
  void settle() {
    pool().dense_state();  // waits for the commits
    while (pool().merging() != Merging::none && !watcher_->holds_merge())
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    journal_->point();
  }

  static constexpr std::uint64_t longest_merge = 12;  // writes and syncs

  Shape shape_;
  Journal* journal_;
  std::string directory_;
  std::mt19937_64 random_;
  RecordingMedium* recording_ = nullptr;
  std::optional<RecordingWatcher> watcher_;
  std::optional<Run> run_;
};

// What is wrong with the pool that a power cut left; nothing where it is at the end of a step from `durable` to
// `begun`, whole, and trains on to the rows of a run without a cut. recovery: how it is opened; relaxed, it has the dense
// state of that step or of one before.
inline std::string problem_of(const std::string& directory, const Shape& shape, const Expected& expected,
                              const Claims& claims, Recovery recovery) {
  const auto check_whole = [&](std::uint64_t step) -> std::string {
    const Reader reader(directory);
    if (rows_of(reader) != expected.rows(step)) return "rows that are not those of step " + std::to_string(step);
    const auto problems = reader.verify();
    return problems.empty() ? "" : "verify: " + problems.front();
  };
  try {
    std::uint64_t step;
    {
      Life life(directory, shape, nullptr, recovery);
      step = life.pool().step();
      if (step < claims.durable)
        return "step " + std::to_string(claims.durable) + " was durable, and it is back at " + std::to_string(step);
      if (step > claims.begun) return "it is at step " + std::to_string(step) + ", which had not begun";
      const auto dense = life.pool().dense_state();
      if (step != 0 && shape.script.has_dense) {
        if (!dense || dense->header.step != step) return "no dense state of step " + std::to_string(step);
        const std::string structure(reinterpret_cast<const char*>(dense->structure.data()), dense->structure.size());
        const std::uint64_t first = recovery == Recovery::exact ? step : 0;
        bool is_of_a_step = false;
        for (std::uint64_t of = first; of <= step; ++of) {
          is_of_a_step |= structure == "{\"step\": " + std::to_string(of) + "}";
        }
        if (!is_of_a_step) return "dense state " + structure;
      }
      life.close();
    }
    if (std::string problem = check_whole(step); !problem.empty()) return problem;
    Life life(directory, shape);
    life.train(shape.num_steps);
    life.close();
    if (std::string problem = check_whole(shape.num_steps); !problem.empty()) return "trained on, " + problem;
  } catch (const Error& error) {
    return error.what();
  }
  return {};
}

// How a life ends, and what the next one finds. failed_sync: the kernel has reported once that it could not write pages,
// takes them for written, and shows them to whoever reads the files until it wants their memory back.
enum class End : std::uint64_t { power_cut, process_death, failed_sync };

// How much is tried at each point, and at each point of a further life. A pool is opened again at every so many points
// and wherever something is open that was not before: after each of the ends by turns, or after all of them.
struct Effort {
  std::uint64_t states;
  std::uint64_t states_in_life;
  std::uint64_t points_per_life;
  bool all_ends = false;
};

// What the protocol is thought to have left out, so that the driver must find it.
struct Omission {
  const char* what;
  std::function<bool(const Flush&)> forgets = nullptr;
  std::function<void(const std::string& directory)> tampers = nullptr;  // with what a cut left
  std::string problem = {};  // only what says this is a find
  std::size_t shape = 0;  // number of the one that it is looked for in
  bool only_in_next_life = false;
};

// Of one of the superblock's two records of a kind.
inline bool is_of(const Flush& flush, const std::size_t (&offsets)[2]) {
  return flush.file == superblock_name && (flush.offset == offsets[0] || flush.offset == offsets[1]);
}

// The whole file: an epoch record is synced, whatever the level.
inline bool is_sync_of_superblock(const Flush& flush) { return flush.file == superblock_name && flush.offset == 0; }

// Up to the first state that is not what it should be.
struct Found {
  std::uint64_t points = 0;
  std::uint64_t states = 0;
  std::uint64_t lives = 0;
  std::string problem;
};

class PowerCuts {
 public:
  PowerCuts(const Shape& shape, const Expected& expected, std::uint64_t seed, const Effort& effort,
            const Omission* omission = nullptr)
      : shape_(shape), expected_(expected), seed_(seed), effort_(effort), omission_(omission) {}

  // Trains a new pool to the end, and cuts the power everywhere.
  Found everywhere() {
    const TemporaryDirectory directory;
    make_pool(directory.path(), shape_.log_bytes, shape_.store, shape_.script);
    const Disk disk(directory.path(), shape_.unit_bytes);
    Journal journal;
    {
      Life life(directory.path(), shape_, &journal);
      life.train(shape_.num_steps);
      if (shape_.gives_up_merges) CHECK(life.pool().merging() == Merging::wanted);
      life.close();
    }
    if (omission_ == nullptr || !omission_->only_in_next_life) {
      replay(disk, journal, [&](const Disk& at, const Claims& claims) { cut(at, claims, effort_.states, ""); });
    }
    std::uint64_t number = 0;
    std::set<Disk::Places> seen;
    replay(disk, journal, [&](const Disk& at, const Claims& claims) {
      const bool is_new = seen.insert(at.open_places()).second;
      if (++number % effort_.points_per_life != 0 && !is_new) return;
      const std::uint64_t num_ends = shape_.store == format::Store::log ? 3 : 2;
      for (std::uint64_t i = 0; i < (effort_.all_ends ? num_ends : 1); ++i) {
        cut_next_life(at, claims, static_cast<End>((seed_ + number + i) % num_ends));
      }
    });
    return found_;
  }

 private:
  using AtPoint = std::function<void(const Disk& disk, const Claims& claims)>;

  // What the journal makes of the disk, stopped at every point where something is new.
  void replay(Disk disk, const Journal& journal, const AtPoint& at_point) {
    bool is_new = true;
    bool is_flushed = false;
    Claims claims;
    for (const Event& event : journal.events()) {
      if (!found_.problem.empty()) return;
      if (const auto* point = std::get_if<Point>(&event)) {
        if (is_new || point->claims != claims) at_point(disk, point->claims);
        claims = point->claims;
        is_new = false;
        continue;
      }
      const auto* flush = std::get_if<Flush>(&event);
      if (flush != nullptr && omission_ != nullptr && omission_->forgets && omission_->forgets(*flush)) continue;
      if (flush != nullptr) is_flushed = true;
      if (std::holds_alternative<Store>(event)) is_new = true;
      if (std::holds_alternative<Fence>(event)) is_new |= std::exchange(is_flushed, false);
      std::visit([&](const auto& what) { disk(what); }, event);
    }
  }

  void cut(const Disk& disk, const Claims& claims, std::uint64_t most, const std::string& where) {
    ++found_.points;
    std::mt19937_64 random(seed_ + 1000003 * found_.points);
    for (const Arrival& arrival : disk.states(most, random)) {
      leave(disk, arrival);
      if (omission_ != nullptr && omission_->tampers) omission_->tampers(left_.path());
      const Recovery recovery = found_.states % 3 == 2 ? Recovery::relaxed : Recovery::exact;
      std::string problem = problem_of(left_.path(), shape_, expected_, claims, recovery);
      if (!problem.empty() && recovery == Recovery::relaxed) problem += " (relaxed recovery)";
      ++found_.states;
      if (problem.empty()) continue;
      if (omission_ != nullptr && problem.find(omission_->problem) == std::string::npos) continue;
      found_.problem = where + "point " + std::to_string(found_.points) + ": " + problem;
      return;
    }
  }

  // The pool is opened again, trained a step, closed.
  void cut_next_life(const Disk& disk, const Claims& claims, End end) {
    if (!found_.problem.empty()) return;
    ++found_.lives;
    std::mt19937_64 random(seed_ + 1000003 * found_.points + found_.lives);
    const Disk begins_with = leave_at_end(disk, end, random);
    const std::array ends = {"a power cut, ", "the process's death, ", "a failed sync, "};
    const std::string where = "life " + std::to_string(found_.lives) + ", after " + ends[static_cast<std::size_t>(end)];
    Journal journal(claims);
    try {
      Life life(left_.path(), shape_, &journal);
      life.train(std::min(shape_.num_steps, life.pool().step() + 1));
      life.close();
    } catch (const Error& error) {
      found_.problem = where + error.what();
      return;
    }
    replay(begins_with, journal,
           [&](const Disk& at, const Claims& now) { cut(at, now, effort_.states_in_life, where); });
  }

  // Makes the files that the next life finds, and returns the disk below them.
  Disk leave_at_end(const Disk& disk, End end, std::mt19937_64& random) {
    if (end == End::process_death) {
      leave(disk, disk.all());
      return disk.without_flushes();
    }
    leave(disk, disk.drawn(random));
    Disk arrived(left_.path(), shape_.unit_bytes);
    if (end == End::failed_sync) leave(disk, disk.all());
    return arrived;
  }

  void leave(const Disk& disk, const Arrival& arrival) {
    std::filesystem::remove_all(left_.path());
    std::filesystem::create_directory(left_.path());
    disk.leave(left_.path(), arrival);
  }

  const Shape& shape_;
  const Expected& expected_;
  std::uint64_t seed_;
  Effort effort_;
  const Omission* omission_;
  TemporaryDirectory left_;
  Found found_;
};

// What a test of power cuts does of its arguments: see cut_power.
class Share {
 public:
  // Says how to do it again.
  Share(int argc, char** argv, std::uint64_t seed, Effort& effort) {
    if (argc > 2) effort.states = std::strtoull(argv[2], nullptr, 10);
    if (argc > 3) effort.points_per_life = std::strtoull(argv[3], nullptr, 10);
    num_parts_ = argc > 5 ? std::strtoull(argv[5], nullptr, 10) : 1;
    CHECK(num_parts_ > 0);
    part_ = argc <= 5                             ? 0
            : std::strcmp(argv[4], "random") == 0 ? seed % num_parts_
                                                  : std::strtoull(argv[4], nullptr, 10);
    CHECK(part_ < num_parts_);
    for (const std::uint64_t argument : {effort.states, effort.points_per_life, part_, num_parts_}) {
      check::replay_command += ' ';
      check::replay_command += std::to_string(argument);
    }
  }
  // Of everything in turn, whether the next is this part's.
  bool has_next() { return number_++ % num_parts_ == part_; }

 private:
  std::uint64_t part_;
  std::uint64_t num_parts_;
  std::uint64_t number_ = 0;
};

// All of a test: no cut of a run of these shapes loses a step that was reported durable, and each omission is found, in
// a run of the first shape. Arguments: the seed, how many states are tried at each point, at every how many points the
// pool is opened again, and which of how many parts of all this is done (0 1: everything; random: one that the seed says).
inline int cut_power(int argc, char** argv, const std::vector<Shape>& shapes, const std::vector<Omission>& omissions) {
  const std::uint64_t seed = check::seed_from(argc, argv);
  Effort effort{4, 1, 100};
  Share share(argc, argv, seed, effort);
  effort.states_in_life = 1 + effort.states / 25;
  set_num_threads(1);  // which stores come before which flush is a function of the run
  const auto print = [](const Found& found, const char* how) {
    std::printf("%s: %llu states at %llu points, of %llu further lives%s\n", check::context.c_str(),
                static_cast<unsigned long long>(found.states), static_cast<unsigned long long>(found.points),
                static_cast<unsigned long long>(found.lives), how);
  };
  for (const Shape& shape : shapes) {
    if (!share.has_next()) continue;
    check::context = shape.what;
    const Expected expected(shape.script, shape.num_steps);
    const Found found = PowerCuts(shape, expected, seed, effort).everywhere();
    if (!found.problem.empty()) check::fail(__FILE__, __LINE__, found.problem.c_str());
    CHECK(found.points > 50);
    print(found, "");
    std::fflush(stdout);
  }
  for (const Omission& omission : omissions) {
    if (!share.has_next()) continue;
    check::context = std::string("without ") + omission.what;
    const Effort enough{8, 4, effort.points_per_life, true};
    const Shape& shape = shapes[omission.shape];
    const Expected expected(shape.script, shape.num_steps);
    // Not every run comes to the state that tells, see Journal.
    constexpr std::uint64_t most_runs = 3;
    Found found;
    for (std::uint64_t run = 0; run < most_runs && found.problem.empty(); ++run) {
      found = PowerCuts(shape, expected, seed + run, enough, &omission).everywhere();
    }
    print(found, (": " + found.problem).c_str());
    std::fflush(stdout);
    CHECK(!found.problem.empty());
  }
  return check::passed();
}

}  // namespace holdfast

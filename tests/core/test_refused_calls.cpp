// One system call fails, at every place where the core makes one: making a pool, opening, training, merging and closing
// it, copying it beside its run, reading and verifying it, planning its repair. In both stores, and for a row log with
// io_urings and without. life_in_need.h says what must hold of a pool that is written; whoever only reads gets a typed
// error or what is there, and changes nothing.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "check.h"
#include "layout/unpublished.h"
#include "life_in_need.h"
#include "readers/live_copy.h"
#include "readers/repair.h"
#include "readers/superblock_repair.h"
#include "refused_calls.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

using Files = std::map<std::string, std::string>;

// Which calls are refused: one of `every` on average, each in a run of its own, and what they end in.
class Numbers {
 public:
  Numbers(std::uint64_t seed, std::uint64_t every) : random_(seed), every_(every) {}
  std::uint64_t after(std::uint64_t number) { return number + 1 + (every_ == 1 ? 0 : random_() % (2 * every_ - 1)); }
  int error() {
    constexpr int errors[] = {EIO, EIO, ENOSPC, EINTR, EACCES};
    return errors[random_() % std::size(errors)];
  }

 private:
  std::mt19937_64 random_;
  std::uint64_t every_;
};

struct Tally {
  std::uint64_t calls = 0;
  std::uint64_t told = 0;  // somebody was: otherwise the core did without
  std::map<std::string, std::uint64_t> by_name;

  void add(const char* call, bool was_told) {
    ++calls;
    told += was_told ? 1 : 0;
    ++by_name[call];
  }
  void print(const char* what) const {
    std::printf("%s: %llu calls refused, %llu of them said so:", what, static_cast<unsigned long long>(calls),
                static_cast<unsigned long long>(told));
    for (const auto& [name, count] : by_name)
      std::printf(" %s %llu", name.c_str(), static_cast<unsigned long long>(count));
    std::printf("\n");
    std::fflush(stdout);
  }
};

// Runs `attempt` again and again, each time with another call refused, until there are no more. It gets the number, and
// says whether somebody was told.
Tally everywhere(const std::string& what, Numbers& numbers, const std::function<bool(std::uint64_t, int)>& attempt) {
  Tally tally;
  for (std::uint64_t number = numbers.after(0);; number = numbers.after(number)) {
    const int error = numbers.error();
    check::context = what + ", call " + std::to_string(number) + " ends in " + std::strerror(error);
    fail_if_it_hangs();
    const bool told = attempt(number, error);
    if (refused::call == nullptr) return tally;
    tally.add(refused::call, told);
  }
}

// What `work` throws, and nothing where it throws nothing; while one call is refused.
std::string refusing(std::uint64_t number, int error, const std::function<void()>& work) {
  std::string said;
  refused::begin(number, error);
  try {
    work();
  } catch (const Error& thrown) {
    said = thrown.what();
  } catch (const std::bad_alloc& thrown) {
    said = thrown.what();
  } catch (const std::exception& thrown) {
    refused::end();
    check::context += std::string(" (") + refused::call.load() + "), which threw '" + thrown.what() + "'";
    check::fail(__FILE__, __LINE__, "an error has a type of the pool's");
  }
  refused::end();
  if (refused::call != nullptr) check::context += std::string(" (") + refused::call.load() + ")";
  return said;
}

Tally lives(const Shape& shape, Numbers& numbers) {
  const auto expected = rows_of_steps(shape.script());
  const TemporaryDirectory before;
  make_pool_of_first_steps(before.path(), shape);
  return everywhere(shape.what, numbers, [&](std::uint64_t number, int error) {
    const TemporaryDirectory directory;
    std::filesystem::copy(before.path(), directory.path(), std::filesystem::copy_options::recursive);
    Outcome outcome;
    refusing(number, error, [&] {
      const LifeInNeed life(directory.path(), shape);
      outcome = life.outcome();
      refused::end();
    });
    check_whole(directory.path(), shape, outcome, expected, true);
    return !outcome.error.empty();
  });
}

// A pool is made, or can be made there by who comes next.
Tally makings(const Shape& shape, Numbers& numbers) {
  const auto expected = reference(2, shape.script());
  return everywhere(std::string("making a pool, ") + shape.what, numbers, [&](std::uint64_t number, int error) {
    const TemporaryDirectory directory;
    const std::string said =
        refusing(number, error, [&] { make_pool(directory.path(), shape.log_bytes, shape.store, shape.script()); });
    if (!said.empty()) check::context += ", which said '" + said + "'";
    const bool is_there = std::filesystem::exists(directory.path() + "/pool.holdfast");
    CHECK(is_there || !said.empty());
    if (!is_there) make_pool(directory.path(), shape.log_bytes, shape.store, shape.script());
    Run run(directory.path(), {}, shape.script());
    while (run.pool.step() < 2) run.step(false);
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == expected);
    return !said.empty();
  });
}

Files files_of(const std::string& directory) {
  Files files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
    if (!entry.is_regular_file()) continue;
    std::ifstream file(entry.path(), std::ios::binary);
    files[entry.path().string()] = {std::istreambuf_iterator<char>(file), {}};
  }
  return files;
}

void overwrite(const std::string& path, std::uint64_t offset, std::size_t bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(std::string(bytes, '\x5a').data(), static_cast<std::streamsize>(bytes));
  CHECK(file.good());
}

// What a copy of a pool gives, taken while its writer has it open.
std::size_t copied_rows(const std::string& path) {
  LiveCopy copy(path);
  std::size_t rows = 0;
  const auto take = [&](auto stream) {
    constexpr std::size_t count = 64;
    for (std::uint32_t t = 0; t < copy.tables().size(); ++t) {
      const RowTable& table = copy.tables()[t];
      std::vector<std::uint64_t> numbers(count);
      std::vector<std::byte> values(count * value_bytes(table));
      for (std::uint64_t first = 0; first < table.num_rows;) {
        rows += (copy.*stream)(t, first, {numbers.data(), values.data()}, count);
      }
    }
  };
  if (copy.fixes_first()) copy.fix();
  take(&LiveCopy::copy_rows);
  if (!copy.fixes_first()) copy.fix();
  copy.settle();
  take(&LiveCopy::corrections);
  return rows;
}

// Whoever only reads: what they find is what there is, or they say that they could not.
Tally looks(const Shape& shape, Numbers& numbers) {
  const TemporaryDirectory directory;
  const std::string& path = directory.path();
  make_pool(path, 1 << 20, shape.store, shape.script());
  std::size_t num_copied = 0;
  Tally tally;
  {
    Run run(path, {}, shape.script());
    run.write_dense();
    while (run.pool.step() < first_steps) run.step(false);
    run.pool.flush();
    num_copied = copied_rows(path);
    tally =
        everywhere(std::string("copying a pool in use, ") + shape.what, numbers, [&](std::uint64_t number, int error) {
          std::size_t rows = num_copied;
          const auto said = refusing(number, error, [&] { rows = copied_rows(path); });
          CHECK(rows == num_copied);
          return !said.empty();
        });
    run.pool.close();
  }
  const auto expected = rows_of_pool(path);
  const auto before = files_of(path);
  const auto add = [&](const Tally& more) {
    tally.told += more.told;
    tally.calls += more.calls;
    for (const auto& [name, count] : more.by_name) tally.by_name[name] += count;
  };
  add(everywhere(std::string("reading, ") + shape.what, numbers, [&](std::uint64_t number, int error) {
    auto rows = expected;
    std::vector<std::string> problems;
    const auto said = refusing(number, error, [&] {
      const Reader reader(path);
      rows = rows_of(reader);
      problems = reader.verify();
      (void)reader.dense_state();
    });
    CHECK(rows == expected);
    CHECK(files_of(path) == before);
    return !said.empty() || !problems.empty();
  }));
  return tally;
}

// Where the ground or the boot cannot be told, a plan is the same and trusts less.
std::string without_trust(std::string plan) {
  for (const char* doubt : {"; whether the machine has been down", "; the machine has been down"}) {
    const std::size_t at = plan.find(doubt);
    if (at != std::string::npos) plan.erase(at, plan.find('\n', at) - at);
  }
  return plan;
}

// Everything that the planners of a repair say of a pool.
std::string planned(const std::string& path) {
  std::string plan;
  const auto superblock = plan_superblock_repair(path);
  if (superblock) return superblock->name + ": " + superblock->why;
  for (const RepairPlan& part : {plan_label_repair(path), plan_repair(path)}) {
    for (const Edit& edit : part.edits) plan += edit.file + " " + std::to_string(edit.offset) + ": " + edit.why + "\n";
    for (const std::string& refusal : part.refusals) plan += refusal + "\n";
  }
  return plan;
}

Tally plans(const Shape& shape, Numbers& numbers) {
  Tally tally;
  for (const char* damage : {"a dense slot", "the superblock", "its name", "a pool that was never published"}) {
    const TemporaryDirectory directory;
    const std::string& path = directory.path();
    make_pool_of_first_steps(path, shape);
    const std::string what = damage;
    if (what == "a dense slot") overwrite(path + "/dense-0", 0, 64);
    if (what == "the superblock") overwrite(path + "/pool.holdfast", 0, 8192);
    if (what == "its name") std::filesystem::remove(path + "/pool.holdfast");
    if (what == "a pool that was never published") unpublish(path);
    const auto plan_of = [&] {
      try {
        return planned(path);
      } catch (const Error& error) {
        return std::string(error.what());
      }
    };
    const std::string expected = plan_of();
    const auto before = files_of(path);
    const Tally more = everywhere(std::string("a repair is planned, ") + shape.what + ", damage to " + damage, numbers,
                                  [&](std::uint64_t number, int error) {
                                    std::string plan = expected;
                                    const auto said = refusing(number, error, [&] { plan = planned(path); });
                                    CHECK(!said.empty() || without_trust(plan) == without_trust(expected));
                                    CHECK(files_of(path) == before);
                                    return !said.empty() && said != expected;
                                  });
    tally.told += more.told;
    tally.calls += more.calls;
    for (const auto& [name, count] : more.by_name) tally.by_name[name] += count;
  }
  return tally;
}

}  // namespace
}  // namespace holdfast

// Arguments: the seed; of how many calls one is refused (1: every one, each in a run of its own).
int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  const std::uint64_t every = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 10;
  check::replay_command += " " + std::to_string(every);
  Numbers numbers(seed, every);
  set_num_threads(2);
  for (const bool has_rings : {true, false}) {
    refused::has_rings = has_rings;
    for (const Shape& shape : shapes) {
      if (!has_rings && shape.store == format::Store::in_place) continue;
      std::printf("%s\n", has_rings ? "" : "without io_uring");
      const Tally lived = lives(shape, numbers);
      lived.print(shape.what);
      makings(shape, numbers).print("  making it");
      looks(shape, numbers).print("  copying and reading it");
      plans(shape, numbers).print("  planning its repair");
      CHECK(every > 20 || lived.told > 20 / every);
    }
  }
  return check::passed();
}

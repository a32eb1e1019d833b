// A row log on a medium of its own: the pool trains, recovers and is verified over the link; what is refused changes
// nothing; what an attempt at a pool left is removed at both ends, and nothing else is.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "layout/row_log_place.h"
#include "layout/unpublished.h"
#include "media/ground.h"
#include "pool/pool.h"
#include "readers/reader.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

constexpr std::uint64_t log_bytes = 1 << 20;

struct Places {
  TemporaryDirectory rows{TemporaryDirectory::Place::disk};
  TemporaryDirectory logs;

  void make_pool() const {
    PoolOptions options{.seed = 1, .log_bytes = log_bytes, .store = format::Store::log};
    options.log_directory = logs.path();
    Pool::create(rows.path(), options, Script{}.tables);
  }
  std::vector<std::string> names_of_logs() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(logs.path())) {
      if (entry.path().extension() == ".row-log") names.push_back(entry.path().filename().string());
    }
    return names;
  }
};

void train(const std::string& path, std::uint64_t steps) {
  OpenOptions options;
  options.scratchpad_bytes = 1 << 20;
  Run run(path, options);
  for (std::uint64_t i = 0; i < steps; ++i) run.step(false);
  run.pool.close();
}

// Rows are those of a pool that has its log beside them.
void rows_are_the_same() {
  check::context = "a log elsewhere";
  const Places places;
  const TemporaryDirectory beside(TemporaryDirectory::Place::disk);
  places.make_pool();
  CHECK(places.names_of_logs().size() == 1);
  CHECK(fs::is_symlink(places.rows.path() + "/" + row_log_name));
  CHECK(row_log_path(places.rows.path()) == places.logs.path() + "/" + places.names_of_logs().front());
  CHECK(fs::file_size(row_log_path(places.rows.path())) > log_bytes);
  make_pool(beside.path(), log_bytes, format::Store::log);
  for (const std::string& path : {places.rows.path(), beside.path()}) {
    train(path, 12);
    train(path, 5);
  }
  const Reader there(places.rows.path());
  CHECK(there.verify().empty());
  const Reader here(beside.path());
  CHECK(rows_of(there) == rows_of(here));
}

// A link that leads nowhere, or to the log of another pool: nothing is opened, made or changed.
void what_is_not_its_log_is_refused() {
  check::context = "not its log";
  const Places mine, other;
  mine.make_pool();
  other.make_pool();
  train(mine.rows.path(), 3);
  const std::string link = mine.rows.path() + "/" + row_log_name;
  const std::string log = row_log_path(mine.rows.path());
  const auto open = [&] { const Pool pool(mine.rows.path(), OpenOptions{}); };
  fs::rename(log, log + ".away");
  CHECK(kind_thrown_by(open) == ErrorKind::corrupted);
  CHECK(kind_thrown_by([&] { const Reader reader(mine.rows.path()); }) == ErrorKind::corrupted);
  CHECK(!fs::exists(log));
  fs::rename(log + ".away", log);
  fs::remove(link);
  fs::create_symlink(row_log_path(other.rows.path()), link);
  CHECK(kind_thrown_by(open) == ErrorKind::corrupted);
  fs::remove(link);
  fs::create_symlink(log, link);
  train(mine.rows.path(), 1);
  // A log that was moved beside the rows, or behind a relative link, is found there as well.
  fs::remove(link);
  fs::copy_file(log, link);
  fs::remove(log);
  train(mine.rows.path(), 1);
  fs::rename(link, mine.rows.path() + "/moved.row-log");
  fs::create_symlink("moved.row-log", link);
  train(mine.rows.path(), 1);
}

void it_cannot_be_placed_where_nothing_is() {
  check::context = "no such directory";
  const Places places;
  PoolOptions options{.seed = 1, .log_bytes = log_bytes, .store = format::Store::log};
  options.log_directory = places.logs.path() + "/absent";
  const auto make = [&] { Pool::create(places.rows.path(), options, Script{}.tables); };
  CHECK(kind_thrown_by(make) == ErrorKind::config);
  CHECK(!fs::exists(options.log_directory));
  options.log_directory = places.logs.path();
  make();  // what the attempt left is gone
  options.store = format::Store::in_place;
  const TemporaryDirectory rows;
  CHECK(kind_thrown_by([&] { Pool::create(rows.path(), options, Script{}.tables); }) == ErrorKind::config);
  CHECK(fs::is_empty(rows.path()) || !is_unpublished(rows.path()));
}

// An attempt that died is made anew, and takes its log with it; a link to anything else goes alone.
void leftovers_go_at_both_ends() {
  check::context = "leftovers";
  const Places places;
  places.make_pool();
  const std::string first = places.names_of_logs().front();
  unpublish(places.rows.path());
  places.make_pool();
  CHECK(places.names_of_logs().size() == 1);
  CHECK(places.names_of_logs().front() != first);  // the pool is another one

  unpublish(places.rows.path());
  const std::string link = places.rows.path() + "/" + row_log_name;
  const std::string log = row_log_path(places.rows.path());
  const std::string precious = places.logs.path() + "/precious";
  std::ofstream(precious) << "somebody's";
  fs::remove(log);
  fs::remove(link);
  fs::create_symlink(precious, link);
  places.make_pool();
  CHECK(fs::file_size(precious) == 10);
  unpublish(places.rows.path());
  fs::remove(row_log_path(places.rows.path()));  // as where the power went before the log was made
  places.make_pool();
  train(places.rows.path(), 1);
}

// A copy of the directory has a link to the same log: it is not opened, and the pool is as it was. A directory that was
// moved is, and so is a copy that has a copy of the log.
void a_copy_does_not_write_to_the_log_of_the_pool() {
  check::context = "a copy";
  const Places places;
  places.make_pool();
  train(places.rows.path(), 5);
  const TemporaryDirectory around(TemporaryDirectory::Place::disk);
  const std::string copy = around.path() + "/copy", moved = around.path() + "/moved";
  fs::copy(places.rows.path(), copy, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  const std::vector<std::byte> rows = rows_of_pool(places.rows.path());
  const auto open = [&] { const Pool pool(copy, OpenOptions{}); };
  CHECK(kind_thrown_by(open) == ErrorKind::corrupted);
  CHECK(kind_thrown_by([&] { const Reader reader(copy); }) == ErrorKind::corrupted);
  train(places.rows.path(), 2);
  fs::remove_all(copy);

  const std::vector<std::byte> trained = rows_of_pool(places.rows.path());
  fs::copy(places.rows.path(), copy, fs::copy_options::recursive);  // links are followed
  train(copy, 1);
  CHECK(rows_of_pool(places.rows.path()) == trained);
  CHECK(trained != rows);

  fs::copy(places.rows.path(), moved, fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  fs::remove_all(places.rows.path());
  CHECK(rows_of_pool(moved) == trained);
  train(moved, 1);
  fs::copy(moved, places.rows.path(), fs::copy_options::recursive | fs::copy_options::copy_symlinks);
  CHECK(kind_thrown_by([&] { const Pool pool(places.rows.path(), OpenOptions{}); }) == ErrorKind::corrupted);
  train(moved, 1);
}

// A pool whose log is in memory does not outlive power, wherever its rows are.
void the_weaker_medium_decides() {
  check::context = "level";
  const Places places;
  if (!ground_of(places.logs.path()).is_memory) return;
  const TemporaryDirectory beside(TemporaryDirectory::Place::disk);
  make_pool(beside.path(), log_bytes, format::Store::log);
  places.make_pool();
  CHECK(Reader(places.rows.path()).level() == format::Level::process);
  CHECK(Reader(places.rows.path()).header().level == static_cast<std::uint32_t>(format::Level::process));
  const bool is_on_disk = ground_of(beside.path()).outlives_power;
  CHECK((Reader(beside.path()).level() == format::Level::power) == is_on_disk);
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  rows_are_the_same();
  what_is_not_its_log_is_refused();
  it_cannot_be_placed_where_nothing_is();
  leftovers_go_at_both_ends();
  a_copy_does_not_write_to_the_log_of_the_pool();
  the_weaker_medium_decides();
  return 0;
}

// Pools that cannot be made, and what lies where one is being made: only what is a pool's by name is a part of it, and
// nothing that might have been trained is taken back.
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "layout/unpublished.h"
#include "pool/pool.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

using Table = format::TableRecord;

void touch(const std::string& path) {
  fs::create_directories(fs::path(path).parent_path());
  std::ofstream(path) << "somebody's";
  CHECK(fs::exists(path));
}

std::map<std::string, std::uintmax_t> sizes_in(const std::string& directory) {
  std::map<std::string, std::uintmax_t> sizes;
  for (const auto& entry : fs::recursive_directory_iterator(directory)) {
    if (entry.is_regular_file() && entry.path().filename() != "lock") {
      sizes[entry.path().string()] = entry.file_size();
    }
  }
  return sizes;
}

// Nothing of a pool is left, and one can be made there.
void refuses_to_make(const char* what, const PoolOptions& options, const std::vector<Table>& tables) {
  check::context = what;
  const TemporaryDirectory root;
  const std::string path = root.path() + "/writers-0001/0000";  // whose shards lie two directories above
  fs::create_directories(path);
  CHECK(kind_thrown_by([&] { Pool::create(path, options, tables); }) == ErrorKind::config);
  CHECK(pool_parts(root.path()).empty() && !is_unpublished(path));
  Pool::create(path, {1, 64 << 10}, Script{}.tables);
}

void what_makes_no_sense_is_not_made() {
  const auto with = [](const std::function<void(Table&)>& change) {
    auto tables = Script{}.tables;
    for (Table& table : tables) table.table_shards = 1;
    change(tables[1]);
    return tables;
  };
  const auto whole = [](const std::function<void(Table&)>& change) {
    auto tables = Script{}.tables;
    change(tables[1]);
    return tables;
  };
  const PoolOptions alone{1, 64 << 10};
  const auto sharded = [](std::uint32_t num_shards, const std::vector<std::uint32_t>& owned) {
    PoolOptions options{1, 64 << 10};
    options.sharding = Sharding{num_shards, owned, {7}};
    return options;
  };
  const auto as_it_is = [](Table&) {};
  refuses_to_make("a table with shards in a pool without", alone, whole([](Table& t) { t.table_shards = 1; }));
  refuses_to_make("a table in a shard of a pool without", alone, whole([](Table& t) { t.first_shard = 1; }));
  refuses_to_make("three shards", sharded(3, {0}), with(as_it_is));
  refuses_to_make("too many shards", sharded(1 << 20, {0}), with(as_it_is));
  refuses_to_make("a shard that is not there", sharded(4, {4}), with(as_it_is));
  refuses_to_make("a table in a shard that is not there", sharded(4, {0}), with([](Table& t) { t.first_shard = 4; }));
  refuses_to_make("a table split over others", sharded(4, {0}), with([](Table& t) { t.table_shards = 2; }));
  refuses_to_make("a split table that begins beyond them", sharded(4, {0}), with([](Table& t) {
                    t.table_shards = 4;
                    t.first_shard = 4;
                  }));
  const auto keyed = [](Table& t) {
    t.id_map = static_cast<std::uint32_t>(format::IdMap::dynamic);
    t.keys = static_cast<std::uint32_t>(format::KeyKind::int64);
    t.state_floats += key_record_floats;
  };
  refuses_to_make("more keys than 32 bits number", alone, whole([&](Table& t) {
                    keyed(t);
                    t.num_embeddings = format::max_keyed_rows + 1;
                  }));
  refuses_to_make("keys in more places than 32 bits number", sharded(4, {0}), with([&](Table& t) {
                    keyed(t);
                    t.table_shards = 4;
                    t.num_embeddings = format::max_keyed_rows;
                  }));
  refuses_to_make("fewer keys than shards", sharded(4, {0}), with([&](Table& t) {
                    keyed(t);
                    t.table_shards = 4;
                    t.max_keys = 3;
                  }));
}

void only_a_pool_without_a_past_is_taken_back() {
  for (const auto store : {format::Store::in_place, format::Store::log}) {
    const auto refused = [&](const char* why, const std::function<void(const std::string&)>& past) {
      check::context = std::string("a pool that ") + why + ", store " + std::to_string(static_cast<int>(store));
      const TemporaryDirectory directory;
      make_pool(directory.path(), 1 << 20, store);
      CHECK(kind_thrown_by([&] { make_pool(directory.path(), 1 << 20, store); }) == ErrorKind::exists);
      past(directory.path());
      const auto before = sizes_in(directory.path());
      try {
        Pool::take_back(directory.path());
        CHECK(false);
      } catch (const Error& error) {
        CHECK(error.kind() == ErrorKind::exists && std::string(error.what()).find(why) != std::string::npos);
      }
      CHECK(sizes_in(directory.path()) == before);
    };
    refused("was not closed", [](const std::string& path) {
      const TemporaryDirectory copy;
      {
        const Run run(path, {});
        fs::copy(path, copy.path(), fs::copy_options::recursive);
        fs::remove(copy.path() + "/lock");
      }
      fs::remove_all(path);
      fs::copy(copy.path(), path, fs::copy_options::recursive);
    });
    refused("was trained", [](const std::string& path) {
      Run run(path, {});
      run.step(false);
      run.pool.close();
    });
    refused("was trained", [](const std::string& path) {
      Run run(path, {});
      run.write_dense();
      run.pool.close();
    });
    refused("has rows", [](const std::string& path) {
      Pool pool(path, {});
      const std::vector<std::uint64_t> rows = {3, 5};
      const std::vector<std::byte> weights(rows.size() * 8 * sizeof(float));
      pool.import_rows(0, rows, weights, {});
      pool.close();
    });
    check::context = "a pool that is new";
    const TemporaryDirectory directory;
    make_pool(directory.path(), 1 << 20, store);
    Run(directory.path(), {}).pool.close();
    Pool::take_back(directory.path());
    CHECK(is_unpublished(directory.path()));
    CHECK(kind_thrown_by([&] { Pool(directory.path(), {}); }) == ErrorKind::not_found);
    make_pool(directory.path(), 1 << 20, store);
    CHECK(!is_unpublished(directory.path()));
  }
}

void a_pool_needs_a_directory_and_a_step_between_dense_states() {
  check::context = "opening";
  const TemporaryDirectory directory;
  CHECK(kind_thrown_by([&] { Pool(directory.path() + "/none", {}); }) == ErrorKind::not_found);
  CHECK(kind_thrown_by([&] { make_pool(directory.path() + "/none", 4096); }) == ErrorKind::not_found);
  make_pool(directory.path(), 4096);
  OpenOptions never;
  never.dense_interval = 0;
  CHECK(kind_thrown_by([&] { Pool(directory.path(), never); }) == ErrorKind::config);
}

void what_is_no_part_by_name_stays() {
  check::context = "names";
  const TemporaryDirectory directory;
  const std::string& path = directory.path();
  const TemporaryDirectory elsewhere;
  touch(elsewhere.path() + "/table-0000.weights");
  const std::vector<std::string> parts = {
      "dense/dense-0",
      "dense/pool.holdfast",
      "log-0000",
      "shard-0000/table-0001.home",
      "shard-0007/table-0000.weights",
      "writers-0002/0001/pool.holdfast",
      "writers-0002/0001/row-log-0000",
  };
  const std::vector<std::string> others = {
      "notes.txt",
      "dense-2",
      "shard-/table-0000.weights",
      "shard-one/table-0000.weights",
      "shard-0000/table-0000",
      "shard-0000/table-x.weights",
      "shard-0000/table-0000.csv",
      "shard-0000/weights",
      "dense/dense/dense-0",
      "writers-0002/readme",
      "writers-0002/first/log-0000",
      "writers-0002/0001/writers-0001/0000/log-0000",
      "writers-x/0000/log-0000",
  };
  for (const auto& names : {parts, others}) {
    for (const std::string& name : names) touch(path + "/" + name);
  }
  fs::create_directory_symlink(elsewhere.path(), path + "/shard-0042");
  std::vector<std::string> found = pool_parts(path);
  CHECK(std::erase(found, "shard-0042/table-0000.weights") == 1);
  CHECK(found == parts);
  CHECK(kind_thrown_by([&] { remove_unpublished_parts(path); }) == ErrorKind::corrupted);
  CHECK(pool_parts(path).size() == parts.size() + 1);
  mark_unpublished(path);
  remove_unpublished_parts(path);
  CHECK(pool_parts(path).empty() && is_unpublished(path));
  for (const std::string& name : others) CHECK(fs::exists(path + "/" + name));
  for (const std::string& name : parts) CHECK(!fs::exists(path + "/" + name));
  CHECK(fs::is_symlink(path + "/shard-0042") && !fs::exists(path + "/shard-0007"));
}

void marks_that_cannot_be_made_or_taken_away_are_errors() {
  check::context = "marks";
  const TemporaryDirectory directory;
  touch(directory.path() + "/unpublished/file");  // a directory in the mark's place
  CHECK(kind_thrown_by([&] { mark_unpublished(directory.path()); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { mark_published(directory.path()); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { mark_unpublished(directory.path() + "/none"); }) == ErrorKind::not_found);
  CHECK(pool_parts(directory.path() + "/none").empty());
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  what_makes_no_sense_is_not_made();
  only_a_pool_without_a_past_is_taken_back();
  a_pool_needs_a_directory_and_a_step_between_dense_states();
  what_is_no_part_by_name_stays();
  marks_that_cannot_be_made_or_taken_away_are_errors();
  return check::passed();
}

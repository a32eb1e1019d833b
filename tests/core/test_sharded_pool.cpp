// Pools of several writers: each has some of the shards, all of them together train what one pool does, bit for bit,
// and whoever gets the shards next finds the same rows.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pool/pool.h"
#include "readers/live_copy.h"
#include "readers/reader.h"
#include "readers/repair.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint32_t num_shards = 4;
constexpr std::size_t num_bags = 16;
constexpr std::size_t ids_per_bag = 5;
constexpr std::uint64_t log_bytes = 96 << 10;

format::TableRecord table_record(const char* name, std::uint64_t rows, std::uint32_t dim, RowOptimizer optimizer,
                                 RowDtype dtype, std::uint32_t table_shards, std::uint32_t first_shard = 0) {
  format::TableRecord record{};
  record.num_embeddings = rows;
  record.embedding_dim = dim;
  record.dtype = static_cast<std::uint32_t>(dtype);
  record.optimizer = static_cast<std::uint32_t>(optimizer);
  record.state_floats = state_floats_of(optimizer, dim);
  record.init_low = -0.1f;
  record.init_high = 0.1f;
  record.table_shards = table_shards;
  record.first_shard = first_shard;
  std::strncpy(record.name, name, sizeof(record.name) - 1);
  return record;
}

std::vector<format::TableRecord> sharded_tables() {
  return {table_record("large", 140003, 6, RowOptimizer::rowwise_adagrad, RowDtype::f32, num_shards),
          table_record("small", 41, 4, RowOptimizer::adam, RowDtype::f16, num_shards),
          table_record("whole", 300, 4, RowOptimizer::sgd, RowDtype::bf16, 1, 2)};
}
std::vector<format::TableRecord> plain_tables() {
  auto tables = sharded_tables();
  for (auto& table : tables) table.table_shards = table.first_shard = 0;
  return tables;
}

struct Way {
  format::Store store;
  bool row_checksums;
};
constexpr Way ways[] = {{format::Store::in_place, false}, {format::Store::in_place, true}, {format::Store::log, false}};

// The pool of one of several writers, in a directory for all of them.
std::string member(const TemporaryDirectory& group, int generation, int writer) {
  const std::string path = group.path() + "/writers-" + std::to_string(generation) + "/000" + std::to_string(writer);
  std::filesystem::create_directories(path);
  return path;
}

Sharding sharding(std::vector<std::uint32_t> owned, bool adopt = false) {
  return {num_shards, std::move(owned), {1, 2, 3}, adopt};
}

void make_pool(const std::string& path, const Way& way, const std::optional<Sharding>& shards, StepMark begin = {}) {
  Pool::create(path, {1, log_bytes, way.store, way.row_checksums, begin, shards},
               shards ? sharded_tables() : plain_tables());
}

// Trains steps whose ids and gradients are functions of the step. A writer leaves out the rows that it does not have;
// the order of the others is the same everywhere.
class Trainer {
 public:
  explicit Trainer(const std::string& path, const OpenOptions& options = {}) : pool(path, options) {
    auto spec = std::make_shared<CollectionSpec>();
    const ShardSet owned = pool.shards() ? shards_of(*pool.shards()) : ShardSet{};
    tables_ = row_tables_of(pool.table_records(), pool.header().seed, owned);
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      spec->tables.push_back({t, tables_[t].num_rows, tables_[t].spec.dim, Pooling::sum});
      spec->features.push_back({t, spec->output_width, tables_[t].name});
      spec->output_width += tables_[t].spec.dim;
    }
    output_width_ = spec->output_width;
    plans_ = std::make_shared<PlanPool>(spec);
  }

  std::shared_ptr<Plan> plan(std::uint64_t step) {
    std::mt19937_64 random(step);
    std::vector<std::int64_t> ids;
    std::vector<std::int64_t> offsets = {0};
    std::vector<std::uint32_t> features;
    for (const RowTable& table : tables_) {
      const std::uint64_t num_rows = table.layout ? table.layout->num_rows : table.num_rows;
      for (std::size_t bag = 0; bag < num_bags; ++bag) {
        for (std::size_t i = 0; i < ids_per_bag; ++i) {
          const std::uint64_t row =
              random() % 3 == 0 ? random() % std::min<std::uint64_t>(num_rows, 50) : random() % num_rows;
          const std::uint64_t place = table.layout ? table.layout->place_of(row) : row;
          if (!table.first_foreign({&place, 1})) ids.push_back(static_cast<std::int64_t>(place));
        }
        offsets.push_back(static_cast<std::int64_t>(ids.size()));
      }
      features.push_back(static_cast<std::uint32_t>(features.size()));
    }
    return planned(ids, offsets, features, num_bags);
  }

  // Of one id in one table.
  std::shared_ptr<Plan> plan_of(std::size_t table, std::uint64_t place) {
    std::vector<std::int64_t> ids = {static_cast<std::int64_t>(place)};
    std::vector<std::int64_t> offsets = {0};
    std::vector<std::uint32_t> features;
    for (std::size_t t = 0; t < tables_.size(); ++t) {
      offsets.push_back(t < table ? 0 : 1);
      features.push_back(static_cast<std::uint32_t>(t));
    }
    return planned(ids, offsets, features, 1);
  }

  void step(bool commit = true) {
    const std::uint64_t number = pool.step() + 1;
    const auto now = next_ ? std::exchange(next_, nullptr) : plan(number);
    const auto capture = pool.capture(now);
    std::vector<float> out(num_bags * output_width_);
    pool.lookup(*capture, out.data());
    next_ = plan(number + 1);
    pool.announce(next_);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<float>((i * 7 + number * 3) % 11) * 0.01f - 0.05f;
    }
    UpdateSpec spec{};
    spec.learning_rate = 0.1f;
    spec.epsilon = 1e-6f;
    spec.beta1 = 0.9f;
    spec.beta2 = 0.99f;
    spec.gradient_scale = 1;
    pool.update({{capture, out.data()}}, spec);
    if (commit) this->commit();
  }
  void commit() {
    const std::vector<double> tensor(100, static_cast<double>(pool.step() + 1));
    const DenseTensor dense{tensor.data(), tensor.size() * sizeof(double), 0};
    const Pool::Dense state{{reinterpret_cast<const std::byte*>("{}"), 2}, {&dense, 1}, dense.bytes};
    pool.commit(pool.step() + 1, &state);
  }
  void run_to(std::uint64_t step_) {
    while (pool.step() < step_) step();
  }

  Pool pool;

 private:
  std::shared_ptr<Plan> planned(const std::vector<std::int64_t>& ids, const std::vector<std::int64_t>& offsets,
                                const std::vector<std::uint32_t>& features, std::size_t bags) {
    auto plan = plans_->take();
    plan_batch({ids.data(), offsets.data(), true, nullptr, bags, features}, true, *plan);
    return plan;
  }

  std::vector<RowTable> tables_;
  std::uint32_t output_width_ = 0;
  std::shared_ptr<PlanPool> plans_;
  std::shared_ptr<Plan> next_;
};

// Weights and state by table and row, whatever the row's place: those that were touched, and some.
using Rows = std::map<std::pair<std::size_t, std::uint64_t>, std::vector<std::byte>>;
void add_rows(const std::string& path, Rows& all) {
  const Reader reader(path);
  CHECK(reader.verify().empty());
  for (std::size_t t = 0; t < reader.tables().size(); ++t) {
    const RowTable& table = reader.tables()[t];
    std::vector<std::uint64_t> rows;
    const std::uint64_t num_rows = table.layout ? table.layout->num_rows : table.num_rows;
    for (std::uint64_t row = 0; row < num_rows; row += num_rows / 41) {
      const std::uint64_t place = table.layout ? table.layout->place_of(row) : row;
      if (!table.first_foreign({&place, 1})) rows.push_back(place);
    }
    for (std::uint64_t first = 0;;) {
      const auto touched = reader.touched_rows(t, first, 33);
      if (touched.empty()) break;
      rows.insert(rows.end(), touched.begin(), touched.end());
      first = touched.back() + 1;
    }
    std::sort(rows.begin(), rows.end());
    rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
    std::vector<std::byte> weights(rows.size() * table.weight_bytes());
    std::vector<float> state(rows.size() * table.spec.state_floats);
    reader.gather_rows(t, rows, weights.data(), state.data(), nullptr);
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const auto* row_weights = weights.data() + i * table.weight_bytes();
      const auto* row_state = reinterpret_cast<const std::byte*>(state.data()) + i * table.state_bytes();
      std::vector<std::byte> row(row_weights, row_weights + table.weight_bytes());
      row.insert(row.end(), row_state, row_state + table.state_bytes());
      const std::uint64_t number = table.layout ? table.layout->row_of(rows[i]) : rows[i];
      CHECK(all.emplace(std::pair(t, number), std::move(row)).second);
    }
  }
}

Rows rows_of(const std::vector<std::string>& pools) {
  Rows rows;
  for (const std::string& path : pools) add_rows(path, rows);
  return rows;
}

Rows reference(std::uint64_t steps) {
  const TemporaryDirectory directory;
  make_pool(directory.path(), ways[0], std::nullopt);
  Trainer trainer(directory.path());
  trainer.run_to(steps);
  trainer.pool.close();
  return rows_of({directory.path()});
}

void run_and_die(const std::function<void()>& life) {
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    life();
    ::_exit(0);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void writers_train_what_one_pool_does_and_shards_change_hands() {
  const Rows at_60 = reference(60);
  const Rows at_80 = reference(80);
  for (const Way& way : ways) {
    const TemporaryDirectory group;
    const std::vector<std::string> members = {member(group, 1, 0), member(group, 1, 1), member(group, 1, 2)};
    const std::vector<std::uint32_t> owned[] = {{0, 2}, {1, 3}, {}};
    for (int writer = 0; writer < 3; ++writer) {
      make_pool(members[static_cast<std::size_t>(writer)], way, sharding(owned[writer]));
      Trainer trainer(members[static_cast<std::size_t>(writer)], {.scratchpad_bytes = 32 << 10});
      CHECK(trainer.pool.header().version == format::version && trainer.pool.header().num_shards == num_shards);
      trainer.run_to(60);
      trainer.pool.empty_log();
      trainer.pool.close();
    }
    CHECK(rows_of(members) == at_60);

    const std::string heir = member(group, 2, 0);
    make_pool(heir, way, sharding({0, 1, 2, 3}, true), {60, 60, 60});
    CHECK(rows_of({heir}) == rows_of(members));
    Trainer trainer(heir);
    CHECK(trainer.pool.step() == 60 && trainer.pool.row_updates() == 60);
    trainer.run_to(80);
    trainer.pool.close();
    CHECK(rows_of({heir}) == at_80);
  }
}

[[maybe_unused]] void a_writer_that_dies_comes_back_to_its_newest_dense_state() {
  const Rows at_30 = reference(30);
  for (const Way& way : ways) {
    for (const bool committed : {false, true}) {
      const TemporaryDirectory group;
      const std::vector<std::string> members = {member(group, 1, 0), member(group, 1, 1)};
      for (std::uint32_t writer = 0; writer < 2; ++writer) {
        make_pool(members[writer], way, sharding({writer, writer + 2}));
        run_and_die([&] {
          Trainer trainer(members[writer]);
          trainer.run_to(20);
          trainer.step(committed);
          trainer.pool.flush();
        });
        Trainer trainer(members[writer]);
        CHECK(!trainer.pool.recovery().clean);
        CHECK(trainer.pool.step() == (committed ? 21 : 20));
        trainer.run_to(30);
        trainer.pool.close();
      }
      CHECK(rows_of(members) == at_30);
    }
  }
}

void rows_of_other_writers_are_refused() {
  for (const Way& way : ways) {
    const TemporaryDirectory group;
    const std::string path = member(group, 1, 0);
    make_pool(path, way, sharding({1}));
    Trainer trainer(path);
    trainer.run_to(3);
    const ShardLayout large = ShardLayout::split(140003, num_shards);
    const ShardLayout small = ShardLayout::split(41, num_shards);
    struct Row {
      std::uint32_t table;
      std::uint64_t place;
    };
    const Row foreign[] = {
        {0, large.first_place(0)}, {0, large.first_place(1) + large.rows_in(1)}, {0, large.end_place() - 1},
        {1, small.first_place(2)}, {1, small.first_place(1) + small.rows_in(1)}, {2, 7},
    };
    std::vector<float> out(14);
    for (const Row& row : foreign) {
      const auto plan = trainer.plan_of(row.table, row.place);
      CHECK(kind_thrown_by([&] { trainer.pool.announce(plan); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { trainer.pool.capture(plan); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { trainer.pool.evaluate(*plan, out.data()); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { trainer.pool.keep_rows(row.table, {row.place}); }) == ErrorKind::config);
      Reader reader(path);
      std::vector<std::byte> weights(64);
      CHECK(kind_thrown_by([&] { reader.evaluate(*plan, out.data()); }) == ErrorKind::config);
      CHECK(kind_thrown_by([&] { reader.read_rows(row.table, row.place, 1, weights.data(), out.data()); }) ==
            ErrorKind::config);
    }
    trainer.pool.evaluate(*trainer.plan_of(0, large.first_place(1)), out.data());
    trainer.run_to(6);  // nothing of this has harmed the pool
    trainer.pool.close();
  }
}

void shards_that_are_lost_or_cut_off_are_noticed() {
  for (const Way& way : ways) {
    const std::string what = way.store == format::Store::log ? "home" : "weights";
    const TemporaryDirectory group;
    const std::string path = member(group, 1, 0);
    make_pool(path, way, sharding({0, 3}));
    const std::string file = group.path() + "/shard-0003/table-0000." + what;
    const auto bytes = std::filesystem::file_size(file);
    std::filesystem::resize_file(file, bytes - 4096);
    const auto adopt = [&] { make_pool(member(group, 2, 0), way, sharding({3}, true)); };
    CHECK(kind_thrown_by([&] { const Pool pool(path, {}); }) == ErrorKind::corrupted);
    CHECK(kind_thrown_by([&] { const Reader reader(path); }) == ErrorKind::corrupted);
    CHECK(kind_thrown_by(adopt) == ErrorKind::corrupted);
    std::filesystem::remove(file);
    CHECK(kind_thrown_by([&] { const Pool pool(path, {}); }) == ErrorKind::corrupted);
    CHECK(kind_thrown_by(adopt) == ErrorKind::corrupted);
    const auto found = [&] { make_pool(member(group, 3, 0), way, sharding({3})); };
    CHECK(kind_thrown_by(found) == ErrorKind::exists);  // a shard may hold somebody's rows
    std::filesystem::remove_all(group.path() + "/shard-0003");
    found();
    CHECK(std::filesystem::file_size(file) == bytes);
  }
}

void impossible_shards_are_refused() {
  const TemporaryDirectory group;
  const auto kind_of = [&](std::uint32_t count, std::vector<std::uint32_t> owned, std::vector<format::TableRecord> of) {
    const Sharding wanted{count, std::move(owned), {}, false};
    return kind_thrown_by([&] {
      Pool::create(member(group, 1, 0), {1, log_bytes, format::Store::in_place, false, {}, wanted}, std::move(of));
    });
  };
  for (const std::uint32_t count : {0U, 3U, 8192U}) CHECK(kind_of(count, {}, {}) == ErrorKind::config);
  CHECK(kind_of(4, {4}, {}) == ErrorKind::config);
  CHECK(kind_of(4, {0}, plain_tables()) == ErrorKind::config);
  CHECK(kind_of(8, {0}, sharded_tables()) == ErrorKind::config);
  CHECK(kind_thrown_by([&] { Pool::create(member(group, 1, 0), {1, log_bytes}, sharded_tables()); }) ==
        ErrorKind::config);
}

void a_part_of_a_pool_is_neither_copied_nor_repaired_alone() {
  const TemporaryDirectory group;
  const std::string path = member(group, 1, 0);
  make_pool(path, ways[0], sharding({0}));
  CHECK(kind_thrown_by([&] { const LiveCopy copy(path); }) == ErrorKind::format_mismatch);
  CHECK(kind_thrown_by([&] { plan_repair(path); }) == ErrorKind::format_mismatch);
}

[[maybe_unused]] void a_pool_without_tables_keeps_its_dense_state() {
  for (const format::Store store : {format::Store::in_place, format::Store::log}) {
    const TemporaryDirectory directory;
    Pool::create(directory.path(), {1, log_bytes, store}, {});
    run_and_die([&] {
      Trainer trainer(directory.path());
      for (int i = 0; i < 5; ++i) trainer.commit();
      trainer.pool.flush();
    });
    Trainer trainer(directory.path());
    CHECK(!trainer.pool.recovery().clean);
    CHECK(trainer.pool.step() == 5 && trainer.pool.cursor() == 5 && trainer.pool.dense_state().has_value());
    trainer.commit();
    trainer.pool.close();
    CHECK(Reader(directory.path()).verify().empty());
    CHECK(Reader(directory.path()).commit().step == 6);
  }
}

}  // namespace
}  // namespace holdfast

int main() {
#if !defined(__SANITIZE_THREAD__)  // which knows no threads in the child of a process that had some
  holdfast::a_writer_that_dies_comes_back_to_its_newest_dense_state();
  holdfast::a_pool_without_tables_keeps_its_dense_state();
#endif
  holdfast::writers_train_what_one_pool_does_and_shards_change_hands();
  holdfast::rows_of_other_writers_are_refused();
  holdfast::shards_that_are_lost_or_cut_off_are_noticed();
  holdfast::impossible_shards_are_refused();
  holdfast::a_part_of_a_pool_is_neither_copied_nor_repaired_alone();
  return 0;
}

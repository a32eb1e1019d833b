// Rows that were updated elsewhere, and rows that are read where they lie: what put refuses leaves everything as it was,
// rows of every size come home, and an accelerator finds the right values in a pool's own mapping.
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pool/pool.h"
#include "readers/reader.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t log_bytes = 1 << 20;
constexpr format::Store all_stores[] = {format::Store::in_place, format::Store::log};

format::TableRecord table_of(const char* name, std::uint32_t dim, RowOptimizer optimizer, RowDtype dtype) {
  format::TableRecord record = table_record(name, 200, dim, optimizer);
  record.dtype = static_cast<std::uint32_t>(dtype);
  return record;
}

// Rows of one line and of several, of parts of lines; with and without state.
Script many_tables() {
  return {{table_of("a", 16, RowOptimizer::sgd, RowDtype::f32), table_of("b", 64, RowOptimizer::adam, RowDtype::f32),
           table_of("c", 64, RowOptimizer::rowwise_adagrad, RowDtype::bf16),
           table_of("d", 5, RowOptimizer::rowwise_adam, RowDtype::f16),
           table_of("e", 3, RowOptimizer::adagrad, RowDtype::f32)}};
}

void rows_of_every_size_come_home() {
  const Script script = many_tables();
  const auto expected = reference(6, script);
  for (const bool row_checksums : {false, true}) {
    for (const format::Store store : all_stores) {
      if (row_checksums && store == format::Store::log) continue;
      Script of_pool = script;
      of_pool.row_checksums = row_checksums;
      const TemporaryDirectory directory;
      make_pool(directory.path(), log_bytes, store, of_pool);
      Run run(directory.path(), {}, of_pool);
      run.updates = Updates::elsewhere;
      while (run.pool.step() < 6) run.step(false);
      run.pool.close();
      CHECK(rows_of_pool(directory.path()) == expected);
      CHECK(Reader(directory.path()).verify().empty());
    }
  }
}

// A collection of one of the pool's tables, and a plan of some of its rows.
std::shared_ptr<Plan> plan_of_table(const Run& run, std::uint32_t table, std::vector<std::int64_t> ids) {
  auto spec = std::make_shared<CollectionSpec>();
  const format::TableRecord& record = run.script.tables[table];
  spec->tables.push_back({table, record.num_embeddings, record.embedding_dim, Pooling::sum});
  spec->features.push_back({0, 0, record.name});
  spec->output_width = record.embedding_dim;
  auto plan = std::make_shared<Plan>();
  plan->spec = spec;
  std::vector<std::int64_t> offsets(ids.size() + 1);
  std::iota(offsets.begin(), offsets.end(), 0);
  plan_batch({ids.data(), offsets.data(), true, nullptr, ids.size(), {0}}, true, *plan);
  return plan;
}

void captures_of_several_collections_are_put_together() {
  const Script script = many_tables();
  for (const format::Store store : all_stores) {
    std::vector<std::byte> rows[2];
    for (const bool puts : {false, true}) {
      const TemporaryDirectory directory;
      make_pool(directory.path(), log_bytes, store, script);
      Run run(directory.path(), {}, script);
      const auto first = run.pool.capture(plan_of_table(run, 0, {3, 1, 3, 150}));
      const auto second = run.pool.capture(plan_of_table(run, 2, {7, 7, 8}));
      std::vector<float> grad(4 * 64);
      for (std::size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(i % 11) * 0.1f - 0.4f;
      if (puts) {
        const auto of_first = run.new_rows(*first, 0, grad.data());
        const auto of_second = run.new_rows(*second, 0, grad.data());
        run.pool.put(
            {{second, {0}, of_second.weights, of_second.state}, {first, {0}, of_first.weights, of_first.state}});
      } else {
        run.pool.update({{first, grad.data()}}, Run::hyperparameters());
        run.pool.update({{second, grad.data()}}, Run::hyperparameters());
      }
      run.commit_step(1);
      run.step(false);
      CHECK(run.pool.row_updates() == 2);
      run.pool.close();
      rows[puts] = rows_of_pool(directory.path());
    }
    CHECK(rows[0] == rows[1]);
  }
}

void what_does_not_fit_is_refused_and_changes_nothing() {
  for (const format::Store store : all_stores) {
    const TemporaryDirectory directory;
    make_pool(directory.path(), log_bytes, store);
    Run run(directory.path(), {});
    run.step(false);
    const auto capture = run.pool.capture(run.plan(2));
    const std::vector<float> grad(run.script.num_bags * 12, 0.25f);
    const auto a = run.new_rows(*capture, 0, grad.data());
    const auto b = run.new_rows(*capture, 1, grad.data());
    const RowsPart part_a{capture, {0}, a.weights, a.state};
    const RowsPart part_b{capture, {1}, b.weights, b.state};
    const auto refusal = [&](const std::vector<RowsPart>& parts) {
      return kind_thrown_by([&] { run.pool.put(parts); });
    };
    CHECK(refusal({}) == ErrorKind::step);
    CHECK(refusal({part_a}) == ErrorKind::step);
    CHECK(refusal({part_a, part_b, part_a}) == ErrorKind::step);
    CHECK(refusal({{capture, {1, 0}, a.weights, a.state}}) == ErrorKind::config);
    CHECK(refusal({{capture, {2}, a.weights, a.state}}) == ErrorKind::config);
    CHECK(refusal({part_a, {capture, {1}, a.weights, b.state}}) == ErrorKind::config);
    CHECK(refusal({part_a, {capture, {1}, b.weights, {}}}) == ErrorKind::config);
    const auto same_tables = run.pool.capture(run.plan(2));
    CHECK(refusal({part_a, part_b, {same_tables, {0}, a.weights, a.state}, {same_tables, {1}, b.weights, b.state}}) ==
          ErrorKind::step);

    run.pool.put({part_b, part_a});
    CHECK(refusal({part_a, part_b}) == ErrorKind::step);  // updated already
    run.commit_step(2);
    CHECK(refusal({part_a, part_b}) == ErrorKind::step);  // of a step that is over
    run.pool.close();

    const TemporaryDirectory other;
    make_pool(other.path(), log_bytes, store);
    Run expected(other.path(), {});
    expected.step(false);
    expected.pool.update({{expected.pool.capture(expected.plan(2)), grad.data()}}, Run::hyperparameters());
    expected.commit_step(2);
    expected.pool.close();
    CHECK(rows_of_pool(directory.path()) == rows_of_pool(other.path()));
  }
}

// What the mapping has of a capture's rows is what the capture has.
void check_mapped(const Run& run, const Capture& capture) {
  const auto tables = row_tables_of(run.pool.table_records(), run.pool.header().seed);
  for (std::uint32_t t = 0; t < tables.size(); ++t) {
    const auto mapping = run.pool.mapping(t);
    CHECK(mapping.has_value());
    CHECK((mapping->state == nullptr) == (tables[t].state_bytes() == 0));
    CHECK(mapping->ranges.size() == (mapping->state == nullptr ? 1 : 2));
    CHECK(mapping->ranges[0].data() == mapping->weights);
    CHECK(mapping->ranges[0].size() == tables[t].num_rows * tables[t].weight_bytes());
    CHECK(mapping->ranges.back().size_bytes() ==
          tables[t].num_rows * (mapping->state == nullptr ? tables[t].weight_bytes() : tables[t].state_bytes()));
    const auto& rows = capture.plan->tables[t].rows;
    for (std::size_t u = 0; u < rows.size(); ++u) {
      const std::size_t bytes = tables[t].weight_bytes();
      CHECK(std::memcmp(mapping->weights + rows[u] * bytes, capture.tables[t].weights + u * bytes, bytes) == 0);
      const std::size_t floats = tables[t].spec.state_floats;
      CHECK(floats == 0 || std::memcmp(mapping->state + rows[u] * floats, capture.tables[t].state + u * floats,
                                       tables[t].state_bytes()) == 0);
    }
  }
}

void rows_are_found_where_they_lie() {
  for (const bool row_checksums : {false, true}) {
    Script script = many_tables();
    script.row_checksums = row_checksums;
    const TemporaryDirectory directory;
    make_pool(directory.path(), log_bytes, format::Store::in_place, script);
    // A step that is begun and taken back leaves its bytes at home: they mean nothing again.
    {
      Run run(directory.path(), {}, script);
      run.step(false, false);
      run.pool.close();
    }
    Run run(directory.path(), {}, script);
    for (std::uint64_t step = 1; step <= 8; ++step) {
      const auto plan = run.plan(step);
      std::uint64_t num_untouched = 0;
      for (std::uint32_t t = 0; t < script.tables.size(); ++t) {
        for (const std::uint64_t row : plan->tables[t].rows) {
          const auto touched = Reader(directory.path()).touched_rows(t, row, 1);
          num_untouched += touched.empty() || touched.front() != row ? 1 : 0;
        }
      }
      CHECK(num_untouched != 0 || step > 4);
      CHECK(run.pool.materialize(*plan) == num_untouched);
      CHECK(run.pool.materialize(*plan) == num_untouched);  // they stay untouched
      check_mapped(run, *run.pool.capture(plan));
      run.step(false);
    }
    run.pool.close();
    CHECK(rows_of_pool(directory.path()) == reference(8, script));
    CHECK(Reader(directory.path()).verify().empty());
  }
}

void a_log_store_has_no_places_in_memory() {
  const TemporaryDirectory directory;
  make_pool(directory.path(), log_bytes, format::Store::log);
  Run run(directory.path(), {});
  CHECK(!run.pool.mapping(0));
  CHECK(kind_thrown_by([&] { run.pool.materialize(*run.plan(1)); }) == ErrorKind::config);
  CHECK(kind_thrown_by([&] { run.pool.mapping(2); }) == ErrorKind::config);
  run.step(false);
}

// Bytes beside what it has are not there to be read.
void a_writer_maps_the_shards_that_it_has() {
  for (const std::vector<std::uint32_t>& owned : {std::vector<std::uint32_t>{0, 1, 2, 3}, {1, 2}}) {
    const TemporaryDirectory root;
    const std::string directory = root.path() + "/writers/0";
    std::filesystem::create_directories(directory);
    auto split = table_record("split", 300, 8, RowOptimizer::rowwise_adagrad);
    split.table_shards = 4;
    auto here = table_record("here", 50, 8, RowOptimizer::rowwise_adagrad);
    here.table_shards = 1;
    here.first_shard = 2;
    auto there = here;
    std::strncpy(there.name, "there", sizeof(there.name));
    there.first_shard = 0;
    Pool::create(directory, {.seed = 1, .log_bytes = log_bytes, .sharding = Sharding{4, owned, {}}},
                 {split, here, there});
    const Pool pool(directory, {});
    const auto layout = ShardLayout::split(300, 4, 0);
    const auto of_split = *pool.mapping(0);
    CHECK(of_split.ranges.size() == 2 * owned.size());
    for (std::size_t i = 0; i < owned.size(); ++i) {
      const std::uint64_t first = layout.first_place(owned[i]);
      CHECK(of_split.ranges[2 * i].data() == of_split.weights + first * 32);
      CHECK(of_split.ranges[2 * i].size() == layout.rows_in(owned[i]) * 32);
      CHECK(of_split.ranges[2 * i + 1].data() == reinterpret_cast<std::byte*>(of_split.state + first));
      for (const std::byte value : of_split.ranges[2 * i]) CHECK(value == std::byte{0});
    }
    CHECK(pool.mapping(1)->ranges[0].size() == 50 * 32);
    CHECK(pool.mapping(2)->ranges.size() == (owned.size() == 4 ? 2 : 0));
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  rows_of_every_size_come_home();
  captures_of_several_collections_are_put_together();
  what_does_not_fit_is_refused_and_changes_nothing();
  rows_are_found_where_they_lie();
  a_log_store_has_no_places_in_memory();
  a_writer_maps_the_shards_that_it_has();
  return check::passed();
}

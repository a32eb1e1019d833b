// The log store on several threads: one appends and syncs, one merges, others fetch. Sanitizers watch.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "log_store_model.h"

namespace holdfast {
namespace {

// One thread appends and syncs on a ring that wraps all the time, one merges, others fetch. The first float of a row's
// weights is the step that wrote it, and all the others are a function of row and step: a fetch finds one step's row,
// not older than what had been appended when it began.
class Readers {
 public:
  Readers(LogStore& store, const RowTable& table, std::uint64_t seed) {
    for (std::uint64_t t = 0; t < 3; ++t) {
      threads_.emplace_back([this, &store, &table, seed, t] {
        std::mt19937_64 random(seed + t);
        while (!stop_) {
          look(store, table, random);
          if (t == 0) list(store, table);
        }
      });
    }
  }
  ~Readers() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

  static float element(std::uint64_t row, std::uint64_t step, std::size_t i) {
    return static_cast<float>((row * 31 + step * 17 + i * 7) % 1024);
  }
  std::vector<std::atomic<std::uint64_t>> appended = std::vector<std::atomic<std::uint64_t>>(200);  // of each row
  std::atomic<std::uint64_t> num_rows_seen{0};

 private:
  void look(LogStore& store, const RowTable& table, std::mt19937_64& random) {
    OwnedRows wanted(0, table, random_rows(table.num_rows, 30, random));
    std::vector<std::uint64_t> at_least;
    for (const std::uint64_t row : wanted.rows) at_least.push_back(appended[row]);
    const TableRows view = wanted.view();
    store.fetch({&view, 1});
    for (std::size_t u = 0; u < wanted.rows.size(); ++u) {
      if ((wanted.rows[u] & fresh_bit) != 0) {
        CHECK(at_least[u] == 0);
        continue;
      }
      std::vector<float> weights(table.spec.dim);
      std::memcpy(weights.data(), wanted.weights.data() + u * wanted.weight_bytes, wanted.weight_bytes);
      const auto step = static_cast<std::uint64_t>(weights[0]);
      CHECK(step >= at_least[u]);
      for (std::size_t i = 1; i < weights.size(); ++i) CHECK(weights[i] == element(wanted.rows[u], step, i));
      ++num_rows_seen;
    }
  }
  // A row that a merge takes home meanwhile is in the list all the same.
  void list(LogStore& store, const RowTable& table) {
    std::vector<std::uint64_t> at_least;
    for (std::uint64_t row = 0; row < table.num_rows; ++row) {
      if (appended[row] != 0) at_least.push_back(row);
    }
    const std::vector<std::uint64_t> rows = store.touched_rows(0, 0, table.num_rows);
    CHECK(std::includes(rows.begin(), rows.end(), at_least.begin(), at_least.end()));
  }
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false};
};

// Merges a little at a time, and never quite up to the newest durable step unless somebody waits for room.
class Merger {
 public:
  Merger(LogStore& store, std::uint64_t seed)
      : thread_([this, &store, seed] {
          std::mt19937_64 random(seed);
          while (!stop_) {
            const std::uint64_t lag = room_is_wanted ? 0 : random() % 4;
            // What the limit is, rises with what is durable.
            store.merge([&] { return std::max(store.durable_step(), lag) - lag; },
                        [&](std::chrono::nanoseconds, double) {
                          const bool hurries = room_is_wanted || random() % 2 == 0;
                          if (!hurries) std::this_thread::sleep_for(std::chrono::microseconds(200));
                          return hurries;
                        });
          }
        }) {}
  ~Merger() {
    stop_ = true;
    thread_.join();
  }

  std::atomic<bool> room_is_wanted{false};

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

void readers_beside_the_writer_see_whole_rows(std::uint64_t seed, BlockQueue::Way way, std::uint64_t steps) {
  const std::vector<RowTable> tables = {table_of(0, 200, 200, RowDtype::f32, RowOptimizer::sgd)};
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), tables, 128 << 10, Caching::buffered, {}, false, identity_of_tests);
  LogStoreOptions options = buffered(way);
  options.merge_bytes = 20000;  // several ranges of rows, one after the other, while new versions come in
  LogStore store(directory.path(), tables, options);
  store.recover(1, every_step);
  std::mt19937_64 random(seed);
  Readers readers(store, tables[0], seed);
  Merger merger(store, seed);
  for (std::uint64_t step = 1; step <= steps; ++step) {
    OwnedRows update(0, tables[0], random_rows(200, 40, random));
    for (std::size_t u = 0; u < update.rows.size(); ++u) {
      std::vector<float> weights(200);
      weights[0] = static_cast<float>(step);
      for (std::size_t i = 1; i < weights.size(); ++i) weights[i] = Readers::element(update.rows[u], step, i);
      std::memcpy(update.weights.data() + u * update.weight_bytes, weights.data(), update.weight_bytes);
    }
    const TableRows view = update.view();
    const PackedRecord packed = store.pack(mark_of(step), {&view, 1});
    while (!store.append(packed)) {
      merger.room_is_wanted = true;
      std::this_thread::yield();
    }
    merger.room_is_wanted = false;
    store.sync();
    for (const std::uint64_t row : update.rows) readers.appended[row] = step;
  }
  while (readers.num_rows_seen == 0) std::this_thread::yield();
  store.merge(up_to(every_step));
  const LogStoreCounters counters = store.counters();
  CHECK(store.used_bytes() == 0 && counters.merged_rows < counters.appended_rows);  // the others were superseded
}

// A merge looks at the index a few slots at a time. The entries of an index that grows in between lie elsewhere.
void an_index_may_grow_beside_a_merge(std::uint64_t seed) {
  const std::vector<RowTable> tables = {table_of(0, 5000, 16, RowDtype::f32, RowOptimizer::sgd)};
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), tables, 1 << 20, Caching::buffered, {}, false, identity_of_tests);
  LogStoreOptions options = buffered();
  options.merge_slots = 8;
  LogStore store(directory.path(), tables, options);
  store.recover(1, every_step);
  std::mt19937_64 random(seed);
  Model model;
  std::atomic<bool> stop{false};
  std::thread merger([&] {
    while (!stop) store.merge([&] { return store.durable_step(); });
  });
  for (std::uint64_t step = 1; step <= 60; ++step) {
    std::vector<OwnedRows> update = random_update(tables, 200, random);
    model.update(step, update);
    const PackedRecord packed = store.pack(mark_of(step), views(update));
    while (!store.append(packed)) std::this_thread::yield();
    store.sync();
  }
  stop = true;
  merger.join();
  std::vector<OwnedRows> wanted;
  wanted.emplace_back(0, tables[0], every_row_of(tables[0]));
  store.fetch(views(wanted));
  model.check(tables, wanted);
}

// Holds fetches up before they read, and tells when home is written.
class Gate final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {
    if (std::this_thread::get_id() != held_) return;
    waiting = true;
    while (!open) std::this_thread::yield();
  }
  void before_write(const BlockFile& file, std::uint64_t, std::span<const std::byte>) override {
    if (file.name().find(".home") == std::string::npos) return;
    if (!home_written.exchange(true) && on_home_write) on_home_write();
  }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  // Fetches row 1 on another thread, up to the point where it has resolved the row and is going to read it.
  std::thread begin_fetch(LogStore& store, OwnedRows& wanted) {
    std::thread thread([this, &store, &wanted] {
      held_ = std::this_thread::get_id();
      const TableRows view = wanted.view();
      store.fetch({&view, 1});
    });
    while (!waiting) std::this_thread::yield();
    return thread;
  }

  std::atomic<bool> waiting{false};
  std::atomic<bool> open{false};
  std::atomic<bool> home_written{false};
  std::function<void()> on_home_write;

 private:
  std::atomic<std::thread::id> held_;
};

struct Gated {
  explicit Gated(std::uint64_t ring_bytes) {
    LogStore::create(directory.path(), one_table(), ring_bytes, Caching::buffered);
    store = std::make_unique<LogStore>(directory.path(), one_table(), LogStoreOptions{Caching::buffered, {}, &gate});
    store->recover(1, every_step);
  }
  bool append(std::uint64_t step) {
    OwnedRows update(0, one_table()[0], {1});
    update.weights[0] = static_cast<std::byte>(step);
    const TableRows view = update.view();
    return store->append(store->pack(mark_of(step), {&view, 1})).has_value();
  }

  TemporaryDirectory directory;
  Gate gate;
  std::unique_ptr<LogStore> store;
};

void a_merge_waits_for_the_fetches_before_it() {
  Gated gated(64 << 10);
  CHECK(gated.append(1));
  gated.store->sync();
  OwnedRows wanted(0, one_table()[0], {1});
  std::thread fetch = gated.gate.begin_fetch(*gated.store, wanted);
  std::thread merge([&] { CHECK(gated.store->merge(up_to(1)) == 4096); });
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  CHECK(!gated.gate.home_written);
  gated.gate.open = true;
  fetch.join();
  merge.join();
  CHECK(gated.gate.home_written && wanted.weights[0] == std::byte{1});
}

void an_extent_that_is_being_read_is_not_used_again() {
  Gated gated(4096);  // one record fills it
  CHECK(gated.append(1));
  gated.store->sync();
  OwnedRows wanted(0, one_table()[0], {1});
  std::thread fetch;
  gated.gate.on_home_write = [&] { fetch = gated.gate.begin_fetch(*gated.store, wanted); };
  CHECK(gated.store->merge(up_to(1)) == 4096);
  CHECK(gated.store->index_entries() == 0);
  CHECK(!gated.append(2));
  gated.gate.open = true;
  fetch.join();
  CHECK(wanted.weights[0] == std::byte{1});
  CHECK(gated.append(2));
}

void records_are_packed_on_one_thread_and_written_on_another(std::uint64_t seed) {
  const std::vector<RowTable> tables = tables_of_every_shape();
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), tables, 4 << 20, Caching::buffered, {}, false, identity_of_tests);
  LogStore store(directory.path(), tables, buffered());
  store.recover(1, every_step);
  std::mt19937_64 random(seed);
  Model model;
  std::thread writer;
  for (std::uint64_t step = 1; step <= 40; ++step) {
    std::vector<OwnedRows> update = random_update(tables, 40, random);
    model.update(step, update);
    PackedRecord packed = store.pack(mark_of(step), views(update));  // beside the append of the step before
    if (writer.joinable()) writer.join();
    writer = std::thread([&store, packed = std::move(packed)] { CHECK(store.append(packed) == packed.bytes()); });
  }
  writer.join();
  CHECK(store.last() == mark_of(40));
  std::vector<OwnedRows> wanted;
  for (std::uint32_t t = 0; t < tables.size(); ++t) wanted.emplace_back(t, tables[t], every_row_of(tables[t]));
  store.fetch(views(wanted));
  model.check(tables, wanted);
}

// Holds the log's sync up until a merge is about to write its checkpoint, or does not come to it, and fails it then. Home
// and its addresses were synced meanwhile, and nobody told the merge that they are lost.
class TellsTheLogOnly final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile& file, std::uint64_t offset, std::span<const std::byte>) override {
    if (is_log(file) && log_syncs && offset < format::row_log_ring_offset) checkpoint = true;
  }
  void before_sync(const BlockFile& file) override {
    if (!fails || !is_log(file) || log_syncs.exchange(true)) return;
    using Clock = std::chrono::steady_clock;
    while (!addresses) std::this_thread::yield();
    for (const auto end = Clock::now() + std::chrono::milliseconds(200); Clock::now() < end && !checkpoint;) {
      std::this_thread::yield();
    }
    throw Error(ErrorKind::failed, "syncing " + file.name() + ": told to fail");
  }
  void after_sync(const BlockFile& file) override {
    if (file.name().find(".addresses") != std::string::npos && ++num_address_syncs == 2) addresses = true;
  }
  static bool is_log(const BlockFile& file) { return file.name().find("row-log") != std::string::npos; }

  std::atomic<bool> fails{false};
  std::atomic<bool> log_syncs{false};
  std::atomic<bool> addresses{false};
  std::atomic<bool> checkpoint{false};
  std::atomic<int> num_address_syncs{0};
};

void a_merge_gives_up_no_record_while_the_log_is_told_of_a_loss() {
  const std::vector<RowTable> tables = {table_of(0, 100, 16, RowDtype::f32, RowOptimizer::sgd)};
  const TemporaryDirectory directory;
  TellsTheLogOnly disk;
  LogStore::create(directory.path(), tables, 64 * format::block_bytes, Caching::buffered);
  LogStore store(directory.path(), tables, LogStoreOptions{Caching::buffered, {}, &disk});
  store.recover(1, every_step);
  const auto append = [&](std::uint64_t step) {
    OwnedRows update(0, tables[0], {step});
    const TableRows view = update.view();
    CHECK(store.append(store.pack(mark_of(step), {&view, 1})));
  };
  append(1);
  store.sync();
  append(2);
  disk.fails = true;
  std::thread committer([&] { CHECK(kind_thrown_by([&] { store.sync(); }) == ErrorKind::failed); });
  while (!disk.log_syncs) std::this_thread::yield();
  CHECK(kind_thrown_by([&] { store.merge(up_to(1)); }) == ErrorKind::failed);
  committer.join();
  CHECK(!disk.checkpoint && store.merged_step() == 0);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  std::set_terminate([] {  // an error that nobody expected, on any thread
    try {
      std::rethrow_exception(std::current_exception());
    } catch (const std::exception& error) {
      check::fail(__FILE__, __LINE__, error.what());
    }
  });
  const auto run = [&](const char* name, const std::function<void(std::uint64_t)>& test) {
    check::context = name;
    test(seed);
  };
  run("a merge waits", [](std::uint64_t) { a_merge_waits_for_the_fetches_before_it(); });
  run("an extent is pinned", [](std::uint64_t) { an_extent_that_is_being_read_is_not_used_again(); });
  run("the log is told", [](std::uint64_t) { a_merge_gives_up_no_record_while_the_log_is_told_of_a_loss(); });
  run("packing beside writing", records_are_packed_on_one_thread_and_written_on_another);
  run("an index that grows beside a merge", an_index_may_grow_beside_a_merge);
  run("readers, io_uring",
      [](std::uint64_t s) { readers_beside_the_writer_see_whole_rows(s, BlockQueue::Way::io_uring, 400); });
  run("readers, threads",
      [](std::uint64_t s) { readers_beside_the_writer_see_whole_rows(s, BlockQueue::Way::threads, 200); });
  return check::passed();
}

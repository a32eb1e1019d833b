// The log store's double: a model that keeps every version of every row, a disk that crashes and fails when it is told to,
// and a subject that does everything to both.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "commit/dense_copy.h"
#include "log_store/log_store.h"
#include "rows/row_values.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {

constexpr std::size_t sector = format::sector_bytes;

inline LogStore::Limit up_to(std::uint64_t step) {
  return [step] { return step; };
}
using Bytes = std::vector<std::byte>;

struct Crash {};

// Every step says something of its own; 0 is where no record was.
inline StepMark mark_of(std::uint64_t step) {
  if (step == 0) return {};
  return {step, 1000 * step, step / 2 + 1};
}

// A disk that may lose what was not synced: it remembers what every sector held at its file's last sync, and crashes or
// fails when it is told to.
class LossyDisk final : public BlockWatcher {
 public:
  void before_read(const BlockFile& file) override {
    if (std::exchange(fail_next_read, false)) {
      throw Error(ErrorKind::failed, "reading " + file.name() + ": told to fail");
    }
    if (call_in != 0 && --call_in == 0) call();
  }
  void before_write(const BlockFile& file, std::uint64_t offset, std::span<const std::byte> data) override {
    step_towards_the_end();
    if (fail_in != 0 && --fail_in == 0) fail_next_write = fail_as;
    if (fail_next_write) {
      const ErrorKind kind = *std::exchange(fail_next_write, std::nullopt);
      throw Error(kind, "writing " + file.place(offset) + ": told to fail");
    }
    std::ifstream stream(file.name(), std::ios::binary);
    auto& unsynced = unsynced_[file.name()];
    for (std::uint64_t at = offset; at < offset + data.size(); at += sector) {
      if (unsynced.contains(at)) continue;
      stream.seekg(static_cast<std::streamoff>(at));
      stream.read(reinterpret_cast<char*>(unsynced[at].data()), sector);
      CHECK(stream.good());
    }
  }
  void before_sync(const BlockFile& file) override {
    step_towards_the_end();
    if (fail_in != 0 && fail_as == ErrorKind::failed && --fail_in == 0) fail_next_sync = true;
    if (fail_next_sync) {
      fail_next_sync = false;
      throw Error(ErrorKind::failed, "syncing " + file.name() + ": told to fail");
    }
  }
  void after_sync(const BlockFile& file) override { unsynced_[file.name()].clear(); }

  // What a crash leaves: each sector that was written since the sync has its new bytes or the old ones. Sectors of a
  // log may also be zeros, where they change: nothing that is needed lies in those. Where nothing is lost (the
  // process died, the machine did not), it may still be by the next crash.
  void lose_unsynced(std::mt19937_64& random) {
    const std::uint64_t percent_lost = std::array{0, 100, 10, 50, 90}[random() % 5];
    if (percent_lost == 0) return;
    for (const auto& [name, sectors] : unsynced_) {
      if (sectors.empty()) continue;  // the file may be gone
      const bool is_log = name.find("row-log") != std::string::npos;
      std::fstream stream(name, std::ios::binary | std::ios::in | std::ios::out);
      for (const auto& [at, old] : sectors) {
        if (random() % 100 >= percent_lost) continue;
        const std::array<char, sector> zeros{};
        std::array<char, sector> now;
        stream.seekg(static_cast<std::streamoff>(at));
        stream.read(now.data(), sector);
        const char* bytes = is_log && now != old && random() % 3 == 0 ? zeros.data() : old.data();
        stream.seekp(static_cast<std::streamoff>(at));
        stream.write(bytes, sector);
      }
      CHECK(stream.good());
    }
    unsynced_.clear();
  }

  std::uint64_t num_writes = 0;  // and syncs
  std::uint64_t crash_in = 0;  // writes and syncs from now; 0: never
  std::optional<ErrorKind> fail_next_write;
  bool fail_next_sync = false;
  bool fail_next_read = false;
  std::uint64_t call_in = 0;  // reads from now; 0: never
  std::function<void()> call;
  std::uint64_t fail_in = 0;  // writes from now, or syncs, unless the medium is to be full; 0: never
  ErrorKind fail_as = ErrorKind::failed;

 private:
  void step_towards_the_end() {
    ++num_writes;
    if (crash_in != 0 && --crash_in == 0) throw Crash{};
  }
  std::map<std::string, std::map<std::uint64_t, std::array<char, sector>>> unsynced_;
};

// Whose the stores of these tests are.
inline const Identity identity_of_tests(Uuid{7, 7, 7});

inline RowTable table_of(std::uint64_t number, std::uint64_t rows, std::uint32_t dim, RowDtype dtype,
                         RowOptimizer optimizer, HomeOrder order = HomeOrder::by_first_touch) {
  RowTable table{{dim, dtype, optimizer, state_floats_of(optimizer, dim), 7, number, -0.5f, 0.5f}, rows};
  table.identity = identity_of_tests;
  table.home_order = order;
  table.spec.tag_seed = identity_of_tests.seed();
  return table;
}

// Images of 6, 8, 72, 136 and 2404 bytes: in sectors 85, 64, 7 and 3 of them in one, and one in five.
inline std::vector<RowTable> tables_of_every_shape(HomeOrder order = HomeOrder::by_first_touch) {
  return {table_of(0, 1000, 1, RowDtype::f16, RowOptimizer::sgd, order),
          table_of(1, 300, 1, RowDtype::f32, RowOptimizer::sgd, order),
          table_of(2, 200, 16, RowDtype::f32, RowOptimizer::rowwise_adagrad, order),
          table_of(3, 100, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad, order),
          table_of(4, 60, 200, RowDtype::f32, RowOptimizer::adam, order)};
}
inline HomeOrder either_order(std::uint64_t seed) {
  return seed % 2 == 0 ? HomeOrder::by_first_touch : HomeOrder::by_row;
}

// Rows of one table with memory of their own.
struct OwnedRows {
  OwnedRows(std::uint32_t number, const RowTable& what, std::vector<std::uint64_t> chosen)
      : table(number),
        weight_bytes(std::size_t{what.spec.dim} * bytes_of(what.spec.dtype)),
        state_floats(what.spec.state_floats),
        rows(std::move(chosen)),
        weights(rows.size() * weight_bytes),
        state(rows.size() * state_floats) {}

  TableRows view() { return {table, rows.size(), {rows.data(), weights.data(), state.data()}}; }
  Bytes value(std::size_t u) const {
    Bytes bytes(weights.begin() + static_cast<std::ptrdiff_t>(u * weight_bytes),
                weights.begin() + static_cast<std::ptrdiff_t>((u + 1) * weight_bytes));
    const auto* of_state = reinterpret_cast<const std::byte*>(state.data() + u * state_floats);
    bytes.insert(bytes.end(), of_state, of_state + state_floats * 4);
    return bytes;
  }

  std::uint32_t table;
  std::size_t weight_bytes;
  std::size_t state_floats;
  std::vector<std::uint64_t> rows;
  Bytes weights;
  std::vector<float> state;
};

inline std::vector<std::uint64_t> rows_from(std::uint64_t first, std::uint64_t count) {
  std::vector<std::uint64_t> rows(count);
  std::iota(rows.begin(), rows.end(), first);
  return rows;
}

inline std::vector<TableRows> views(std::vector<OwnedRows>& owned) {
  std::vector<TableRows> views;
  for (OwnedRows& rows : owned) views.push_back(rows.view());
  return views;
}

// As two updates of one step do it: each a draft of some of the tables, its rows packed a few at a time.
inline PackedRecord pack_in_parts(const LogStore& store, const StepMark& mark, std::vector<OwnedRows>& update,
                                  std::mt19937_64& random) {
  std::vector<std::vector<TableRows>> of_drafts(2);
  for (const TableRows& table : views(update)) of_drafts[random() % 2].push_back(table);
  std::vector<RecordDraft> drafts;
  for (const std::vector<TableRows>& tables : of_drafts) {
    drafts.push_back(store.draft(tables));
    for (std::size_t section = 0; section < tables.size(); ++section) {
      const auto& [number, num_rows, rows] = tables[section];
      const OwnedRows& owned = *std::ranges::find(update, number, &OwnedRows::table);
      const std::size_t step = store.unit_rows(number) * (1 + random() % 3);
      const std::size_t parts = (num_rows + step - 1) / step;
      for (std::size_t part = parts; part-- > 0;) {
        const std::size_t begin = part * step;
        store.pack_rows(
            drafts.back(), section,
            {rows.rows + begin, rows.weights + begin * owned.weight_bytes, rows.state + begin * owned.state_floats},
            begin, std::min(step, num_rows - begin));
      }
    }
  }
  if (random() % 4 == 0) std::swap(drafts[0], drafts[1]);
  return store.seal(mark, std::move(drafts));
}

inline std::vector<std::uint64_t> random_rows(std::uint64_t num_rows, std::size_t most, std::mt19937_64& random) {
  std::set<std::uint64_t> rows;
  const std::size_t count = random() % (most + 1);
  const std::uint64_t first = random() % num_rows;
  const std::uint64_t spread = random() % 2 == 0 ? num_rows : std::min<std::uint64_t>(num_rows, 2 * most);
  for (std::size_t i = 0; i < count; ++i) rows.insert((first + random() % spread) % num_rows);
  return {rows.begin(), rows.end()};
}

inline std::vector<std::uint64_t> every_row_of(const RowTable& table) { return rows_from(0, table.num_rows); }

// Random new values for random rows of some of the tables, and mostly for their first rows too: these are hot.
inline std::vector<OwnedRows> random_update(const std::vector<RowTable>& tables, std::size_t most,
                                            std::mt19937_64& random) {
  std::vector<OwnedRows> update;
  for (std::uint32_t t = 0; t < tables.size(); ++t) {
    if (random() % 4 == 0) continue;
    std::vector<std::uint64_t> chosen = random_rows(tables[t].num_rows, most, random);
    if (random() % 3 != 0) {
      constexpr std::array<std::uint64_t, 4> hot = {0, 1, 2, 3};
      std::vector<std::uint64_t> cold = std::exchange(chosen, {});
      std::set_union(cold.begin(), cold.end(), hot.begin(), hot.end(), std::back_inserter(chosen));
    }
    OwnedRows& rows = update.emplace_back(t, tables[t], std::move(chosen));
    for (std::byte& byte : rows.weights) byte = static_cast<std::byte>(random());
    for (float& value : rows.state) value = static_cast<float>(random() % 1000);
    if (random() % 2 == 0) {
      for (std::uint64_t& row : rows.rows) row |= fresh_bit;  // as capture leaves rows: append takes no notice
    }
  }
  return update;
}

// Every version of every row, by step.
class Model {
 public:
  void update(std::uint64_t step, const std::vector<OwnedRows>& update) {
    for (const OwnedRows& rows : update) {
      for (std::size_t u = 0; u < rows.rows.size(); ++u) {
        versions_[{rows.table, rows.rows[u] & ~fresh_bit}][step] = rows.value(u);
      }
    }
  }
  void roll_back(std::uint64_t step) {
    for (auto& [row, versions] : versions_) versions.erase(versions.upper_bound(step), versions.end());
  }
  std::vector<std::uint64_t> touched(std::uint32_t table) const {
    std::vector<std::uint64_t> rows;
    for (const auto& [row, versions] : versions_) {
      if (row.first == table && !versions.empty()) rows.push_back(row.second);
    }
    return rows;
  }
  // Whether the fetched rows are what they should be.
  void check(const std::vector<RowTable>& tables, const std::vector<OwnedRows>& fetched) const {
    for (const OwnedRows& rows : fetched) {
      const RowTable& table = tables[rows.table];
      for (std::size_t u = 0; u < rows.rows.size(); ++u) {
        const std::uint64_t row = rows.rows[u] & ~fresh_bit;
        const auto found = versions_.find({rows.table, row});
        const bool touched = found != versions_.end() && !found->second.empty();
        CHECK(((rows.rows[u] & fresh_bit) == 0) == touched);
        CHECK(rows.value(u) == (touched ? found->second.rbegin()->second : initial(table, row)));
      }
    }
  }

 private:
  static Bytes initial(const RowTable& table, std::uint64_t row) {
    const std::size_t weight_bytes = std::size_t{table.spec.dim} * bytes_of(table.spec.dtype);
    Bytes bytes(weight_bytes + table.spec.state_floats * 4);
    best_kernels().initial_row(table.spec, row, bytes.data());
    return bytes;
  }
  std::map<std::pair<std::uint32_t, std::uint64_t>, std::map<std::uint64_t, Bytes>> versions_;
};

// A store, its disk, and what is known about it. A life ends in a crash; the next one begins with reopen.
class Subject {
 public:
  Subject(std::vector<RowTable> tables, std::uint64_t ring_bytes, LogStoreOptions options, std::uint64_t seed,
          TemporaryDirectory::Place place = TemporaryDirectory::Place::memory)
      : random(seed), tables_(std::move(tables)), options_(options), directory_(place) {
    options_.identity = identity_of_tests;
    LogStore::create(directory_.path(), tables_, ring_bytes, options.caching, {}, false, identity_of_tests);
    options_.watcher = &disk;
    open(every_step);
  }

  void open(std::uint64_t step_limit) {
    store = std::make_unique<LogStore>(directory_.path(), tables_, options_);
    if (random() % 2 == 0) {
      const StepMark found = store->scan();
      CHECK(found == store->last());
    }
    const std::uint64_t recovered = store->recover(++epoch, step_limit);
    CHECK(recovered <= std::min(step_limit, last_attempted));
    CHECK(recovered >= newest_step_up_to(std::min(step_limit, durable)));
    CHECK(store->durable_step() == recovered && store->last() == mark_of(recovered));
    went_back_to(recovered);
  }
  // In either of the forms in which rows come.
  void import_rows(std::uint32_t table, std::span<const std::uint64_t> rows, std::span<const std::byte> weights,
                   std::span<const float> state) {
    const RowTable& what = tables_[table];
    const ImportedRows apart = ImportedRows::apart(what, rows, weights, state);
    if (random() % 2 == 0) return store->import_rows(table, apart);
    std::vector<std::byte> values(rows.size() * value_bytes(what));
    for (std::size_t i = 0; i < rows.size(); ++i) {
      std::byte* const to = values.data() + i * value_bytes(what);
      apart.put(i, what.weight_bytes(), to, what.state_bytes(), to + what.weight_bytes());
    }
    store->import_rows(table, ImportedRows::together(what, rows, values));
  }
  // Looks at what a crash left, by other means than recovery: it finds the same, and changes nothing.
  void look() {
    LogStoreOptions reading = options_;
    reading.writable = false;
    store = std::make_unique<LogStore>(directory_.path(), tables_, reading);
    const std::uint64_t writes_before = disk.num_writes;
    const StepMark found = store->scan();
    CHECK(found == mark_of(found.step) && found.step <= last_attempted);
    CHECK(found.step >= newest_step_up_to(durable));
    const std::uint64_t durable_before = durable;  // to have been seen is not to be durable
    went_back_to(found.step);
    durable = durable_before;
    store->view();
    fetch_all();
    list_touched();
    CHECK(store->verify(store->last().step).empty());
    CHECK(disk.num_writes == writes_before);
    store.reset();
  }
  void went_back_to(std::uint64_t step) {
    model.roll_back(step);
    steps.erase(steps.upper_bound(step), steps.end());
    last_attempted = step;
    durable = step;
  }

  // The process is gone, and some of what was not synced.
  void crash() {
    store.reset();
    disk.crash_in = 0;
    disk.lose_unsynced(random);
  }

  // Returns whether there was room.
  bool append(std::size_t most_rows) {
    std::vector<OwnedRows> update = random_update(tables_, most_rows, random);
    const std::uint64_t step = store->last().step + 1 + random() % 2;
    last_attempted = step;
    steps.insert(step);
    Model before = model;
    model.update(step, update);
    const bool in_parts = random() % 2 == 0;
    if (store->append(in_parts ? pack_in_parts(*store, mark_of(step), update, random)
                               : store->pack(mark_of(step), views(update)))) {
      return true;
    }
    model = std::move(before);
    steps.erase(step);
    last_attempted = store->last().step;
    return false;
  }
  void sync() {
    const std::uint64_t step = store->last().step;
    store->sync();
    durable = step;
    CHECK(store->durable_step() >= durable);
  }
  std::uint64_t merge(std::uint64_t limit) {
    floor = std::max(floor, limit);
    const std::uint64_t used_bytes = store->used_bytes();
    const std::uint64_t merged_bytes = store->merge(up_to(limit));
    CHECK(store->used_bytes() + merged_bytes <= used_bytes && store->used_bytes() <= store->ring_bytes());
    return merged_bytes;
  }
  // While it is at work steps are appended, some of them become durable, and its limit may rise.
  void merge_beside_appends(std::uint64_t limit, std::size_t most_rows) {
    store->merge([this, limit, most_rows]() mutable {
      floor = std::max(floor, limit);
      const std::uint64_t asked = limit;
      if (random() % 2 == 0) append(most_rows);
      if (random() % 2 == 0) sync();
      if (random() % 2 == 0) limit = std::max(limit, durable);
      return asked;
    });
    CHECK(store->merged_step() <= floor);
  }
  // The `n`-th time that it looks whether it should, it gives up; before that, steps are appended beside it. Returns what
  // it took.
  std::uint64_t give_up_merge(std::uint64_t limit, std::uint64_t n, std::size_t most_rows) {
    floor = std::max(floor, limit);
    const std::uint64_t merged_step = store->merged_step();
    bool gave_up = false;
    const std::uint64_t merged = store->merge(
        [&] {
          if (most_rows != 0 && random() % 2 == 0) append(most_rows);
          return limit;
        },
        [](std::chrono::nanoseconds, double) { return true; }, [&] { return gave_up = gave_up || --n == 0; });
    if (gave_up) CHECK(merged == 0 && store->merged_step() == merged_step);
    return merged;
  }
  void append_with_room(std::size_t most_rows) {
    if (append(most_rows)) return;
    sync();
    merge(durable);
    CHECK(append(most_rows));  // an empty ring has room
  }
  void fetch_some() {
    std::vector<OwnedRows> wanted;
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      if (random() % 3 != 0) wanted.emplace_back(t, tables_[t], random_rows(tables_[t].num_rows, 50, random));
    }
    store->fetch(views(wanted));
    model.check(tables_, wanted);
  }
  void fetch_all() {
    std::vector<OwnedRows> wanted;
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      wanted.emplace_back(t, tables_[t], every_row_of(tables_[t]));
    }
    store->fetch(views(wanted));
    model.check(tables_, wanted);
  }

  // In pieces, as one who goes through a table asks.
  void list_touched() {
    for (std::uint32_t t = 0; t < tables_.size(); ++t) {
      const std::size_t count = 1 + random() % std::min<std::uint64_t>(20000, 2 * tables_[t].num_rows);
      std::vector<std::uint64_t> found;
      for (std::uint64_t first = 0;;) {
        const std::vector<std::uint64_t> rows = store->touched_rows(t, first, count);
        CHECK(rows.size() <= count);
        found.insert(found.end(), rows.begin(), rows.end());
        if (rows.size() < count) break;
        first = rows.back() + 1;
      }
      CHECK(found == model.touched(t));
    }
  }

  const std::string& directory() const { return directory_.path(); }
  std::string file(const char* name) const { return directory_.path() + "/" + name; }

  std::mt19937_64 random;
  LossyDisk disk;
  Model model;
  std::unique_ptr<LogStore> store;
  std::set<std::uint64_t> steps;  // whose append began
  std::uint64_t epoch = 0;
  std::uint64_t last_attempted = 0;  // the newest step whose append began
  std::uint64_t durable = 0;
  std::uint64_t floor = 0;  // the greatest limit that a merge was given

 private:
  std::uint64_t newest_step_up_to(std::uint64_t step) const {
    const auto after = steps.upper_bound(step);
    return after == steps.begin() ? 0 : *std::prev(after);
  }

  std::vector<RowTable> tables_;
  LogStoreOptions options_;
  TemporaryDirectory directory_;
};

inline std::vector<RowTable> one_table(HomeOrder order = HomeOrder::by_first_touch) {
  return {table_of(0, 200, 16, RowDtype::f32, RowOptimizer::rowwise_adagrad, order)};
}
inline LogStoreOptions buffered(BlockQueue::Way way = BlockQueue::Way::io_uring) {
  return {.caching = Caching::buffered, .way = way, .identity = identity_of_tests};
}

// Records of rows that are named.

inline std::uint64_t append_rows(Subject& subject, std::uint64_t step, const RowTable& table,
                                 const std::vector<std::uint64_t>& rows) {
  std::vector<OwnedRows> update;
  subject.steps.insert(step);
  update.emplace_back(0, table, rows);
  update[0].weights[0] = static_cast<std::byte>(step);
  subject.model.update(step, update);
  subject.last_attempted = step;
  return subject.store->append(subject.store->pack(mark_of(step), views(update))).value();
}

// Records of steps 1 to 3 lie one behind another from the ring's first byte, 4096 bytes each.
inline void append_three_rows(Subject& subject, std::uint64_t step) {
  CHECK(append_rows(subject, step, one_table()[0], {1, 5, 100}) == 4096);
}

inline void make_three_records(Subject& subject) {
  for (std::uint64_t step = 1; step <= 3; ++step) {
    append_three_rows(subject, step);
    subject.sync();
  }
}

}  // namespace holdfast

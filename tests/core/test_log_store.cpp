// The log store against a model that keeps every version: random appends, fetches, syncs, merges and roll-backs on
// small rings, crashes at any write or sync, and everything that a crash may have left of the writes since the last
// sync.
#include <sys/mount.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "error.h"
#include "log_store.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::size_t sector = format::sector_bytes;
constexpr std::uint64_t every_step = std::numeric_limits<std::uint64_t>::max();

LogStore::Limit up_to(std::uint64_t step) {
  return [step] { return step; };
}
using Bytes = std::vector<std::byte>;

struct Crash {};

// Every step says something of its own; 0 is where no record was.
StepMark mark_of(std::uint64_t step) {
  if (step == 0) return {};
  return {step, 1000 * step, step / 2 + 1};
}

// A disk that may lose what was not synced: it remembers what every sector held at its file's last sync, and crashes or
// fails when it is told to.
class Disk final : public BlockWatcher {
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
  // log may also be zeros: nothing that is needed lies in those that are being written. Where nothing is lost (the
  // process died, the machine did not), it may still be by the next crash.
  void lose_unsynced(std::mt19937_64& random) {
    const std::uint64_t percent_lost = std::array{0, 100, 10, 50, 90}[random() % 5];
    if (percent_lost == 0) return;
    for (const auto& [name, sectors] : unsynced_) {
      const bool is_log = name.find("row-log") != std::string::npos;
      std::fstream stream(name, std::ios::binary | std::ios::in | std::ios::out);
      for (const auto& [at, old] : sectors) {
        if (random() % 100 >= percent_lost) continue;
        const std::array<char, sector> zeros{};
        const char* bytes = is_log && random() % 3 == 0 ? zeros.data() : old.data();
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

RowTable table_of(std::uint64_t number, std::uint64_t rows, std::uint32_t dim, RowDtype dtype, RowOptimizer optimizer) {
  return {{dim, dtype, optimizer, state_floats_of(optimizer, dim), 7, number, -0.5f, 0.5f}, rows};
}

// Images of 6, 8, 72, 136 and 2404 bytes: 85, 64, 7 and 3 in a sector, and one in five sectors.
std::vector<RowTable> tables_of_every_shape() {
  return {table_of(0, 1000, 1, RowDtype::f16, RowOptimizer::sgd), table_of(1, 300, 1, RowDtype::f32, RowOptimizer::sgd),
          table_of(2, 200, 16, RowDtype::f32, RowOptimizer::rowwise_adagrad),
          table_of(3, 100, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad),
          table_of(4, 60, 200, RowDtype::f32, RowOptimizer::adam)};
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

std::vector<TableRows> views(std::vector<OwnedRows>& owned) {
  std::vector<TableRows> views;
  for (OwnedRows& rows : owned) views.push_back(rows.view());
  return views;
}

std::vector<std::uint64_t> random_rows(std::uint64_t num_rows, std::size_t most, std::mt19937_64& random) {
  std::set<std::uint64_t> rows;
  const std::size_t count = random() % (most + 1);
  const std::uint64_t first = random() % num_rows;
  const std::uint64_t spread = random() % 2 == 0 ? num_rows : std::min<std::uint64_t>(num_rows, 2 * most);
  for (std::size_t i = 0; i < count; ++i) rows.insert((first + random() % spread) % num_rows);
  return {rows.begin(), rows.end()};
}

std::vector<std::uint64_t> every_row_of(const RowTable& table) {
  std::vector<std::uint64_t> rows(table.num_rows);
  std::iota(rows.begin(), rows.end(), 0);
  return rows;
}

// Random new values for random rows of some of the tables, and mostly for their first rows too: these are hot.
std::vector<OwnedRows> random_update(const std::vector<RowTable>& tables, std::size_t most, std::mt19937_64& random) {
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
    LogStore::create(directory_.path(), tables_, ring_bytes, options.caching);
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
    if (store->append(store->pack(mark_of(step), views(update)))) return true;
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
  Disk disk;
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

void live_at_random(Subject& subject, std::size_t most_rows) {
  for (int i = 0; i < 40; ++i) {
    switch (subject.random() % 9) {
      case 0:
      case 1:
      case 2: subject.append_with_room(most_rows); break;
      case 3: subject.sync(); break;
      case 4: {
        // Beyond what is durable, too: only that is merged.
        const std::uint64_t newest = subject.random() % 2 == 0 ? subject.durable : subject.last_attempted;
        const std::uint64_t limit =
            subject.floor + subject.random() % (std::max(newest, subject.floor) - subject.floor + 1);
        if (subject.random() % 2 == 0) {
          subject.merge(limit);
        } else {
          subject.merge_beside_appends(limit, most_rows);
        }
        break;
      }
      case 5: subject.list_touched(); break;
      default: subject.fetch_some(); break;
    }
  }
}

// Lives that end in crashes, at random or at the n-th write or sync, and begin where the last one's durable steps
// ended.
void random_lives_agree_with_the_model(std::uint64_t seed, std::uint64_t ring_bytes, std::size_t most_rows, int lives,
                                       const LogStoreOptions& options, TemporaryDirectory::Place place) {
  Subject subject(tables_of_every_shape(), ring_bytes, options, seed, place);
  for (int life = 0; life < lives; ++life) {
    check::context = "ring of " + std::to_string(ring_bytes) + ", life " + std::to_string(life);
    if (subject.random() % 4 != 0) subject.disk.crash_in = 1 + subject.random() % 60;
    try {
      live_at_random(subject, most_rows);
      subject.fetch_all();
      if (subject.random() % 3 == 0) {
        subject.disk.crash_in = 1 + subject.random() % 60;
        subject.merge(std::max(subject.last_attempted, subject.floor));
        subject.fetch_all();
      }
    } catch (const Crash&) {
    }
    subject.crash();
    if (subject.random() % 3 == 0) subject.look();
    const bool limited = subject.random() % 3 == 0;
    // As often as not exactly to where the last merge was allowed to.
    const std::uint64_t span =
        subject.random() % 2 * (std::max(subject.last_attempted, subject.floor) - subject.floor) + 1;
    if (subject.random() % 4 == 0) {  // recovery may crash too
      subject.disk.crash_in = 1 + subject.random() % 4;
      try {
        subject.open(every_step);
      } catch (const Crash&) {
        subject.crash();
        subject.open(every_step);
      }
      subject.disk.crash_in = 0;
    } else {
      subject.open(limited ? subject.floor + subject.random() % span : every_step);
    }
    subject.fetch_all();
    if (subject.random() % 3 == 0 && subject.store->last().step > subject.floor) {
      const std::uint64_t steps = subject.random() % 2 * (subject.store->last().step - subject.floor - 1) + 1;
      const std::uint64_t step = subject.floor + subject.random() % steps;
      subject.store->roll_back(step);
      CHECK(subject.store->last().step <= step);
      CHECK(subject.store->last() == mark_of(subject.store->last().step));
      subject.went_back_to(subject.store->last().step);
      subject.fetch_all();
    }
  }
}

// Small things, one store each.

std::vector<RowTable> one_table() { return {table_of(0, 200, 16, RowDtype::f32, RowOptimizer::rowwise_adagrad)}; }
LogStoreOptions buffered(BlockQueue::Way way = BlockQueue::Way::io_uring) { return {Caching::buffered, way, nullptr}; }

void a_full_ring_says_so_until_it_is_merged(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  while (subject.append(100)) {
  }
  CHECK(subject.merge(every_step - 1) == 0);  // nothing is durable: nothing may be merged
  subject.sync();
  CHECK(subject.merge(every_step - 1) > 0);
  CHECK(subject.store->index_entries() == 0);
  CHECK(subject.append(100));
  subject.fetch_all();
}

void nothing_goes_before_recovery() {
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), one_table(), 64 << 10, Caching::buffered);
  LogStore store(directory.path(), one_table(), buffered());
  CHECK(kind_thrown_by([&] { store.fetch({}); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.append(store.pack(mark_of(1), {})); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.sync(); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.merge(up_to(1)); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.touched_rows(0, 0, 1); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { LogStore::create(directory.path(), one_table(), 4095, Caching::buffered); }) ==
        ErrorKind::exists);
}

std::uint64_t append_rows(Subject& subject, std::uint64_t step, const RowTable& table,
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
void append_three_rows(Subject& subject, std::uint64_t step) {
  CHECK(append_rows(subject, step, one_table()[0], {1, 5, 100}) == 4096);
}

void make_three_records(Subject& subject) {
  for (std::uint64_t step = 1; step <= 3; ++step) {
    append_three_rows(subject, step);
    subject.sync();
  }
}

void a_store_begins_once(std::uint64_t seed) {
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), one_table(), 64 << 10, Caching::buffered);
  LogStore store(directory.path(), one_table(), buffered());
  CHECK(kind_thrown_by([&] { store.view(); }) == ErrorKind::step);
  CHECK(store.scan() == StepMark{});
  CHECK(kind_thrown_by([&] { store.scan(); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.view(); }) == ErrorKind::step);  // writable
  CHECK(kind_thrown_by([&] { store.fetch({}); }) == ErrorKind::step);
  store.recover(1 + seed % 100, every_step);
  CHECK(kind_thrown_by([&] { store.recover(1000, every_step); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.scan(); }) == ErrorKind::step);
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  subject.crash();
  subject.disk.fail_next_sync = true;
  CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { subject.store->recover(1000, every_step); }) == ErrorKind::failed);
  subject.crash();
  subject.open(every_step);
}

void a_store_opened_for_reading_never_writes(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  CHECK(subject.store->used_bytes() == 3 * 4096);
  subject.merge(1);
  CHECK(subject.store->used_bytes() == 2 * 4096);
  subject.crash();
  const auto modified = [&](const char* name) { return std::filesystem::last_write_time(subject.file(name)); };
  const std::array before{modified("row-log-0000"), modified("shard-0000/table-0000.home")};
  const auto forbid = [&](auto permissions) {
    for (const char* name : {"row-log-0000", "shard-0000/table-0000.home"}) {
      std::filesystem::permissions(subject.file(name), permissions);
    }
  };
  forbid(std::filesystem::perms::owner_read);
  LogStoreOptions reading = buffered();
  reading.writable = false;
  LogStore store(subject.directory(), one_table(), reading);
  CHECK(kind_thrown_by([&] { store.view(); }) == ErrorKind::step);  // before scan
  CHECK(store.scan() == mark_of(3));
  CHECK(kind_thrown_by([&] { store.fetch({}); }) == ErrorKind::step);
  store.view();
  std::vector<OwnedRows> wanted;
  wanted.emplace_back(0, one_table()[0], every_row_of(one_table()[0]));
  store.fetch(views(wanted));
  subject.model.check(one_table(), wanted);
  CHECK(kind_thrown_by([&] { store.recover(9, every_step); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.roll_back(1); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.append(store.pack(mark_of(4), {})); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.sync(); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.merge(up_to(3)); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.import_rows(0, 0, {}, {}); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.sync_home(); }) == ErrorKind::step);
  CHECK((before == std::array{modified("row-log-0000"), modified("shard-0000/table-0000.home")}));
  forbid(std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

void a_record_larger_than_the_ring_is_refused(std::uint64_t seed) {
  Subject subject(one_table(), 8 << 10, buffered(), seed);
  OwnedRows all(0, one_table()[0], every_row_of(one_table()[0]));
  const TableRows view = all.view();
  CHECK(kind_thrown_by([&] { subject.store->append(subject.store->pack(mark_of(1), {&view, 1})); }) ==
        ErrorKind::batch_too_large);
  CHECK(subject.append(5));
  CHECK(kind_thrown_by([&] { subject.store->append(subject.store->pack(mark_of(1), {})); }) == ErrorKind::step);
  subject.fetch_all();
}

void a_full_medium_changes_nothing(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  CHECK(subject.append(50));
  const Model before = subject.model;
  subject.disk.fail_next_write = ErrorKind::full;
  CHECK(kind_thrown_by([&] { subject.append(50); }) == ErrorKind::full);
  subject.model = before;
  subject.fetch_all();
  CHECK(subject.append(50));
  subject.sync();
  subject.disk.fail_next_write = ErrorKind::full;
  CHECK(kind_thrown_by([&] { subject.merge(subject.durable); }) == ErrorKind::full);
  subject.fetch_all();
  CHECK(subject.append(50));
  subject.sync();
  CHECK(subject.merge(subject.durable) > 0);
  subject.fetch_all();
  subject.crash();
  subject.open(every_step);
  subject.fetch_all();
}

void any_other_failure_stops_the_store(std::uint64_t seed) {
  for (const bool in_sync : {false, true}) {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    CHECK(subject.append(50));
    subject.sync();
    CHECK(subject.append(50));
    const Model before = subject.model;
    const auto fail = [&] {
      if (in_sync) {
        subject.disk.fail_next_sync = true;
        subject.store->sync();
      } else {
        subject.disk.fail_next_write = ErrorKind::failed;
        subject.append(50);
      }
    };
    CHECK(kind_thrown_by(fail) == ErrorKind::failed);
    const std::uint64_t next = subject.store->last().step + 1;
    CHECK(kind_thrown_by([&] { subject.store->append(subject.store->pack(mark_of(next), {})); }) == ErrorKind::failed);
    CHECK(kind_thrown_by([&] { subject.store->sync(); }) == ErrorKind::failed);
    CHECK(kind_thrown_by([&] { subject.store->merge(up_to(1)); }) == ErrorKind::failed);
    subject.model = before;
    subject.fetch_all();
    subject.crash();
    subject.open(every_step);
    subject.fetch_all();
    CHECK(subject.append(50));
  }
}

void a_failed_read_leaves_the_store_usable(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(1);
  for (const auto& verb : std::vector<std::function<void()>>{
           [&] { subject.fetch_all(); }, [&] { subject.list_touched(); }, [&] { subject.merge(2); }}) {
    subject.disk.fail_next_read = true;
    CHECK(kind_thrown_by(verb) == ErrorKind::failed);
    verb();
    subject.fetch_all();
    subject.append_with_room(50);
    subject.sync();
  }
}

// Rows 1, 5 and 100 are in each of the steps 1, 2 and 3.
void a_row_is_written_home_once_whatever_steps_have_it(std::uint64_t seed) {
  for (const std::uint64_t limit : {2, 3}) {  // of the rows' newest versions, step 3's, the limit is before, or not
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(limit);
    const LogStoreCounters counters = subject.store->counters();
    CHECK(counters.merged_rows == 3 && counters.merged_bytes == limit * 4096);  // of 3 * limit rows
    CHECK(counters.home_sectors_changed == 2);
    CHECK(subject.store->merged_step() == limit && subject.store->index_entries() == (limit == 2 ? 3 : 0));
    subject.fetch_all();
    subject.crash();
    CHECK(kind_thrown_by([&] { subject.open(limit - 1); }) == ErrorKind::step);
    subject.open(limit);
    CHECK(subject.store->index_entries() == 0);
    subject.fetch_all();
  }
}

// A merge that reads its records one by one, and before its n-th read all of their rows are updated once more.
void an_update_at_any_moment_of_a_merge_changes_nothing_of_it(std::uint64_t seed) {
  LogStoreOptions options = buffered();
  options.merge_bytes = 1;
  for (std::uint64_t n = 1;; ++n) {
    Subject subject(one_table(), 64 << 10, options, seed);
    make_three_records(subject);
    bool called = false;
    subject.disk.call = [&] {
      append_three_rows(subject, 4);
      called = true;
    };
    subject.disk.call_in = n;
    subject.floor = 3;
    CHECK(subject.store->merge(up_to(3)) == 3 * 4096);
    subject.disk.call_in = 0;
    if (!called) {
      CHECK(n > 5);  // the images of three rows, and home
      return;
    }
    subject.fetch_all();
    CHECK(subject.store->index_entries() == 3);
    subject.crash();
    subject.open(3);
    subject.fetch_all();
  }
}

// Three steps of every table, durable; then a merge of them.
struct BeforeMerge {
  explicit BeforeMerge(std::uint64_t seed) : subject(tables_of_every_shape(), 1 << 20, buffered(), seed) {
    for (int i = 0; i < 3; ++i) subject.append_with_room(50);
    subject.sync();
  }
  void merge() { CHECK(subject.merge(subject.durable) > 0); }
  Subject subject;
};

void a_merge_that_fails_anywhere_is_done_again_in_the_next_life(std::uint64_t seed) {
  for (std::uint64_t n = 1;; ++n) {
    BeforeMerge before(seed);
    Subject& subject = before.subject;
    subject.disk.fail_in = n;
    try {
      before.merge();
      CHECK(n > 6);  // home, its sync, the checkpoint and its sync were all told to fail
      return;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::failed);
    }
    subject.disk.fail_in = 0;
    CHECK(kind_thrown_by([&] { before.merge(); }) == ErrorKind::failed);
    CHECK(kind_thrown_by([&] { subject.store->sync(); }) == ErrorKind::failed);
    const PackedRecord packed = subject.store->pack(mark_of(subject.store->last().step + 1), {});
    CHECK(kind_thrown_by([&] { subject.store->append(packed); }) == ErrorKind::failed);
    subject.crash();
    subject.open(every_step);
    subject.fetch_all();
    if (subject.store->used_bytes() > 0) before.merge();
    subject.fetch_all();
  }
}

void a_merge_that_finds_the_medium_full_anywhere_can_be_done_again(std::uint64_t seed) {
  for (std::uint64_t n = 1;; ++n) {
    BeforeMerge before(seed);
    Subject& subject = before.subject;
    subject.disk.fail_in = n;
    subject.disk.fail_as = ErrorKind::full;
    const std::uint64_t used_bytes = subject.store->used_bytes();
    try {
      before.merge();
      CHECK(n > 3);
      return;
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::full);
    }
    CHECK(subject.store->used_bytes() == used_bytes);
    subject.fetch_all();
    subject.append_with_room(50);
    subject.sync();
    before.merge();
    subject.fetch_all();
    subject.crash();
    subject.open(every_step);
    subject.fetch_all();
  }
}

// A file system of 4 MiB; nothing where there is no right to mount one.
class SmallMedium {
 public:
  SmallMedium() : mounted_(::mount("none", path().c_str(), "tmpfs", 0, "size=4m") == 0) {}
  ~SmallMedium() {
    if (mounted_) ::umount2(path().c_str(), MNT_DETACH);
  }
  SmallMedium(const SmallMedium&) = delete;
  SmallMedium& operator=(const SmallMedium&) = delete;
  explicit operator bool() const { return mounted_; }
  const std::string& path() const { return directory_.path(); }
  std::string ballast() const { return path() + "/ballast"; }
  void fill() const {
    std::ofstream stream(ballast(), std::ios::binary);
    const std::vector<char> bytes(4096);
    while (stream.write(bytes.data(), 4096).flush()) {
    }
  }

 private:
  TemporaryDirectory directory_;
  bool mounted_;
};

void a_sparse_home_on_a_full_file_system_waits_for_space(std::uint64_t seed) {
  const SmallMedium medium;
  if (!medium) return;
  const std::vector<RowTable> tables = {table_of(0, 1000000, 200, RowDtype::f32, RowOptimizer::adam)};
  const std::string directory = medium.path() + "/store";
  std::filesystem::create_directory(directory);
  CHECK(kind_thrown_by([&] { LogStore::create(medium.path() + "/large", tables, 8 << 20, Caching::buffered); }) ==
        ErrorKind::full);
  std::filesystem::remove_all(medium.path() + "/large");
  LogStore::create(directory, tables, 1 << 20, Caching::buffered);
  LogStore store(directory, tables, buffered());
  store.recover(1, every_step);
  std::mt19937_64 random(seed);
  Model model;
  const auto append = [&](std::uint64_t step) {
    std::vector<OwnedRows> update;
    std::set<std::uint64_t> rows;
    while (rows.size() < 100) rows.insert(random() % tables[0].num_rows);
    update.emplace_back(0, tables[0], std::vector<std::uint64_t>(rows.begin(), rows.end()));
    for (std::byte& byte : update[0].weights) byte = static_cast<std::byte>(random());
    model.update(step, update);
    CHECK(store.append(store.pack(mark_of(step), views(update))));
    store.sync();
  };
  const auto fetch_touched = [&] {
    std::vector<OwnedRows> wanted;
    wanted.emplace_back(0, tables[0], model.touched(0));
    store.fetch(views(wanted));
    model.check(tables, wanted);
  };
  append(1);
  medium.fill();
  CHECK(kind_thrown_by([&] { store.merge(up_to(1)); }) == ErrorKind::full);
  CHECK(store.merged_step() == 0);
  fetch_touched();
  append(2);  // the ring has its space
  CHECK(kind_thrown_by([&] { store.merge(up_to(2)); }) == ErrorKind::full);
  std::filesystem::remove(medium.ballast());
  CHECK(store.merge(up_to(2)) > 0);
  CHECK(store.merged_step() == 2 && store.index_entries() == 0);
  fetch_touched();
}

void going_back_below_what_is_merged_is_refused(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  for (int i = 0; i < 4; ++i) subject.append_with_room(20);
  CHECK(kind_thrown_by([&] { subject.store->roll_back(0); }) == ErrorKind::step);  // after an append
  subject.sync();
  subject.merge(subject.durable);
  subject.crash();
  CHECK(kind_thrown_by([&] { subject.open(0); }) == ErrorKind::step);
  subject.open(every_step);
  subject.fetch_all();
}

void flip(const std::string& name, std::uint64_t offset) {
  std::fstream stream(name, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.put(byte);
  CHECK(stream.good());
}

void what_a_merged_record_said_outlives_it(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(2);
  subject.store->sync();
  subject.crash();
  subject.open(2);  // back to a record that is merged: only its successor names it
  CHECK(subject.store->last() == mark_of(2));
  subject.crash();
  subject.open(every_step);  // and now only the checkpoint
  CHECK(subject.store->last() == mark_of(2));
  subject.fetch_all();
}

void damage_is_told_from_a_torn_tail(std::uint64_t seed) {
  const std::uint64_t ring = format::row_log_ring_offset;
  for (const std::uint64_t offset : {std::uint64_t{9}, std::uint64_t{200}, std::uint64_t{600}, std::uint64_t{4000}}) {
    {  // A later record says that this one was durable.
      Subject subject(one_table(), 64 << 10, buffered(), seed);
      make_three_records(subject);
      subject.crash();
      flip(subject.file("row-log-0000"), ring + offset);
      CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
    }
    {  // Nothing says so of the last one.
      Subject subject(one_table(), 64 << 10, buffered(), seed);
      make_three_records(subject);
      subject.crash();
      flip(subject.file("row-log-0000"), ring + 2 * 4096 + offset);
      subject.durable = 2;
      subject.open(every_step);
      CHECK(subject.store->last().step == 2);
      subject.fetch_all();
    }
    {  // The checkpoint does, once the store has been opened again. Images are told by the fetch.
      Subject subject(one_table(), 64 << 10, buffered(), seed);
      make_three_records(subject);
      subject.crash();
      subject.open(every_step);
      subject.crash();
      flip(subject.file("row-log-0000"), ring + 2 * 4096 + offset);
      if (offset < 512) {
        CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
      } else {
        subject.open(every_step);
        if (offset < 600 + 72) CHECK(kind_thrown_by([&] { subject.fetch_all(); }) == ErrorKind::corrupted);
      }
    }
  }
}

// Two rows are to be merged; while the merge is at work, the first of them comes again. Where that record stands before
// the merge is over, the row is not written home.
void a_row_of_which_a_later_record_stands_stays_in_the_log(std::uint64_t seed) {
  for (const int sync_at : {2, 3, 0}) {  // when the limit is asked for so often: before the choice, after it, or never
    check::context = "durable at " + std::to_string(sync_at);
    const bool stands = sync_at != 0;
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    append_rows(subject, 1, one_table().front(), {5, 6});
    subject.sync();
    int asked = 0;
    subject.store->merge([&]() -> std::uint64_t {
      if (++asked == 1) return 1;
      if (asked == 2) append_rows(subject, 2, one_table().front(), {5});
      if (asked == sync_at) subject.sync();
      return 2;
    });
    subject.floor = 2;
    CHECK(asked >= 3);
    const LogStoreCounters counters = subject.store->counters();
    CHECK(counters.merged_rows == (stands ? 1 : 2) && counters.merged_bytes == 4096);  // of two rows
    CHECK(subject.store->merged_step() == (stands ? 2 : 1) && counters.standing_bytes == (stands ? 4096 : 0));
    CHECK(subject.store->index_entries() == 1);
    subject.fetch_all();
    subject.list_touched();
    subject.crash();
    subject.open(every_step);
    subject.fetch_all();
    if (stands) {
      CHECK(subject.store->last().step == 2);
      CHECK(kind_thrown_by([&] { subject.store->roll_back(1); }) == ErrorKind::step);
    }
    subject.merge(subject.durable);
    CHECK(subject.store->index_entries() == 0);
    subject.fetch_all();
  }
}

void a_damaged_row_at_home_is_named(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(3);
  subject.fetch_all();
  const std::string home = subject.file("shard-0000/table-0000.home");
  for (const std::uint64_t row : {std::uint64_t{5}, std::uint64_t{6}}) {  // one that was written, one that was not
    flip(home, row * 72 + 3);
    try {
      subject.fetch_all();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::corrupted);
      CHECK(std::string(error.what()).find(home + " at offset " + std::to_string(row * 72)) != std::string::npos);
    }
    flip(home, row * 72 + 3);
  }
  subject.fetch_all();
}

// Opens for reading and verifies.
std::vector<std::string> problems_of(const Subject& subject) {
  LogStoreOptions reading = buffered();
  reading.writable = false;
  LogStore store(subject.directory(), one_table(), reading);
  CHECK(kind_thrown_by([&] { store.verify(0); }) == ErrorKind::step);
  store.scan();
  store.view();
  return store.verify(store.last().step);
}

void verification_names_every_damage(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(2);
  subject.crash();
  subject.open(every_step);  // record 3 is believed without a look at its images now
  subject.crash();
  CHECK(problems_of(subject).empty());
  const std::string home = subject.file("shard-0000/table-0000.home");
  const std::string log = subject.file("row-log-0000");
  flip(home, 5 * 72 + 3);  // a row that the log has
  CHECK(problems_of(subject).empty());
  flip(home, 6 * 72 + 3);  // one that was never written
  const std::uint64_t images = format::row_log_ring_offset + 2 * 4096 + 512;
  flip(log, images + 72 + 70);
  CHECK((problems_of(subject) ==
         std::vector{
             home + " at offset " + std::to_string(6 * 72) + ": row 6 of table 0 does not hold its checksum",
             log + " at offset " + std::to_string(images + 72) + ": row 5 of table 0 does not hold its checksum"}));
  flip(log, images + 72 + 70);
  flip(log, images + 500);  // behind the images of its sector
  CHECK(problems_of(subject).back() ==
        log + " at offset " + std::to_string(images) + ": the checksum of the record's images does not hold");
  for (std::uint64_t row = 7; row < 200; ++row) flip(home, row / 7 * 512 + row % 7 * 72);
  CHECK(problems_of(subject).size() == 100);
}

void a_store_that_lost_something_says_what(std::uint64_t seed) {
  {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    subject.crash();
    subject.epoch = 0;
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);  // an epoch that was
    subject.open(every_step);
    subject.crash();
    for (const std::size_t offset : format::row_log_checkpoint_offset) flip(subject.file("row-log-0000"), offset);
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
  }
  {  // The checkpoint that began the records' epoch.
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.crash();
    flip(subject.file("row-log-0000"), format::row_log_checkpoint_offset[1]);
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
  }
  for (const char* name : {"row-log-0000", "shard-0000/table-0000.home"}) {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    subject.crash();
    std::filesystem::remove(subject.file(name));
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
  }
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{4096}, std::uint64_t{1} << 20}) {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    subject.crash();
    std::filesystem::resize_file(subject.file("shard-0000/table-0000.home"), bytes);
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
  }
}

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
  LogStore::create(directory.path(), tables, 128 << 10, Caching::buffered);
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
  LogStore::create(directory.path(), tables, 1 << 20, Caching::buffered);
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
  LogStore::create(directory.path(), tables, 4 << 20, Caching::buffered);
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

void a_step_that_updated_nothing_is_a_record_too(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  const PackedRecord packed = subject.store->pack(mark_of(4), {});
  CHECK(packed.step() == 4 && packed.bytes() == 4096);
  CHECK(subject.store->append(packed) == 4096);
  subject.steps.insert(4);
  subject.last_attempted = 4;
  subject.sync();
  subject.crash();
  subject.open(every_step);
  CHECK(subject.store->last() == mark_of(4));
  subject.fetch_all();
  CHECK(subject.merge(4) == 4 * 4096);
  subject.fetch_all();
}

void imported_rows_are_home(std::uint64_t seed) {
  const std::vector<RowTable> tables = tables_of_every_shape();
  Subject subject(tables, 1 << 20, buffered(), seed);
  subject.append_with_room(50);  // rows that the import's edges keep
  CHECK(kind_thrown_by([&] { subject.store->import_rows(0, 0, {}, {}); }) == ErrorKind::step);
  subject.sync();
  subject.merge(subject.durable);
  for (int i = 0; i < 40; ++i) {
    const auto t = static_cast<std::uint32_t>(subject.random() % tables.size());
    const std::uint64_t first = subject.random() % tables[t].num_rows;
    std::vector<std::uint64_t> rows(1 + subject.random() % (tables[t].num_rows - first));
    std::iota(rows.begin(), rows.end(), first);
    std::vector<OwnedRows> imported;
    imported.emplace_back(t, tables[t], std::move(rows));
    OwnedRows& of_table = imported.front();
    for (std::byte& byte : of_table.weights) byte = static_cast<std::byte>(subject.random());
    const bool with_state = subject.random() % 2 == 0;
    for (float& value : of_table.state) value = with_state ? static_cast<float>(subject.random() % 1000) : 0.0f;
    subject.store->import_rows(t, first, of_table.weights,
                               with_state ? std::span<const float>(of_table.state) : std::span<const float>());
    subject.model.update(subject.store->last().step, imported);
  }
  subject.fetch_all();
  subject.list_touched();
  subject.store->sync_home();
  subject.crash();
  subject.open(every_step);
  subject.fetch_all();
}

void a_long_import_is_written_in_pieces(std::uint64_t seed) {
  const std::vector<RowTable> tables = {table_of(0, 100000, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad)};
  Subject subject(tables, 64 << 10, buffered(), seed);
  std::vector<std::uint64_t> rows(99990);
  std::iota(rows.begin(), rows.end(), 5);
  std::vector<OwnedRows> imported;
  imported.emplace_back(0, tables[0], std::move(rows));
  for (std::byte& byte : imported[0].weights) byte = static_cast<std::byte>(subject.random());
  subject.store->import_rows(0, 5, imported[0].weights, {});
  subject.model.update(0, imported);
  subject.fetch_all();
  subject.list_touched();
}

void arrays_that_do_not_fit_are_not_imported(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);  // rows of 64 bytes and one float, 200 of them
  const Bytes weights(3 * 64);
  const std::vector<float> state(3);
  const auto import = [&](std::uint64_t first, std::size_t weight_bytes, std::size_t floats) {
    return kind_thrown_by([&] {
      subject.store->import_rows(0, first, std::span(weights).first(weight_bytes), std::span(state).first(floats));
    });
  };
  CHECK(import(0, 3 * 64 - 1, 3) == ErrorKind::config);
  CHECK(import(0, 3 * 64, 2) == ErrorKind::config);
  CHECK(import(198, 3 * 64, 3) == ErrorKind::config);
  CHECK(import(every_step, 64, 1) == ErrorKind::config);
  CHECK(subject.store->touched_rows(0, 0, 200).empty());
  subject.store->import_rows(0, 200, {}, {});
  subject.store->import_rows(0, 197, weights, state);
  CHECK((subject.store->touched_rows(0, 0, 200) == std::vector<std::uint64_t>{197, 198, 199}));
}

void touched_rows_of_a_large_table_are_found(std::uint64_t seed) {
  const std::vector<RowTable> tables = {table_of(0, 3000000, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad)};
  Subject subject(tables, 4 << 20, buffered(), seed);
  for (int i = 0; i < 6; ++i) {
    subject.append_with_room(2000);
    subject.sync();
    if (i % 2 == 0) subject.merge(subject.durable);
  }
  subject.list_touched();
  CHECK(subject.store->touched_rows(0, 3000000, 10).empty());
  CHECK(subject.store->touched_rows(0, 0, 0).empty());
}

void counters_say_what_was_written(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(3);
  const LogStoreCounters counters = subject.store->counters();
  CHECK(counters.appended_rows == 9 && counters.appended_bytes == 3 * 4096);
  CHECK(counters.merged_bytes == 3 * 4096 && subject.store->used_bytes() == 0);
  CHECK(counters.merged_rows == 3);
  CHECK(counters.home_sectors_changed == 2);  // rows 1 and 5, and row 100
  CHECK(counters.home_bytes_written == 2 * 4096 && counters.home_bytes_read == 2 * 4096);  // each in a block of its own
}

// 24 rows lie in a block of home: those that are merged, in blocks 0 and 3, and then in blocks 8 and 12.
void a_merge_reads_over_two_blocks_and_writes_none_of_them(std::uint64_t seed) {
  const RowTable table = table_of(0, 1000, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad);
  Subject subject({table}, 64 << 10, buffered(), seed);
  append_rows(subject, 1, table, {0, 3 * 24, 8 * 24, 12 * 24});
  subject.sync();
  subject.merge(1);
  const LogStoreCounters counters = subject.store->counters();
  CHECK(counters.home_read_requests == 3 && counters.home_bytes_read == (4 + 1 + 1) * 4096);
  CHECK(counters.home_write_requests == 4 && counters.home_bytes_written == 4 * 4096);
  subject.fetch_all();
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
  run("before recovery", [](std::uint64_t) { nothing_goes_before_recovery(); });
  run("beginning once", a_store_begins_once);
  run("reading only", a_store_opened_for_reading_never_writes);
  run("a full ring", a_full_ring_says_so_until_it_is_merged);
  run("a record larger than the ring", a_record_larger_than_the_ring_is_refused);
  run("a full medium", a_full_medium_changes_nothing);
  run("any other failure", any_other_failure_stops_the_store);
  run("a failed read", a_failed_read_leaves_the_store_usable);
  run("a merge that fails", a_merge_that_fails_anywhere_is_done_again_in_the_next_life);
  run("a merge on a full medium", a_merge_that_finds_the_medium_full_anywhere_can_be_done_again);
  run("a full file system", a_sparse_home_on_a_full_file_system_waits_for_space);
  run("going back below what is merged", going_back_below_what_is_merged_is_refused);
  run("rows that many steps have", a_row_is_written_home_once_whatever_steps_have_it);
  run("updates beside a merge", an_update_at_any_moment_of_a_merge_changes_nothing_of_it);
  run("what a merged record said", what_a_merged_record_said_outlives_it);
  run("damage or torn tail", damage_is_told_from_a_torn_tail);
  run("a row of which a later record stands", a_row_of_which_a_later_record_stands_stays_in_the_log);
  run("a damaged row at home", a_damaged_row_at_home_is_named);
  run("verification", verification_names_every_damage);
  run("something is lost", a_store_that_lost_something_says_what);
  run("a merge waits", [](std::uint64_t) { a_merge_waits_for_the_fetches_before_it(); });
  run("an extent is pinned", [](std::uint64_t) { an_extent_that_is_being_read_is_not_used_again(); });
  run("packing beside writing", records_are_packed_on_one_thread_and_written_on_another);
  run("a step without rows", a_step_that_updated_nothing_is_a_record_too);
  run("touched rows of a large table", touched_rows_of_a_large_table_are_found);
  run("imported rows", imported_rows_are_home);
  run("a long import", a_long_import_is_written_in_pieces);
  run("imports that do not fit", arrays_that_do_not_fit_are_not_imported);
  run("counters", counters_say_what_was_written);
  run("read over blocks", a_merge_reads_over_two_blocks_and_writes_none_of_them);
  run("an index that grows beside a merge", an_index_may_grow_beside_a_merge);
  run("readers, io_uring",
      [](std::uint64_t s) { readers_beside_the_writer_see_whole_rows(s, BlockQueue::Way::io_uring, 400); });
  run("readers, threads",
      [](std::uint64_t s) { readers_beside_the_writer_see_whole_rows(s, BlockQueue::Way::threads, 200); });
  using Place = TemporaryDirectory::Place;
  random_lives_agree_with_the_model(seed, 192 << 10, 20, 60, buffered(), Place::memory);
  LogStoreOptions in_small_parts = buffered();
  in_small_parts.merge_bytes = 2000;
  random_lives_agree_with_the_model(seed + 1, 1 << 20, 40, 40, in_small_parts, Place::memory);
  random_lives_agree_with_the_model(seed + 2, 192 << 10, 20, 20, buffered(BlockQueue::Way::threads), Place::memory);
  try {
    random_lives_agree_with_the_model(seed + 3, 192 << 10, 20, 4, LogStoreOptions{}, Place::disk);
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::config);  // no direct I/O where the tests run
  }
  return check::passed();
}

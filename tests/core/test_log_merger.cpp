// The log merger beside a medium that stands still for a while, as it does where the whole process is stopped.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "log_store/log_merger.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::uint64_t every_step = ~std::uint64_t{0};
constexpr std::chrono::milliseconds standstill{1000};
constexpr std::chrono::milliseconds soon{2000};  // a rest in proportion to the standstill would take three seconds

// Holds the first write to home up.
class StandingStill final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile& file, std::uint64_t, std::span<const std::byte>) override {
    if (file.name().find(".home") == std::string::npos || has_stood_still_.exchange(true)) return;
    std::this_thread::sleep_for(standstill);
    goes_on = true;
  }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  std::atomic<bool> goes_on{false};

 private:
  std::atomic<bool> has_stood_still_{false};
};

// A log with room for eight records of a block each; six begin a merge and leave nobody in a hurry.
struct Subject {
  static constexpr std::uint64_t ring_bytes = 8 * format::block_bytes;

  Subject() {
    const std::vector<RowTable> tables = {{{16, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, 200}};
    LogStore::create(directory.path(), tables, ring_bytes, Caching::buffered);
    store = std::make_unique<LogStore>(directory.path(), tables, LogStoreOptions{Caching::buffered, {}, &disk});
    store->recover(1, every_step);
  }
  bool append(std::uint64_t step) {
    std::uint64_t row = step;
    std::vector<std::byte> weights(16 * 4);
    const TableRows update{0, 1, {&row, weights.data(), nullptr}};
    return store->append(store->pack({step, step, step}, {&update, 1})).has_value();
  }
  // Begins a merge, and returns when it goes on after its standstill.
  Clock::time_point begin_merge(LogMerger& merger) {
    for (std::uint64_t step = 1; step <= 6; ++step) CHECK(append(step));
    store->sync();
    merger.allow(6);
    while (!disk.goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return Clock::now();
  }

  TemporaryDirectory directory;
  StandingStill disk;
  StageSpans spans;
  std::unique_ptr<LogStore> store;
};

void a_merge_rests_for_a_moment_only_however_long_its_part_took() {
  Subject subject;
  LogMerger merger(*subject.store, subject.spans);
  const Clock::time_point went_on = subject.begin_merge(merger);
  while (subject.store->used_bytes() != 0 && Clock::now() - went_on < soon) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(subject.store->used_bytes() == 0);
  merger.stop();
  const std::vector<StageSpans::Span> parts = subject.spans.take();
  Clock::duration rested{0};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    CHECK(parts[i].stage == Stage::merge && parts[i].began <= parts[i].ended);
    if (i == 0) continue;
    CHECK(parts[i - 1].ended <= parts[i].began);
    rested += parts[i].began - parts[i - 1].ended;
  }
  CHECK(rested > std::chrono::milliseconds(100));  // rests are no part of a merge's spans
}

void whoever_waits_for_room_ends_a_rest() {
  Subject subject;
  LogMerger merger(*subject.store, subject.spans);
  const Clock::time_point went_on = subject.begin_merge(merger);
  CHECK(merger.make_room());
  CHECK(Clock::now() - went_on < soon);
  CHECK(subject.store->used_bytes() == 0);
}

// A medium that takes so long for each write home, until it is told to be fast.
class Slow final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile& file, std::uint64_t, std::span<const std::byte>) override {
    if (file.name().find(".home") == std::string::npos) return;
    if (!is_fast) std::this_thread::sleep_for(std::chrono::microseconds(250));
    ++writes;
  }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  std::atomic<bool> is_fast{false};
  std::atomic<std::uint64_t> writes{0};
};

// A log over a large table, whose rows lie by number: steps of rows that are in blocks of their own.
struct Sparse {
  static constexpr std::uint64_t rows_per_step = 500;
  static constexpr std::uint64_t rows_apart = 400;  // seven blocks
  static constexpr std::uint64_t num_rows = 200'000'000;

  explicit Sparse(std::uint64_t ring_bytes) {
    std::vector<RowTable> tables = {{{16, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, num_rows}};
    tables[0].home_order = HomeOrder::by_row;
    LogStore::create(directory.path(), tables, ring_bytes, Caching::buffered);
    store = std::make_unique<LogStore>(directory.path(), tables, LogStoreOptions{Caching::buffered, {}, &disk});
    store->recover(1, every_step);
  }
  PackedRecord pack(std::uint64_t step) {
    std::vector<std::uint64_t> rows(rows_per_step);
    for (std::uint64_t i = 0; i < rows.size(); ++i) rows[i] = (step * rows_per_step + i) * rows_apart;
    std::vector<std::byte> weights(rows.size() * 16 * sizeof(float));
    const TableRows update{0, rows.size(), {rows.data(), weights.data(), nullptr}};
    return store->pack({step, step, step}, {&update, 1});
  }
  // Returns the step to which three quarters of the log are in use.
  std::uint64_t fill() {
    std::uint64_t step = 0;
    while (store->used_bytes() < store->ring_bytes() * 3 / 4) CHECK(store->append(pack(++step)));
    store->sync();
    return step;
  }

  TemporaryDirectory directory;
  Slow disk;
  std::unique_ptr<LogStore> store;
  StageSpans spans;
};

// Of a merge that would take eight seconds.
void who_stops_a_merge_waits_for_a_part_of_it() {
  Sparse subject(std::uint64_t{3} << 20);
  LogStore& store = *subject.store;
  LogMerger merger(store, subject.spans);
  merger.allow(subject.fill());
  const std::uint64_t used = store.used_bytes();
  while (subject.disk.writes < 10) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Clock::time_point stops = Clock::now();
  merger.stop();
  CHECK(Clock::now() - stops < std::chrono::seconds(3));
  CHECK(subject.disk.writes < 10'000);
  CHECK(store.used_bytes() == used && store.merged_step() == 0 && merger.merging() == Merging::none);
  subject.disk.is_fast = true;
  CHECK(store.merge([] { return every_step; }) == used);  // all of it, where the life goes on
  CHECK(store.index_entries() == 0 && store.used_bytes() == 0);
}

// A merge takes seconds here: no record waits for one, and hardly any is refused, on a machine that does much else.
void records_wait_a_little_each_where_merges_cannot_keep_up() {
  Sparse subject(std::uint64_t{2} << 20);
  LogStore& store = *subject.store;
  LogMerger merger(store, subject.spans);
  Clock::duration longest{0};
  std::uint64_t num_waits = 0;
  std::uint64_t num_refused = 0;
  constexpr std::uint64_t num_steps = 90;
  for (std::uint64_t step = 1; step <= num_steps; ++step) {
    const PackedRecord record = subject.pack(step);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // what a step computes
    const Clock::time_point began = Clock::now();
    num_waits += merger.wait_for_turn(record.bytes()) ? 1 : 0;
    while (!store.append(record)) {
      ++num_refused;
      CHECK(merger.make_room());
    }
    longest = std::max(longest, Clock::now() - began);
    store.sync();
    merger.allow(step);
    merger.wake();
  }
  CHECK(num_waits > 10);
  CHECK(num_refused <= 2);
  CHECK(store.counters().merged_bytes > 0);
  CHECK(longest < std::chrono::seconds(3));
  // Who ends its run is held up no more.
  merger.let_through();
  CHECK(!merger.wait_for_turn(subject.pack(num_steps + 1).bytes()));
}

// Rows that share no block are taken home by and by, the oldest first.
void a_merge_takes_a_part_of_the_log_where_its_rows_share_no_blocks() {
  Sparse subject(std::uint64_t{16} << 20);
  subject.disk.is_fast = true;
  LogStore& store = *subject.store;
  const std::uint64_t step = subject.fill();
  const std::uint64_t used = store.used_bytes();
  LogMerger merger(store, subject.spans);
  merger.allow(step);
  while (store.counters().merges == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  while (merger.merging() != Merging::none) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const LogStoreCounters counters = store.counters();
  CHECK(counters.merged_bytes > 0 && counters.merged_bytes < used * 3 / 4);
  CHECK(store.used_bytes() == used - counters.merged_bytes);
}

// Of a table whose rows fill twelve MiB at home: how much of it goes there between two rests.
std::uint64_t longest_part(bool is_in_a_hurry) {
  constexpr std::uint32_t dim = 1020;  // an image fills a block
  constexpr std::uint64_t num_rows = 3000;
  const TemporaryDirectory directory;
  const std::vector<RowTable> tables = {{{dim, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, num_rows}};
  LogStore::create(directory.path(), tables, std::uint64_t{32} << 20, Caching::buffered);
  LogStore store(directory.path(), tables, {Caching::buffered});
  store.recover(1, every_step);
  std::vector<std::uint64_t> rows(num_rows);
  std::iota(rows.begin(), rows.end(), 0);
  std::vector<std::byte> weights(num_rows * dim * sizeof(float));
  const TableRows update{0, num_rows, {rows.data(), weights.data(), nullptr}};
  CHECK(store.append(store.pack({1, 1, 1}, {&update, 1})));
  store.sync();
  std::uint64_t before = 0;
  std::uint64_t longest = 0;
  CHECK(store.merge([] { return every_step; },
                    [&](std::chrono::nanoseconds, double) {
                      const std::uint64_t written = store.counters().home_bytes_written;
                      longest = std::max(longest, written - before);
                      before = written;
                      return is_in_a_hurry;
                    }) > 0);
  CHECK(before >= weights.size());
  return longest;
}

void a_merge_takes_long_parts_only_in_a_hurry() {
  CHECK(longest_part(false) <= std::uint64_t{4} << 20);
  CHECK(longest_part(true) > std::uint64_t{8} << 20);
}

// Of a home that is read and written part by part: the most that was written at once.
class Parts final : public BlockWatcher {
 public:
  void before_read(const BlockFile& file) override {
    if (is_home(file)) part_ = 0;
  }
  void before_write(const BlockFile& file, std::uint64_t, std::span<const std::byte> data) override {
    if (!is_home(file)) return;
    part_ += data.size();
    longest_ = std::max(longest_, part_);
  }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  std::uint64_t take_longest() { return std::exchange(longest_, 0); }

 private:
  static bool is_home(const BlockFile& file) { return file.name().find(".home") != std::string::npos; }
  std::uint64_t part_ = 0;  // of the merger's thread, looked at when it is done
  std::uint64_t longest_ = 0;
};

// Nothing is appended beside the first merge, so the second one could begin later than any does.
void a_merge_that_has_time_to_spare_takes_short_parts() {
  constexpr std::uint64_t num_rows = 170'000;
  const TemporaryDirectory directory;
  std::vector<RowTable> tables = {{{16, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, num_rows}};
  tables[0].home_order = HomeOrder::by_row;  // whose blocks are read before they are written: that tells parts apart
  LogStore::create(directory.path(), tables, std::uint64_t{32} << 20, Caching::buffered);
  Parts parts;
  LogStore store(directory.path(), tables, {Caching::buffered, {}, &parts});
  store.recover(1, every_step);
  StageSpans spans;
  LogMerger merger(store, spans);
  std::vector<std::byte> weights(num_rows * 16 * sizeof(float));
  const auto longest_of_merge = [&](std::uint64_t first_step) {
    std::vector<std::uint64_t> rows(num_rows);
    std::iota(rows.begin(), rows.end(), 0);
    const TableRows update{0, num_rows, {rows.data(), weights.data(), nullptr}};
    for (const std::uint64_t step : {first_step, first_step + 1}) {
      CHECK(store.append(store.pack({step, step, step}, {&update, 1})));
    }
    store.sync();
    merger.allow(first_step + 1);
    while (merger.merging() != Merging::none) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(store.used_bytes() == 0);
    return parts.take_longest();
  };
  CHECK(longest_of_merge(1) > std::uint64_t{8} << 20);
  CHECK(longest_of_merge(3) <= std::uint64_t{4} << 20);
}

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::a_merge_rests_for_a_moment_only_however_long_its_part_took();
  holdfast::whoever_waits_for_room_ends_a_rest();
  holdfast::who_stops_a_merge_waits_for_a_part_of_it();
  holdfast::records_wait_a_little_each_where_merges_cannot_keep_up();
  holdfast::a_merge_takes_a_part_of_the_log_where_its_rows_share_no_blocks();
  holdfast::a_merge_takes_long_parts_only_in_a_hurry();
  holdfast::a_merge_that_has_time_to_spare_takes_short_parts();
  return check::passed();
}

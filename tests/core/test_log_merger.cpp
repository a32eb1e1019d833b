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

// A medium that takes so long for each write home.
class Slow final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile& file, std::uint64_t, std::span<const std::byte>) override {
    if (file.name().find(".home") == std::string::npos) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    ++writes;
  }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  std::atomic<std::uint64_t> writes{0};
};

// Of a merge that would take eight seconds, what is written when it is stopped, is a part of a merge.
void who_stops_a_merge_waits_for_a_part_of_it() {
  constexpr std::uint64_t num_rows = 100'000;
  const TemporaryDirectory directory;
  const std::vector<RowTable> tables = {{{16, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, 1'000'000}};
  LogStore::create(directory.path(), tables, std::uint64_t{20} << 20, Caching::buffered);
  Slow disk;
  LogStore store(directory.path(), tables, {Caching::buffered, {}, &disk});
  store.recover(1, every_step);
  StageSpans spans;
  LogMerger merger(store, spans);
  std::vector<std::uint64_t> rows(num_rows);
  for (std::uint64_t i = 0; i < num_rows; ++i) rows[i] = 10 * i;
  std::vector<std::byte> weights(num_rows * 16 * sizeof(float));
  const TableRows update{0, num_rows, {rows.data(), weights.data(), nullptr}};
  for (const std::uint64_t step : {1, 2}) CHECK(store.append(store.pack({step, step, step}, {&update, 1})));
  store.sync();
  const std::uint64_t used = store.used_bytes();
  merger.allow(2);
  while (disk.writes == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Clock::time_point stops = Clock::now();
  merger.stop();
  CHECK(Clock::now() - stops < std::chrono::seconds(3));
  CHECK(disk.writes < 2000);
  CHECK(store.used_bytes() == used && store.merged_step() == 0 && merger.merging() == Merging::none);
  CHECK(store.merge([] { return every_step; }) == used);  // all of it, where the life goes on
  CHECK(store.index_entries() == 0 && store.used_bytes() == 0);
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
  const std::vector<RowTable> tables = {{{16, RowDtype::f32, RowOptimizer::sgd, 0, 7, 0, -0.5f, 0.5f}, num_rows}};
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
  holdfast::a_merge_takes_long_parts_only_in_a_hurry();
  holdfast::a_merge_that_has_time_to_spare_takes_short_parts();
  return check::passed();
}

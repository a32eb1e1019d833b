// Merges of the log store: what they take home, what they leave, and what is there after one that failed.
#include <sys/mount.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "log_store_model.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

// Rows 1, 5 and 100 are in each of the steps 1, 2 and 3.
void a_row_is_written_home_once_whatever_steps_have_it(std::uint64_t seed) {
  for (const std::uint64_t limit : {2, 3}) {  // of the rows' newest versions, step 3's, the limit is before, or not
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(limit);
    const LogStoreCounters counters = subject.store->counters();
    CHECK(counters.merged_rows == 3 && counters.merged_bytes == limit * 4096);  // of 3 * limit rows
    CHECK(counters.home_sectors_changed == 1);
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
  explicit BeforeMerge(std::uint64_t seed)
      : subject(tables_of_every_shape(either_order(seed)), 1 << 20, buffered(), seed) {
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

// Parts of a merge: the look at a range of the index, what is read of the log, what is written home, the search for rows
// that came again beside it, and the rests between. Given up at each, it leaves the rows where they are: in this life, in
// which a later merge takes everything, and in the next.
void a_merge_that_is_given_up_anywhere_leaves_everything_in_the_log(std::uint64_t seed) {
  LogStoreOptions options = buffered();
  options.merge_bytes = 4000;
  for (const bool goes_on : {true, false}) {
    for (const std::size_t rows_beside : {0, 20}) {
      bool has_written_home = false;
      for (std::uint64_t n = 1;; n += rows_beside == 0 ? 1 : 5) {
        check::context = "given up at " + std::to_string(n) + (goes_on ? ", goes on" : ", crashes");
        Subject subject(tables_of_every_shape(), 1 << 20, options, seed);
        for (int i = 0; i < 3; ++i) subject.append_with_room(50);
        subject.sync();
        const std::uint64_t limit = subject.durable;
        const std::uint64_t used = subject.store->used_bytes();
        if (subject.give_up_merge(limit, n, rows_beside) != 0) {
          CHECK(n > 20 && has_written_home);  // how many parts there are is up to the seed: 36, or more than 60
          break;
        }
        has_written_home |= subject.store->counters().home_bytes_written != 0;
        CHECK(subject.store->counters().merges == 0 && subject.store->used_bytes() >= used);
        subject.fetch_all();
        subject.list_touched();
        if (!goes_on) {
          subject.crash();
          subject.open(every_step);
          subject.fetch_all();
        }
        subject.append_with_room(50);
        subject.sync();
        CHECK(subject.merge(subject.durable) > 0);
        CHECK(subject.store->index_entries() == 0 && subject.store->used_bytes() == 0);
        subject.fetch_all();
        subject.crash();
        subject.open(every_step);
        subject.fetch_all();
        subject.list_touched();
      }
    }
  }
}

// What was given up is not what a store that is closed waits for: home is synced where an import wrote it.
void what_a_given_up_merge_wrote_home_is_not_synced(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  std::uint64_t n = 1;
  while (subject.store->counters().home_bytes_written == 0) CHECK(subject.give_up_merge(3, n++, 0) == 0);
  const std::uint64_t writes = subject.disk.num_writes;
  subject.store->sync_home();
  CHECK(subject.disk.num_writes == writes + 6);  // names of rows, their header and a checkpoint, written and synced
  subject.crash();
  subject.open(every_step);
  subject.fetch_all();
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
  CHECK(kind_thrown_by([&] {
          LogStore::create(medium.path() + "/large", tables, 8 << 20, Caching::buffered, {}, false, identity_of_tests);
        }) == ErrorKind::full);
  std::filesystem::remove_all(medium.path() + "/large");
  LogStore::create(directory, tables, 1 << 20, Caching::buffered, {}, false, identity_of_tests);
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

// 24 rows lie in a block of home: those that are merged, in blocks 0 and 3, and then in blocks 8 and 12.
void a_merge_reads_over_two_blocks_and_writes_none_of_them(std::uint64_t seed) {
  const RowTable table = table_of(0, 1000, 32, RowDtype::f32, RowOptimizer::rowwise_adagrad, HomeOrder::by_row);
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
  const auto run = [&](const char* name, const std::function<void(std::uint64_t)>& test) {
    check::context = name;
    test(seed);
  };
  run("a merge that fails", a_merge_that_fails_anywhere_is_done_again_in_the_next_life);
  run("a merge on a full medium", a_merge_that_finds_the_medium_full_anywhere_can_be_done_again);
  run("a merge that is given up", a_merge_that_is_given_up_anywhere_leaves_everything_in_the_log);
  run("what it wrote home", what_a_given_up_merge_wrote_home_is_not_synced);
  run("a full file system", a_sparse_home_on_a_full_file_system_waits_for_space);
  run("going back below what is merged", going_back_below_what_is_merged_is_refused);
  run("rows that many steps have", a_row_is_written_home_once_whatever_steps_have_it);
  run("updates beside a merge", an_update_at_any_moment_of_a_merge_changes_nothing_of_it);
  run("what a merged record said", what_a_merged_record_said_outlives_it);
  run("a row of which a later record stands", a_row_of_which_a_later_record_stands_stays_in_the_log);
  run("read over blocks", a_merge_reads_over_two_blocks_and_writes_none_of_them);
  return check::passed();
}

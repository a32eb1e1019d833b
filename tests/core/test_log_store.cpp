// The log store, one claim at a time: what it refuses, what a failure leaves, what a merge takes home and what it counts.
#include <sys/mount.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "error.h"
#include "log_store_model.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

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
  const auto check_named = [&](std::uint64_t row) {
    flip(home, row * 72 + 3);
    try {
      subject.fetch_all();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::corrupted);
      CHECK(std::string(error.what()).find(home + " at offset " + std::to_string(row * 72)) != std::string::npos);
    }
    flip(home, row * 72 + 3);
  };
  check_named(5);
  flip(home, 6 * 72 + 3);  // a row that was never written is not read
  subject.fetch_all();
  flip(home, 6 * 72 + 3);
  subject.crash();
  std::filesystem::remove(subject.file("home-bits-0000"));
  subject.open(every_step);  // all are
  check_named(5);
  check_named(6);
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

// Whatever a crash leaves of an import, one who trains sees the rows that one who reads beside the store sees.
void an_import_that_a_crash_ends_looks_the_same_to_all(std::uint64_t seed) {
  const std::vector<RowTable> tables = one_table();
  for (int life = 0; life < 60; ++life) {
    Subject subject(tables, 64 << 10, buffered(), seed + static_cast<std::uint64_t>(life));
    subject.disk.crash_in = 1 + subject.random() % 12;
    try {
      for (;;) {
        std::vector<std::byte> weights((1 + subject.random() % 100) * tables[0].weight_bytes());
        for (std::byte& byte : weights) byte = static_cast<std::byte>(subject.random());
        subject.store->import_rows(0, subject.random() % 100, weights, {});
        if (subject.random() % 4 == 0) subject.store->sync_home();
      }
    } catch (const Crash&) {
    }
    subject.crash();
    const auto fetched = [&](LogStore& store) {
      std::vector<OwnedRows> rows;
      rows.emplace_back(0, tables[0], every_row_of(tables[0]));
      store.fetch(views(rows));
      return rows;
    };
    LogStoreOptions reading = buffered();
    reading.writable = false;
    LogStore view(subject.directory(), tables, reading);
    view.scan();
    view.view();
    const auto seen = fetched(view);
    subject.open(every_step);
    const auto trained = fetched(*subject.store);
    CHECK(trained[0].rows == seen[0].rows);
    for (std::size_t u = 0; u < seen[0].rows.size(); ++u) CHECK(trained[0].value(u) == seen[0].value(u));
  }
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
  run("a step without rows", a_step_that_updated_nothing_is_a_record_too);
  run("touched rows of a large table", touched_rows_of_a_large_table_are_found);
  run("imported rows", imported_rows_are_home);
  run("an import that a crash ends", an_import_that_a_crash_ends_looks_the_same_to_all);
  run("a long import", a_long_import_is_written_in_pieces);
  run("imports that do not fit", arrays_that_do_not_fit_are_not_imported);
  run("counters", counters_say_what_was_written);
  run("read over blocks", a_merge_reads_over_two_blocks_and_writes_none_of_them);
  return check::passed();
}

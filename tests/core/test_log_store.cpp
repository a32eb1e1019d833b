// The log store, one claim at a time: what it refuses, what a failure leaves, what it counts.
#include <sys/resource.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "log_store_model.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

void nothing_goes_before_recovery() {
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), one_table(), 64 << 10, Caching::buffered, {}, false, identity_of_tests);
  LogStore store(directory.path(), one_table(), buffered());
  CHECK(kind_thrown_by([&] { store.fetch({}); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.append(store.pack(mark_of(1), {})); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.sync(); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.merge(up_to(1)); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.touched_rows(0, 0, 1); }) == ErrorKind::step);
  CHECK(kind_thrown_by([&] {
          LogStore::create(directory.path(), one_table(), 4095, Caching::buffered, {}, false, identity_of_tests);
        }) == ErrorKind::exists);
}

void a_store_begins_once(std::uint64_t seed) {
  const TemporaryDirectory directory;
  LogStore::create(directory.path(), one_table(), 64 << 10, Caching::buffered, {}, false, identity_of_tests);
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
  CHECK(kind_thrown_by([&] { store.import_rows(0, ImportedRows::apart(one_table()[0], {}, {}, {})); }) ==
        ErrorKind::step);
  CHECK(kind_thrown_by([&] { store.sync_home(); }) == ErrorKind::step);
  CHECK((before == std::array{modified("row-log-0000"), modified("shard-0000/table-0000.home")}));
  forbid(std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
}

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
  for (const HomeOrder order : {HomeOrder::by_first_touch, HomeOrder::by_row}) {
    Subject subject(one_table(order), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(1);
    std::vector<std::function<void()>> verbs = {[&] { subject.fetch_all(); }, [&] { subject.merge(2); }};
    if (order == HomeOrder::by_row) verbs.emplace_back([&] { subject.list_touched(); });  // addresses are in memory
    for (const auto& verb : verbs) {
      subject.disk.fail_next_read = true;
      CHECK(kind_thrown_by(verb) == ErrorKind::failed);
      verb();
      subject.fetch_all();
      subject.append_with_room(50);
      subject.sync();
    }
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
  for (const HomeOrder order : {HomeOrder::by_first_touch, HomeOrder::by_row}) {
    Subject subject(one_table(order), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(3);
    const LogStoreCounters counters = subject.store->counters();
    CHECK(counters.appended_rows == 9 && counters.appended_bytes == 3 * 4096);
    CHECK(counters.merged_bytes == 3 * 4096 && subject.store->used_bytes() == 0);
    CHECK(counters.merged_rows == 3);
    if (order == HomeOrder::by_first_touch) {
      CHECK(counters.home_sectors_changed == 1);
      CHECK(counters.home_bytes_written == 4096 && counters.home_bytes_read == 0);  // there was nothing
    } else {
      CHECK(counters.home_sectors_changed == 2);  // rows 1 and 5, and row 100
      CHECK(counters.home_bytes_written == 2 * 4096 &&
            counters.home_bytes_read == 2 * 4096);  // each in a block of its own
    }
  }
}

// Each table has two files, and a system lets few be open where nobody asks for more.
void a_store_of_many_tables_has_all_of_their_files(std::uint64_t seed) {
  struct rlimit before{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const std::vector<RowTable> tables(201, one_table()[0]);
  const struct rlimit few{256, before.rlim_max};
  CHECK(before.rlim_max > 2 * tables.size() + 64 && ::setrlimit(RLIMIT_NOFILE, &few) == 0);
  {
    Subject subject(tables, 1 << 20, buffered(), seed);
    subject.append(5);
    subject.sync();
    subject.merge(subject.store->last().step);
    subject.fetch_all();
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

void rows_that_a_store_does_not_have_are_refused(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  std::vector<OwnedRows> wanted;
  wanted.emplace_back(0, one_table()[0], std::vector<std::uint64_t>{5, one_table()[0].num_rows});
  CHECK(kind_thrown_by([&] { subject.store->fetch(views(wanted)); }) == ErrorKind::config);
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
  run("a step without rows", a_step_that_updated_nothing_is_a_record_too);
  run("touched rows of a large table", touched_rows_of_a_large_table_are_found);
  run("many tables", a_store_of_many_tables_has_all_of_their_files);
  run("rows of nobody", rows_that_a_store_does_not_have_are_refused);
  run("counters", counters_say_what_was_written);
  return check::passed();
}

// Home bits: what they say after anything that can befall their file, and what a store does with and without them.
#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "log_store/home_bits.h"
#include "log_store_model.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

constexpr std::uint64_t many_rows = 5'000'000;  // of several runs of blocks
constexpr const char* file_name = "home-bits-0000";

std::unique_ptr<HomeBits> open_bits(const std::string& path, BlockQueue& queue, BlockWatcher* watcher = nullptr) {
  return HomeBits::open(path, many_rows, Caching::buffered, watcher, queue);
}

std::set<std::uint64_t> random_rows_of(std::mt19937_64& random) {
  std::set<std::uint64_t> rows = {0, many_rows - 1};
  const std::uint64_t crowd = random() % many_rows;
  for (int i = 0; i < 2000; ++i) rows.insert(i % 2 == 0 ? random() % many_rows : (crowd + random() % 500) % many_rows);
  return rows;
}

void check_says(const HomeBits& bits, const std::set<std::uint64_t>& rows, std::mt19937_64& random) {
  for (const std::uint64_t row : rows) {
    CHECK(bits.may_have(row));
    for (const std::uint64_t other : {row - 1, row + 1, random() % many_rows}) {
      if (other < many_rows) CHECK(bits.may_have(other) == rows.contains(other));
    }
  }
}

void what_was_added_is_there_in_the_next_life(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/" + file_name;
  HomeBits::create(path, many_rows);
  BlockQueue queue;
  std::set<std::uint64_t> rows;
  for (int life = 0; life < 3; ++life) {
    const auto bits = open_bits(path, queue);
    CHECK(bits);
    check_says(*bits, rows, random);
    for (int i = 0; i < 3; ++i) {
      const auto added = random_rows_of(random);
      for (const std::uint64_t row : added) bits->add(row);
      rows.insert(added.begin(), added.end());
      check_says(*bits, rows, random);
      bits->sync();
    }
  }
}

class CountingWatcher final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile&, std::uint64_t, std::span<const std::byte> data) override { bytes += data.size(); }
  void before_sync(const BlockFile&) override {}
  void after_sync(const BlockFile&) override {}

  std::uint64_t bytes = 0;  // written
};

void only_blocks_with_something_new_are_written() {
  CountingWatcher watcher;
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/" + file_name;
  HomeBits::create(path, many_rows);
  BlockQueue queue;
  const auto bits = open_bits(path, queue, &watcher);
  for (const std::uint64_t row : {0UL, 1UL, 40'000UL, 4'999'999UL}) bits->add(row);
  bits->sync();
  CHECK(watcher.bytes == 3 * format::block_bytes);
  for (const std::uint64_t row : {0UL, 1UL, 40'000UL}) bits->add(row);
  bits->sync();
  CHECK(watcher.bytes == 3 * format::block_bytes);
  bits->add(2);
  bits->sync();
  CHECK(watcher.bytes == 4 * format::block_bytes);
}

void put_byte(const std::string& path, std::uint64_t offset, char byte) {
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.put(byte);
  CHECK(stream.good());
}

void a_damaged_block_may_have_any_row(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/" + file_name;
  HomeBits::create(path, many_rows);
  BlockQueue queue;
  {
    const auto bits = open_bits(path, queue);
    for (const std::uint64_t row : {5UL, 40'000UL}) bits->add(row);
    bits->sync();
  }
  // in the first block: row 3 with what is there, its checksum; and in the third, which was never written
  for (const std::uint64_t offset :
       {std::uint64_t{0}, std::uint64_t{4093}, std::uint64_t{2 * 4096 + random() % 4096}}) {
    const TemporaryDirectory copy;
    const std::string damaged = copy.path() + "/" + file_name;
    std::filesystem::copy_file(path, damaged);
    put_byte(damaged, offset, static_cast<char>(0x5a));
    const auto bits = open_bits(damaged, queue);
    const std::uint64_t block = offset / format::block_bytes;
    for (std::uint64_t row = 0; row < 200'000; row += 1 + random() % 50) {
      const std::uint64_t block_of_row = row / 32736;
      CHECK(bits->may_have(row) == (block_of_row == block || row == 5 || row == 40'000));
    }
  }
}

void a_block_in_the_place_of_another_is_not_believed() {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/" + file_name;
  HomeBits::create(path, many_rows);
  BlockQueue queue;
  {
    const auto bits = open_bits(path, queue);
    bits->add(1);
    bits->sync();
  }
  std::string block(format::block_bytes, '\0');
  std::fstream stream(path, std::ios::binary | std::ios::in | std::ios::out);
  stream.read(block.data(), static_cast<std::streamsize>(block.size()));
  stream.write(block.data(), static_cast<std::streamsize>(block.size()));
  stream.close();
  CHECK(open_bits(path, queue)->may_have(40'000));
}

void a_file_of_another_size_is_none() {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/" + file_name;
  BlockQueue queue;
  CHECK(!open_bits(path, queue));
  HomeBits::create(path, many_rows);
  CHECK(!HomeBits::open(path, 1000, Caching::buffered, nullptr, queue));
}

// In a store.

std::uint64_t reads_for_all_rows(Subject& subject) {
  const std::uint64_t before = subject.store->counters().fetched_rows;
  subject.fetch_all();
  return subject.store->counters().fetched_rows - before;
}

void append_and_merge(Subject& subject, std::size_t most_rows) {
  CHECK(subject.append(most_rows));
  subject.sync();
  subject.merge(subject.durable);
}

void a_row_that_was_never_updated_is_not_read(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  CHECK(reads_for_all_rows(subject) == 0);
  CHECK(subject.store->counters().initial_rows == 200);
  append_and_merge(subject, 50);
  const std::uint64_t touched = subject.model.touched(0).size();
  CHECK(reads_for_all_rows(subject) == touched);
  subject.crash();
  subject.open(every_step);
  CHECK(reads_for_all_rows(subject) == touched);
  CHECK(subject.store->counters().initial_rows == 200 - touched);
}

void a_store_without_its_bits_reads_everything(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  append_and_merge(subject, 10);
  subject.crash();
  std::filesystem::remove(subject.file(file_name));
  for (int life = 0; life < 2; ++life) {
    subject.open(every_step);
    CHECK(reads_for_all_rows(subject) == 200);
    append_and_merge(subject, 10);
    subject.crash();
  }
}

// As software does that does not know them: its checkpoints say so.
void bits_that_somebody_did_not_keep_are_not_believed(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  append_and_merge(subject, 10);
  subject.crash();
  const std::string aside = subject.file("aside");
  std::filesystem::rename(subject.file(file_name), aside);
  subject.open(every_step);
  append_and_merge(subject, 100);
  subject.crash();
  std::filesystem::rename(aside, subject.file(file_name));
  subject.open(every_step);
  CHECK(reads_for_all_rows(subject) == 200);
}

// As a backup of one file, or a write that the medium lost, leaves them.
void bits_that_are_older_than_the_checkpoint_are_not_believed(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  append_and_merge(subject, 5);
  const std::string aside = subject.file("aside");
  std::filesystem::copy_file(subject.file(file_name), aside);
  const std::size_t touched = subject.model.touched(0).size();
  while (subject.model.touched(0).size() == touched) append_and_merge(subject, 100);
  subject.crash();
  std::filesystem::rename(aside, subject.file(file_name));
  subject.open(every_step);
  CHECK(reads_for_all_rows(subject) == 200);
}

void import_a_row(Subject& subject, std::uint64_t row) {
  std::vector<OwnedRows> imported;
  imported.emplace_back(0, one_table(HomeOrder::by_row)[0], std::vector<std::uint64_t>{row});
  imported[0].weights[0] = static_cast<std::byte>(1 + row % 255);
  subject.import_rows(0, imported[0].rows, imported[0].weights, imported[0].state);
  subject.model.update(0, imported);
}

void bits_of_imported_rows_are_kept_from_the_sync_on(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  for (const std::uint64_t row : {3UL, 77UL, 199UL}) import_a_row(subject, row);
  CHECK(reads_for_all_rows(subject) == 3);
  subject.store->sync_home();
  subject.crash();
  subject.open(every_step);
  CHECK(reads_for_all_rows(subject) == 3);
  import_a_row(subject, 20);
  append_and_merge(subject, 0);
  subject.store->sync_home();
  subject.crash();
  subject.open(every_step);
  CHECK(reads_for_all_rows(subject) == subject.model.touched(0).size());
}

void bits_are_given_up_by_an_import_that_is_never_synced(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  import_a_row(subject, 3);
  subject.store->sync_home();
  import_a_row(subject, 77);
  subject.store.reset();
  for (int life = 0; life < 2; ++life) {
    subject.open(every_step);
    CHECK(reads_for_all_rows(subject) == 200);
    subject.store.reset();
  }
}

void imports_write_home_alone_but_for_the_first(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  const auto writes_of = [&](const std::function<void()>& work) {
    const std::uint64_t before = subject.disk.num_writes;
    work();
    return subject.disk.num_writes - before;
  };
  CHECK(writes_of([&] { import_a_row(subject, 3); }) == 3);  // and a checkpoint, synced
  for (std::uint64_t row = 4; row < 200; row += 5) CHECK(writes_of([&] { import_a_row(subject, row); }) == 1);
  CHECK(writes_of([&] { subject.store->sync_home(); }) == 5);  // home; bits and a checkpoint, written and synced
  CHECK(writes_of([&] { subject.store->sync_home(); }) == 0);
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
  run("the next life", what_was_added_is_there_in_the_next_life);
  run("new blocks alone", [](std::uint64_t) { only_blocks_with_something_new_are_written(); });
  run("a damaged block", a_damaged_block_may_have_any_row);
  run("a block elsewhere", [](std::uint64_t) { a_block_in_the_place_of_another_is_not_believed(); });
  run("another size", [](std::uint64_t) { a_file_of_another_size_is_none(); });
  run("untouched rows", a_row_that_was_never_updated_is_not_read);
  run("no bits", a_store_without_its_bits_reads_everything);
  run("older bits", bits_that_are_older_than_the_checkpoint_are_not_believed);
  run("imported rows", bits_of_imported_rows_are_kept_from_the_sync_on);
  run("an import without its sync", bits_are_given_up_by_an_import_that_is_never_synced);
  run("what imports write", imports_write_home_alone_but_for_the_first);
  run("bits that were not kept", bits_that_somebody_did_not_keep_are_not_believed);
  return check::passed();
}

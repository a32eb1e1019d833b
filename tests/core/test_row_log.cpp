// What a row log makes of files and checkpoints that it would never write, and of records that change while it reads.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "check.h"
#include "log_store_model.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t ring = format::row_log_ring_offset;
constexpr std::uint64_t record_bytes = 4096;

// Work that ends in this kind of error, with these words in it.
void refused(ErrorKind kind, const std::string& words, const std::function<void()>& work) {
  std::string said;
  try {
    work();
  } catch (const Error& error) {
    said = error.what();
    check::context += ", which said '" + said + "'";
    CHECK(error.kind() == kind);
  }
  CHECK(!said.empty() && said.find(words) != std::string::npos);
}

template <class T>
void change(const std::string& name, std::uint64_t offset, const std::function<void(T&)>& edit) {
  std::fstream file(name, std::ios::binary | std::ios::in | std::ios::out);
  T value;
  file.seekg(static_cast<std::streamoff>(offset));
  file.read(reinterpret_cast<char*>(&value), sizeof(value));
  edit(value);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
  CHECK(file.good());
}

void flip(const std::string& name, std::uint64_t offset) {
  change<char>(name, offset, [](char& byte) { byte ^= 1; });
}

// Both checkpoints, with their checksums.
void change_checkpoints(const std::string& log, const std::function<void(format::RowLogCheckpoint&)>& edit) {
  for (const std::uint64_t offset : format::row_log_checkpoint_offset) {
    change<format::RowLogCheckpoint>(log, offset, [&](format::RowLogCheckpoint& checkpoint) {
      if (checkpoint.magic == 0) return;
      edit(checkpoint);
      checkpoint.crc = crc_of(checkpoint, identity_of_tests.seed());
    });
  }
}

void rings_that_cannot_be_are_refused() {
  check::context = "impossible rings";
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/log";
  for (const std::uint64_t bytes : {std::uint64_t{0}, std::uint64_t{1000}, std::uint64_t{4096 + 512}}) {
    refused(ErrorKind::config, path, [&] { RowLog::create(path, bytes, Caching::buffered); });
    CHECK(!std::filesystem::exists(path));
  }
  refused(ErrorKind::config, "too large", [&] {
    LogStore::create(directory.path(), one_table(), ~std::uint64_t{0} - 4095, Caching::buffered, {}, false,
                     identity_of_tests);
  });
  CHECK(std::filesystem::is_empty(directory.path()));
}

void a_log_of_another_length_is_refused() {
  const TemporaryDirectory directory;
  const std::string path = directory.path() + "/log";
  RowLog::create(path, 16 * record_bytes, Caching::buffered);
  BlockQueue queue;
  for (const std::uint64_t bytes : {std::uint64_t{0}, ring, ring + 16 * record_bytes + 512}) {
    check::context = "a log of " + std::to_string(bytes) + " bytes";
    std::filesystem::resize_file(path, bytes);
    refused(ErrorKind::corrupted, path, [&] { RowLog(path, Caching::buffered, nullptr, Opening::read_write, queue); });
    CHECK(std::filesystem::file_size(path) == bytes);
  }
}

void a_log_that_was_made_with_another_ring_is_refused(std::uint64_t seed) {
  check::context = "another ring";
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  subject.crash();
  LogStoreOptions options = buffered();
  options.ring_bytes = 128 << 10;
  refused(ErrorKind::corrupted, subject.file("row-log-0000"),
          [&] { LogStore(subject.directory(), one_table(), options); });
}

// One who reads beside a writer may see a checkpoint half written: the other one counts.
void the_checkpoint_that_holds_says_what_is_merged(std::uint64_t seed) {
  check::context = "a checkpoint that does not hold";
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(2);
  LogStoreOptions options = buffered();
  options.writable = false;
  LogStore reader(subject.directory(), one_table(), options);
  CHECK(reader.read_merged_step() == 2);
  const std::string log = subject.file("row-log-0000");
  std::uint64_t newest = 0;
  for (const std::uint64_t offset : format::row_log_checkpoint_offset) {
    change<format::RowLogCheckpoint>(log, offset, [&](format::RowLogCheckpoint& checkpoint) {
      if (checkpoint.merged_step == 2) newest = offset;
    });
  }
  flip(log, newest + 40);
  CHECK(reader.read_merged_step() < 2);
  flip(log, newest + 40);
  CHECK(reader.read_merged_step() == 2);
}

// Recovery makes what it has read durable by writing it again: of what it has read, and of nothing else.
void a_record_that_changes_after_it_was_read_is_not_taken_for_durable(std::uint64_t seed) {
  using Header = format::RowLogHeader;
  const auto with_change = [&](const char* what, const std::function<void(const std::string&)>& edit) {
    check::context = what;
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.crash();
    const std::string log = subject.file("row-log-0000");
    {
      LogStore store(subject.directory(), one_table(), buffered());
      CHECK(store.scan().step == 3);
      edit(log);
      refused(ErrorKind::failed, log + " at offset " + std::to_string(ring + 2 * record_bytes),
              [&] { store.index(9, every_step); });
    }
    subject.durable = 2;  // what was lost was never reported by this life
    subject.open(every_step);
    CHECK(subject.store->last().step == 2);
    subject.fetch_all();
  };
  const std::uint64_t third = ring + 2 * record_bytes;
  with_change("a header that is lost", [&](const std::string& log) { flip(log, third + 9); });
  with_change("row numbers that are lost", [&](const std::string& log) { flip(log, third + 200); });
  with_change("images that are lost", [&](const std::string& log) { flip(log, third + 600); });
  check::context = "a record in its place";
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.crash();
  const std::string log = subject.file("row-log-0000");
  LogStore store(subject.directory(), one_table(), buffered());
  store.scan();
  change<Header>(log, third, [](Header& header) {
    header.cursor += 1;
    header.crc = crc_of(header, identity_of_tests.seed());
  });
  refused(ErrorKind::failed, "open the pool again", [&] { store.index(9, every_step); });
}

// The newest checkpoint knows all three records, and where they begin.
void a_log_that_does_not_begin_where_it_says_is_corrupted(std::uint64_t seed) {
  for (const std::uint64_t tail : {std::uint64_t{2000}, std::uint64_t{2048}, 2 * record_bytes - 512}) {
    check::context = "a log that begins at " + std::to_string(tail);
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.crash();
    subject.open(every_step);
    subject.crash();
    const std::string log = subject.file("row-log-0000");
    change_checkpoints(log, [&](format::RowLogCheckpoint& checkpoint) { checkpoint.tail = tail; });
    refused(ErrorKind::corrupted, "no record where the log begins", [&] { subject.open(every_step); });
  }
  check::context = "a record that the checkpoint does not mean";
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.crash();
  subject.open(every_step);
  subject.crash();
  const std::string log = subject.file("row-log-0000");
  change_checkpoints(log, [](format::RowLogCheckpoint& checkpoint) { checkpoint.last_record_crc ^= 1; });
  refused(ErrorKind::corrupted, "breaks the chain", [&] { subject.open(every_step); });
}

void a_store_is_followed_by_who_reads_and_has_scanned(std::uint64_t seed) {
  check::context = "following";
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  refused(ErrorKind::step, subject.file("row-log-0000"), [&] { subject.store->follow_from_tail(); });
  LogStoreOptions options = buffered();
  options.writable = false;
  LogStore reader(subject.directory(), one_table(), options);
  refused(ErrorKind::step, subject.file("row-log-0000"), [&] { reader.follow_from_tail(); });
  reader.scan();
  CHECK(reader.follow_from_tail().size() == 4);
}

// A record that is there is read whole, one that appears when it is.
void a_follower_tells_damage_from_what_is_being_written(std::uint64_t seed) {
  LogStoreOptions options = buffered();
  options.writable = false;
  for (const std::uint64_t offset : {std::uint64_t{200}, std::uint64_t{600}}) {
    check::context = "following, damage at " + std::to_string(offset);
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    const std::string log = subject.file("row-log-0000");
    LogStore reader(subject.directory(), one_table(), options);
    reader.scan();
    reader.follow_from_tail();
    flip(log, ring + offset);
    refused(ErrorKind::corrupted, log + " at offset " + std::to_string(ring), [&] { reader.follow(); });
    flip(log, ring + offset);
    for (int record = 1; record <= 3; ++record) CHECK(reader.follow().has_value());
    CHECK(!reader.follow().has_value());
    append_three_rows(subject, 4);
    subject.sync();
    flip(log, ring + 3 * record_bytes + offset);
    CHECK(!reader.follow().has_value());  // it is being written, for all that one can tell
    flip(log, ring + 3 * record_bytes + offset);
    CHECK(reader.follow().has_value());
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  rings_that_cannot_be_are_refused();
  a_log_of_another_length_is_refused();
  a_log_that_was_made_with_another_ring_is_refused(seed);
  the_checkpoint_that_holds_says_what_is_merged(seed);
  a_record_that_changes_after_it_was_read_is_not_taken_for_durable(seed);
  a_log_that_does_not_begin_where_it_says_is_corrupted(seed);
  a_store_is_followed_by_who_reads_and_has_scanned(seed);
  a_follower_tells_damage_from_what_is_being_written(seed);
  return check::passed();
}

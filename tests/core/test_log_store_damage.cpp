// What a log store says of damage: what is told from a torn tail, and what is named.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "check.h"
#include "log_store/numbered_checksum.h"
#include "log_store_model.h"
#include "thrown.h"

namespace holdfast {
namespace {

void flip(const std::string& name, std::uint64_t offset) {
  std::fstream stream(name, std::ios::binary | std::ios::in | std::ios::out);
  stream.seekg(static_cast<std::streamoff>(offset));
  const auto byte = static_cast<char>(stream.get() ^ 1);
  stream.seekp(static_cast<std::streamoff>(offset));
  stream.put(byte);
  CHECK(stream.good());
}

// Opens for reading and verifies.
std::vector<std::string> problems_of(const Subject& subject, HomeOrder order = HomeOrder::by_first_touch) {
  LogStoreOptions reading = buffered();
  reading.writable = false;
  LogStore store(subject.directory(), one_table(order), reading);
  CHECK(kind_thrown_by([&] { store.verify(0); }) == ErrorKind::step);
  store.scan();
  store.view();
  return store.verify(store.last().step);
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

// Rows 1, 5 and 100 were home first in the order 100, 5, 1: the log had them last in that order.
void a_damaged_row_at_home_is_named(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(3);
  subject.fetch_all();
  const std::string home = subject.file("shard-0000/table-0000.home");
  for (const auto& [row, address] : {std::pair(100, 0), std::pair(5, 1), std::pair(1, 2)}) {
    const std::string place = home + " at offset " + std::to_string(address * 72);
    flip(home, static_cast<std::uint64_t>(address) * 72 + 3);
    try {
      subject.fetch_all();
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::corrupted);
      CHECK(std::string(error.what()).find(place) != std::string::npos);
    }
    CHECK((problems_of(subject) ==
           std::vector{place + ": row " + std::to_string(row) + " of table 0 does not hold its checksum"}));
    flip(home, static_cast<std::uint64_t>(address) * 72 + 3);
  }
  CHECK(problems_of(subject).empty());
  flip(home, 3 * 72 + 3);  // behind the last row
  subject.fetch_all();
  CHECK(problems_of(subject).empty());
}

void damage_to_a_row_that_the_log_has_is_none(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(2);
  subject.crash();
  flip(subject.file("shard-0000/table-0000.home"), 72 + 3);
  CHECK(problems_of(subject).empty());
  subject.open(every_step);
  subject.fetch_all();
  subject.merge(3);
  CHECK(problems_of(subject).empty());
}

// Names of rows that are lost would be rows that are lost: nothing of them is believed that does not hold.
void damage_to_addresses_is_never_taken_for_untouched_rows(std::uint64_t seed) {
  const char* name = "shard-0000/table-0000.addresses";
  const auto corrupted_by = [&](const std::function<void(const std::string&)>& damage) {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(3);
    subject.crash();
    damage(subject.file(name));
    CHECK(kind_thrown_by([&] { problems_of(subject); }) == ErrorKind::corrupted);
    CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
  };
  for (const std::uint64_t offset : {0, 8, 60, 4096, 4096 + 11, 4096 + 508}) {
    corrupted_by([&](const std::string& file) { flip(file, offset); });
  }
  const auto zeroes_corrupt = [&](std::streamoff offset, std::size_t bytes) {
    corrupted_by([&](const std::string& file) {
      std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
      stream.seekp(offset);
      stream.write(std::string(bytes, '\0').data(), static_cast<std::streamsize>(bytes));
    });
  };
  zeroes_corrupt(0, 64);
  zeroes_corrupt(4096, 512);
  zeroes_corrupt(0, 8192);
  corrupted_by([](const std::string& file) { std::filesystem::remove(file); });
  corrupted_by([](const std::string& file) { std::filesystem::resize_file(file, 4096); });
}

// Rows 1, 5 and 100, of which addresses say what cannot be, and hold their checksums.
void sealed_addresses_that_make_no_sense_are_named(std::uint64_t seed) {
  const std::uint32_t table_and_shard[2] = {0, 0};
  const std::uint32_t own_seed = crc32c(identity_of_tests.seed(), table_and_shard, sizeof(table_and_shard));
  const auto refused = [&](const std::string& words, const std::function<void(std::string & file)>& damage) {
    Subject subject(one_table(), 64 << 10, buffered(), seed);
    make_three_records(subject);
    subject.merge(3);
    subject.crash();
    const std::string name = subject.file("shard-0000/table-0000.addresses");
    std::ifstream in(name, std::ios::binary);
    std::string file(std::istreambuf_iterator<char>(in), {});
    in.close();
    damage(file);
    std::ofstream(name, std::ios::binary).write(file.data(), static_cast<std::streamsize>(file.size()));
    try {
      subject.open(every_step);
      CHECK(false);
    } catch (const Error& error) {
      check::context += std::string(", which said '") + error.what() + "'";
      CHECK(error.kind() == ErrorKind::corrupted);
      CHECK(std::string(error.what()).find(name) == 0 && std::string(error.what()).find(words) != std::string::npos);
    }
  };
  refused(" rows have addresses, of ", [&](std::string& file) {
    format::HomeAddressesHeader header;
    std::memcpy(&header, file.data(), sizeof(header));
    CHECK(header.count == 3 && header.own_seed == 1);
    header.count = one_table()[0].num_rows + 1;
    header.crc = crc_of(header, own_seed);
    std::memcpy(file.data(), &header, sizeof(header));
  });
  const auto with_sector = [&](std::string& file, const std::function<void(char* sector)>& edit) {
    char* const sector = file.data() + 4096;
    edit(sector);
    const std::uint32_t checksum = numbered_checksum(reinterpret_cast<const std::byte*>(sector), 508, 0, own_seed);
    std::memcpy(sector + 508, &checksum, sizeof(checksum));
  };
  refused(" has two addresses",
          [&](std::string& file) { with_sector(file, [](char* sector) { std::memcpy(sector, sector + 5, 5); }); });
  refused(" of a home of ", [&](std::string& file) {
    with_sector(file, [](char* sector) { sector[4] = 1; });  // 2^32 rows further
  });
}

void addresses_of_an_earlier_day_are_refused(std::uint64_t seed) {
  Subject subject(one_table(), 64 << 10, buffered(), seed);
  append_three_rows(subject, 1);
  subject.sync();
  subject.merge(1);
  const std::string file = subject.file("shard-0000/table-0000.addresses");
  std::filesystem::copy_file(file, file + ".before");
  append_rows(subject, 2, one_table()[0], {7});
  subject.sync();
  subject.merge(2);
  subject.crash();
  std::filesystem::rename(file + ".before", file);
  CHECK(kind_thrown_by([&] { subject.open(every_step); }) == ErrorKind::corrupted);
}

void a_damaged_row_that_lies_by_number_is_named(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
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

void verification_names_every_damage_of_rows_by_number(std::uint64_t seed) {
  Subject subject(one_table(HomeOrder::by_row), 64 << 10, buffered(), seed);
  make_three_records(subject);
  subject.merge(2);
  subject.crash();
  subject.open(every_step);  // record 3 is believed without a look at its images now
  subject.crash();
  CHECK(problems_of(subject, HomeOrder::by_row).empty());
  const std::string home = subject.file("shard-0000/table-0000.home");
  const std::string log = subject.file("row-log-0000");
  flip(home, 5 * 72 + 3);  // a row that the log has
  CHECK(problems_of(subject, HomeOrder::by_row).empty());
  flip(home, 6 * 72 + 3);  // one that was never written
  const std::uint64_t images = format::row_log_ring_offset + 2 * 4096 + 512;
  flip(log, images + 72 + 70);
  CHECK((problems_of(subject, HomeOrder::by_row) ==
         std::vector{
             home + " at offset " + std::to_string(6 * 72) + ": row 6 of table 0 does not hold its checksum",
             log + " at offset " + std::to_string(images + 72) + ": row 5 of table 0 does not hold its checksum"}));
  flip(log, images + 72 + 70);
  flip(log, images + 500);  // behind the images of its sector
  CHECK(problems_of(subject, HomeOrder::by_row).back() ==
        log + " at offset " + std::to_string(images) + ": the checksum of the record's images does not hold");
  for (std::uint64_t row = 7; row < 200; ++row) flip(home, row / 7 * 512 + row % 7 * 72);
  CHECK(problems_of(subject, HomeOrder::by_row).size() == 100);
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

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  const std::uint64_t seed = check::seed_from(argc, argv);
  const auto run = [&](const char* name, const std::function<void(std::uint64_t)>& test) {
    check::context = name;
    test(seed);
  };
  run("damage or torn tail", damage_is_told_from_a_torn_tail);
  run("a damaged row at home", a_damaged_row_at_home_is_named);
  run("damage beneath the log", damage_to_a_row_that_the_log_has_is_none);
  run("damaged addresses", damage_to_addresses_is_never_taken_for_untouched_rows);
  run("sealed addresses", sealed_addresses_that_make_no_sense_are_named);
  run("earlier addresses", addresses_of_an_earlier_day_are_refused);
  run("a damaged row by number", a_damaged_row_that_lies_by_number_is_named);
  run("verification", verification_names_every_damage_of_rows_by_number);
  run("something is lost", a_store_that_lost_something_says_what);
  return check::passed();
}

// Records of the logs, checkpoints and dense slots whose checksums hold and whose contents make no sense: what recovery
// needs is named, whoever opens the pool, and nothing is changed; what it does not need does no harm.
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../fuzz/open_target.h"
#include "base/error.h"
#include "check.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

using fuzz::Bytes;
using fuzz::Files;
using fuzz::load;
using fuzz::store;

constexpr std::uint64_t step_of_pools = 5;  // that they were all committed up to

// Places of fuzz::make_pools().
enum Made { closed_in_place, open_in_place, sparse_in_place, closed_log, open_log, sparse_log };

const std::vector<Files>& pools() {
  static const std::vector<Files> made = fuzz::make_pools();
  return made;
}

// As it is in place after step 5, with the rows of the next one captured, and not updated.
const Files& captured_in_place() {
  static const Files made = [] {
    const TemporaryDirectory directory;
    make_pool(directory.path(), fuzz::log_bytes);
    Run run(directory.path(), fuzz::options());
    run.write_dense();
    while (run.pool.step() < step_of_pools) run.step(false);
    run.pool.flush();
    const auto capture = run.pool.capture(run.plan(step_of_pools + 1));
    run.pool.dense_state();  // waits for the background
    return fuzz::read_files(directory.path());
  }();
  return made;
}

std::uint32_t seed_of(const Files& files) {
  return Superblock::identity_of(load<format::PoolHeader>(files.at("pool.holdfast"), 0)).seed();
}

// A record of one of the logs, in the order of their steps.
struct Place {
  std::string file;
  std::size_t at;
};

template <class Header>
std::vector<Place> records_of(const Files& files) {
  constexpr bool in_place = std::is_same_v<Header, format::RecordHeader>;
  const std::string file = in_place ? "log-0000" : "row-log-0000";
  std::vector<Place> places;
  for (const std::size_t at : fuzz::records_of(files.at(file), in_place ? 0 : format::row_log_ring_offset,
                                               in_place ? format::line_bytes : format::block_bytes,
                                               in_place ? format::record_magic : format::row_log_record_magic)) {
    places.push_back({file, at});
  }
  std::ranges::sort(places, {}, [&](const Place& place) { return load<Header>(files.at(place.file), place.at).step; });
  CHECK(places.size() >= 4);
  return places;
}

template <class T>
void change(Files& files, const Place& place, const std::function<void(T&)>& edit) {
  T value = load<T>(files.at(place.file), place.at);
  edit(value);
  store(files.at(place.file), place.at, value);
}

// Whoever opens the pool gets this kind of error, with these words, and leaves the files as they are.
void refused(const Files& files, const std::string& words) {
  const TemporaryDirectory root;
  const std::string path = root.path() + "/pool";
  fuzz::write_files(path, files);
  std::string said;
  try {
    const Pool pool(path, fuzz::options());
  } catch (const Error& error) {
    said = error.what();
    check::context += ", which said '" + said + "'";
    CHECK(error.kind() == ErrorKind::corrupted);
  }
  CHECK(!said.empty() && said.find(words) != std::string::npos);
  CHECK(said.find(path) != std::string::npos || said.find("dense-") == 0);
  CHECK(fuzz::read_files(path) == files);
}

// The pool is at the end of `step`, with that step's rows, and goes on from there.
void taken(const Files& files, std::uint64_t step) {
  static const std::vector<std::vector<std::byte>> rows = {reference(4), reference(5), reference(7)};
  const TemporaryDirectory root;
  const std::string path = root.path() + "/pool";
  fuzz::write_files(path, files);
  try {
    Run run(path, fuzz::options());
    CHECK(run.pool.step() == step);
    run.pool.close();
    CHECK(rows_of_pool(path) == rows[step - 4]);
    Run further(path, fuzz::options());
    while (further.pool.step() < 7) further.step(false);
    further.pool.close();
  } catch (const Error& error) {
    check::context += std::string(", which said '") + error.what() + "'";
    CHECK(!"the pool opens");
  }
  CHECK(rows_of_pool(path) == rows[2]);
}

void as_they_are_the_pools_open() {
  for (const Made made : {closed_in_place, open_in_place, closed_log, open_log}) {
    check::context = "pool " + std::to_string(made);
    taken(pools()[made], step_of_pools);
    Files sealed = pools()[made];
    fuzz::seal_all(sealed, true);
    CHECK(sealed == pools()[made]);
  }
}

// With the record of the step that was captured, changed and sealed.
void with_newest(const char* what, const std::function<void(format::RecordHeader&, Files&, const Place&)>& edit,
                 const std::function<void(const Files&)>& then) {
  check::context = what;
  Files files = captured_in_place();
  const Place newest = records_of<format::RecordHeader>(files).back();
  auto header = load<format::RecordHeader>(files.at(newest.file), newest.at);
  CHECK(header.step == step_of_pools + 1 && header.num_sections == 2);
  edit(header, files, newest);
  Bytes& log = files.at(newest.file);
  const std::uint32_t seed = seed_of(files);
  const std::size_t end = std::min<std::uint64_t>(newest.at + header.bytes, log.size());
  header.payload_crc = fuzz::crc_of_range(seed, log, newest.at + sizeof(header), end);
  header.crc = crc_of(header, seed);
  store(log, newest.at, header);
  then(files);
}

void sections_in_flight_that_do_not_fit_are_named() {
  using Header = format::RecordHeader;
  const auto section = [](Files& files, const Place& record, const std::function<void(format::RecordSection&)>& edit) {
    change<format::RecordSection>(files, {record.file, record.at + sizeof(Header)}, edit);
  };
  const auto misfit = [](const Files& files) { refused(files, "a section that does not fit"); };
  with_newest(
      "rows that begin in the middle of a line",
      [&](Header&, Files& files, const Place& record) {
        section(files, record, [](format::RecordSection& s) { s.rows_offset -= 8; });
      },
      misfit);
  with_newest(
      "a record that ends before its sections do",
      [](Header& header, Files&, const Place&) { header.bytes = sizeof(Header) + format::line_bytes * 3; }, misfit);
  with_newest(
      "a section that begins behind its record",
      [&](Header& header, Files& files, const Place& record) {
        section(files, record, [&](format::RecordSection& s) { s.rows_offset = header.bytes + format::line_bytes; });
      },
      misfit);
  with_newest(
      "another table's rows",
      [&](Header&, Files& files, const Place& record) {
        section(files, record, [](format::RecordSection& s) { s.table = 9; });
      },
      [](const Files& files) { refused(files, "a section of a table that does not exist"); });
}

// What was captured behind the newest commit follows it in a chain: what does not is of another life, and is not undone.
void what_does_not_follow_the_newest_commit_is_not_undone() {
  using Header = format::RecordHeader;
  const auto ignored = [](const Files& files) { taken(files, step_of_pools); };
  with_newest("another predecessor", [](Header& h, Files&, const Place&) { h.previous ^= 64; }, ignored);
  with_newest(
      "a predecessor with another checksum", [](Header& h, Files&, const Place&) { h.previous_crc ^= 1; }, ignored);
  with_newest("a step that is committed", [](Header& h, Files&, const Place&) { h.step = step_of_pools; }, ignored);
  with_newest("another place", [](Header& h, Files&, const Place&) { h.position += 1 << 20; }, ignored);
  with_newest("longer than the ring", [](Header& h, Files&, const Place&) { h.bytes = 1 << 20; }, ignored);
  with_newest("shorter than its header", [](Header& h, Files&, const Place&) { h.bytes = 64; }, ignored);
  with_newest("more sections than bytes", [](Header& h, Files&, const Place&) { h.num_sections = 1 << 20; }, ignored);
}

// The rows are of step 5, and the newest dense state is older: three records have to be undone.
void records_that_undoing_needs_are_named() {
  using Header = format::RecordHeader;
  const auto with_record = [](const char* what, const char* words, const std::function<void(Header&)>& edit) {
    check::context = what;
    Files files = pools()[sparse_in_place];
    const auto records = records_of<Header>(files);
    const auto last = std::ranges::find_if(records, [&](const Place& place) {
      return load<Header>(files.at(place.file), place.at).step == step_of_pools;
    });
    CHECK(last != records.end());
    change<Header>(files, *last, edit);
    fuzz::seal_all(files, true);
    refused(files, words);
  };
  with_record("longer than the ring", "a record length that does not fit", [](Header& h) { h.bytes = 1 << 20; });
  with_record("shorter than its header", "a record length that does not fit", [](Header& h) { h.bytes = 64; });
  with_record("more sections than bytes", "more sections than bytes", [](Header& h) { h.num_sections = 1 << 20; });
  with_record("another place", "a record of another turn of the ring", [](Header& h) { h.position += 1 << 16; });
  check::context = "records that were given up";
  Files files = pools()[sparse_in_place];
  for (const std::size_t at : format::commit_offset) {
    change<format::CommitRecord>(files, {"pool.holdfast", at},
                                 [](format::CommitRecord& c) { c.log_tail = c.log_head; });
  }
  fuzz::seal_all(files, false);
  refused(files, "a record that was given up");
}

void no_record_begins_where_its_header_has_no_room() {
  check::context = "a log that ends a line before its ring does";
  Files files = pools()[closed_in_place];
  for (const std::size_t at : format::commit_offset) {
    change<format::CommitRecord>(files, {"pool.holdfast", at},
                                 [](format::CommitRecord& c) { c.log_head = fuzz::log_bytes - format::line_bytes; });
  }
  fuzz::seal_all(files, false);
  taken(files, step_of_pools);
}

// Of the newest dense state's step. What is older may be home already, and what is newer would be a torn tail.
void records_of_a_row_log_that_make_no_sense_are_named() {
  using Header = format::RowLogHeader;
  const auto with_record = [](const char* what, const std::function<void(Header&, Files&, const Place&)>& edit) {
    for (const Made made : {closed_log, open_log, sparse_log}) {
      check::context = std::string(what) + ", pool " + std::to_string(made);
      Files files = pools()[made];
      const auto records = records_of<Header>(files);
      const Place& needed = records[records.size() - (made == sparse_log ? 3 : 1)];
      auto header = load<Header>(files.at(needed.file), needed.at);
      CHECK(header.step == (made == sparse_log ? 3 : step_of_pools));
      edit(header, files, needed);
      store(files.at(needed.file), needed.at, header);
      fuzz::seal_all(files, true);
      refused(files, "");
    }
  };
  const auto with_header = [&](const char* what, const std::function<void(Header&)>& edit) {
    with_record(what, [&](Header& header, Files&, const Place&) { edit(header); });
  };
  with_header("half a block", [](Header& h) { h.bytes += format::sector_bytes; });
  with_header("longer than the ring", [](Header& h) { h.bytes = 1 << 20; });
  with_header("images behind the record", [](Header& h) { h.images_offset = h.bytes + format::sector_bytes; });
  with_header("images in the middle of a sector", [](Header& h) { h.images_offset += 8; });
  with_header("images in the header", [](Header& h) { h.images_offset = 0; });
  with_header("more sections than bytes", [](Header& h) { h.num_sections = 1 << 20; });
  with_header("another place", [](Header& h) { h.position += 1 << 16; });
  const auto with_section = [&](const char* what, std::size_t number,
                                const std::function<void(format::RowLogSection&)>& edit) {
    with_record(what, [&](Header&, Files& files, const Place& record) {
      const std::size_t at = record.at + sizeof(Header) + number * sizeof(format::RowLogSection);
      change<format::RowLogSection>(files, {record.file, at}, edit);
    });
  };
  using Section = format::RowLogSection;
  with_section("a table that does not exist", 1, [](Section& s) { s.table = 9; });
  with_section("the first table twice", 1, [](Section& s) { s.table = 0; });
  with_section("more rows than the table has", 0, [](Section& s) { s.num_rows = 301; });
  with_section("fewer rows than there are", 0, [](Section& s) { --s.num_rows; });
  with_section("images elsewhere", 0, [](Section& s) { s.images_offset += format::sector_bytes; });
  const auto with_rows = [&](const char* what, const std::function<void(std::uint64_t*, std::size_t)>& edit) {
    with_record(what, [&](Header&, Files& files, const Place& record) {
      const auto section = load<Section>(files.at(record.file), record.at + sizeof(Header));
      std::vector<std::uint64_t> rows(section.num_rows);
      unsigned char* const in_file = files.at(record.file).data() + record.at + section.rows_offset;
      std::memcpy(rows.data(), in_file, rows.size() * 8);
      edit(rows.data(), rows.size());
      std::memcpy(in_file, rows.data(), rows.size() * 8);
    });
  };
  with_rows("rows out of order", [](std::uint64_t* rows, std::size_t) { std::swap(rows[0], rows[1]); });
  with_rows("a row beyond the table", [](std::uint64_t* rows, std::size_t n) { rows[n - 1] = 300; });
  with_rows("a row that is marked", [](std::uint64_t* rows, std::size_t n) { rows[n - 1] |= std::uint64_t{1} << 63; });
}

void dense_slots_that_make_no_sense_are_named() {
  using Header = format::DenseHeader;
  const auto newest = [](const Files& files) {
    const auto step = [&](const char* name) { return load<Header>(files.at(name), 0).step; };
    return std::string(step("dense-0") > step("dense-1") ? "dense-0" : "dense-1");
  };
  const auto with_slot = [&](const char* what, Made made, const char* words, const std::function<void(Header&)>& edit) {
    check::context = what;
    Files files = pools()[made];
    change<Header>(files, {newest(files), 0}, edit);
    fuzz::seal_all(files, true);
    refused(files, words);
  };
  for (const Made made : {closed_in_place, open_log}) {
    const auto room = [&](const char* name) { return pools()[made].at(name).size() - format::dense_payload_offset; };
    with_slot("two parts that fit, and not together", made, "the payload is longer than the file", [&](Header& h) {
      h.structure_bytes = room("dense-0") - format::line_bytes;
      h.tensors_bytes = room("dense-0") - format::line_bytes;
    });
    with_slot("a structure longer than all", made, "the payload is longer than the file",
              [&](Header& h) { h.structure_bytes = ~std::uint64_t{0} / 2; });
    with_slot("tensors longer than all", made, "the payload is longer than the file",
              [&](Header& h) { h.tensors_bytes = ~std::uint64_t{0} / 2; });
  }
  with_slot("a slot without its magic in a closed pool", closed_in_place, "dense-", [](Header& h) { h.magic = 0; });
  with_slot("a step that was never committed", open_in_place, "holds step 9",
            [](Header& h) { h.step = step_of_pools + 4; });
}

// Rows that are home cannot go back: the dense state that they went with is lost.
void rows_that_are_merged_further_than_the_dense_state_are_corruption() {
  check::context = "merged too far";
  Files files = pools()[open_log];
  const bool newest_is_first = load<format::DenseHeader>(files.at("dense-0"), 0).step == step_of_pools;
  change<format::DenseHeader>(files, {newest_is_first ? "dense-0" : "dense-1", 0},
                              [](format::DenseHeader& h) { h = {}; });
  for (const std::size_t at : format::row_log_checkpoint_offset) {
    change<format::RowLogCheckpoint>(files, {"row-log-0000", at},
                                     [](format::RowLogCheckpoint& c) { c.merged_step = step_of_pools; });
  }
  fuzz::seal_all(files, true);
  refused(files, "rows are merged up to step 5");
}

// An earlier life may have saved more than the one that went back and on from there.
void a_dense_state_that_was_rolled_back_is_not_taken() {
  check::context = "a dense state of a step that was rolled back";
  Files files = pools()[open_in_place];
  const bool first = load<format::DenseHeader>(files.at("dense-0"), 0).step == step_of_pools;
  change<format::DenseHeader>(files, {first ? "dense-1" : "dense-0", 0}, [](format::DenseHeader& h) {
    h.step = step_of_pools + 4;
    h.epoch = 0;
  });
  fuzz::seal_all(files, true);
  taken(files, step_of_pools);
}

// Two lives may have ended with the same step: the later one's state is the one that goes on.
void of_two_dense_states_of_one_step_the_later_lifes_is_taken() {
  for (const bool later_is_first : {false, true}) {
    check::context = "two dense states of a step";
    Files files = pools()[open_in_place];
    const bool newest_is_first = load<format::DenseHeader>(files.at("dense-0"), 0).step == step_of_pools;
    const std::string newest = newest_is_first ? "dense-0" : "dense-1";
    const std::string other = newest_is_first ? "dense-1" : "dense-0";
    const auto epoch = load<format::DenseHeader>(files.at(newest), 0).epoch;
    files.at(other) = files.at(newest);
    change<format::DenseHeader>(files, {later_is_first ? "dense-1" : "dense-0", 0}, [&](format::DenseHeader& h) {
      h.epoch = epoch - 1;
      h.cursor = 999;
    });
    fuzz::seal_all(files, true);
    const TemporaryDirectory root;
    fuzz::write_files(root.path() + "/pool", files);
    Pool pool(root.path() + "/pool", fuzz::options());
    const auto state = pool.dense_state();
    CHECK(state && state->header.step == step_of_pools && state->header.epoch == epoch);
    CHECK(state->header.cursor != 999);
  }
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  as_they_are_the_pools_open();
  sections_in_flight_that_do_not_fit_are_named();
  what_does_not_follow_the_newest_commit_is_not_undone();
  records_that_undoing_needs_are_named();
  no_record_begins_where_its_header_has_no_room();
  records_of_a_row_log_that_make_no_sense_are_named();
  dense_slots_that_make_no_sense_are_named();
  rows_that_are_merged_further_than_the_dense_state_are_corruption();
  a_dense_state_that_was_rolled_back_is_not_taken();
  of_two_dense_states_of_one_step_the_later_lifes_is_taken();
  return check::passed();
}

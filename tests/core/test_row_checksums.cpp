// Row checksums of an in-place store: no byte of a row, of its state, of its touched bit or of its checksum changes
// unnoticed, and what does not hold is not handed out.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "pool/pool.h"
#include "readers/reader.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::uint64_t num_steps = 6;
constexpr std::uint64_t log_bytes = 1 << 20;

std::string table_file(const std::string& directory, const char* what) {
  return directory + "/shard-0000/table-0000." + what;
}

void flip(const std::string& path, std::uint64_t byte, unsigned bit) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(static_cast<std::streamoff>(byte));
  const int was = file.get();
  CHECK(was >= 0);
  file.seekp(static_cast<std::streamoff>(byte));
  file.put(static_cast<char>(was ^ (1 << bit)));
}

void make_trained_pool(const std::string& directory, std::uint64_t steps) {
  make_pool(directory, log_bytes, format::Store::in_place, {.row_checksums = true});
  Run run(directory, {});
  while (run.pool.step() < steps) run.step(true);
  run.pool.close();
}

// A touched row of table 0 that the step after the next one reads, and the next one does not: a step ahead it is
// captured in the background.
std::uint64_t row_of_the_step_after_next(const std::string& directory) {
  const TemporaryDirectory copy;
  std::filesystem::copy(directory, copy.path(), std::filesystem::copy_options::recursive);
  Run run(copy.path(), {});
  const auto now = run.plan(num_steps + 1);
  const auto then = run.plan(num_steps + 2);
  const auto& read_now = now->tables[0].rows;
  for (const std::uint64_t row : then->tables[0].rows) {
    const auto touched = Reader(directory).touched_rows(0, row, 1);
    const bool is_touched = !touched.empty() && touched.front() == row;
    if (is_touched && !std::binary_search(read_now.begin(), read_now.end(), row)) return row;
  }
  check::fail(__FILE__, __LINE__, "a touched row is of the step after next alone");
}

void checksums_change_no_row() {
  const TemporaryDirectory directory;
  make_trained_pool(directory.path(), num_steps);
  CHECK(rows_of_pool(directory.path()) == reference(num_steps));
  CHECK(Reader(directory.path()).verify().empty());
}

// What a row with damage does to whoever reads it.
void check_noticed(const std::string& directory, std::uint64_t row) {
  const auto problems = Reader(directory).verify();
  CHECK(problems.size() == 1);
  CHECK(problems.front().find("row " + std::to_string(row) + " of table 'a'") != std::string::npos);
  CHECK(problems.front().find("table-0000.weights at offset " + std::to_string(row * 32)) != std::string::npos);
  CHECK(kind_thrown_by([&] { rows_of_pool(directory); }) == ErrorKind::corrupted);
  for (const bool ahead : {false, true}) {
    const TemporaryDirectory copy;
    std::filesystem::copy(directory, copy.path(), std::filesystem::copy_options::recursive);
    Run run(copy.path(), {});
    CHECK(kind_thrown_by([&] {
            for (int step = 0; step < 3; ++step) run.step(ahead);
          }) == ErrorKind::corrupted);
    CHECK(run.pool.step() == num_steps + 1);
    run.pool.flush();  // what was committed stands, and the pool has not failed
  }
}

void no_bit_of_a_row_flips_unnoticed() {
  const TemporaryDirectory directory;
  make_trained_pool(directory.path(), num_steps);
  const std::uint64_t row = row_of_the_step_after_next(directory.path());
  struct Damage {
    const char* file;
    std::uint64_t byte;
    unsigned bit;
  };
  const Damage damages[] = {
      {"weights", row * 32, 0},  {"weights", row * 32 + 31, 7},
      {"state", row * 4 + 2, 3}, {"touched", row / 8, static_cast<unsigned>(row % 8)},
      {"checksums", row * 4, 5},
  };
  for (const Damage& damage : damages) {
    check::context = std::string("bit ") + std::to_string(damage.bit) + " of byte " + std::to_string(damage.byte) +
                     " of " + damage.file;
    flip(table_file(directory.path(), damage.file), damage.byte, damage.bit);
    check_noticed(directory.path(), row);
    flip(table_file(directory.path(), damage.file), damage.byte, damage.bit);
  }
  check::context = {};
  CHECK(Reader(directory.path()).verify().empty());
}

void another_rows_bytes_are_noticed_even_with_their_checksum() {
  const TemporaryDirectory directory;
  make_trained_pool(directory.path(), num_steps);
  const auto rows = Reader(directory.path()).touched_rows(0, 0, 2);
  const auto move = [&](const char* what, std::size_t bytes) {
    std::fstream file(table_file(directory.path(), what), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> from(bytes);
    file.seekg(static_cast<std::streamoff>(rows[0] * bytes));
    file.read(from.data(), static_cast<std::streamsize>(bytes));
    file.seekp(static_cast<std::streamoff>(rows[1] * bytes));
    file.write(from.data(), static_cast<std::streamsize>(bytes));
  };
  move("weights", 32);
  move("state", 4);
  move("checksums", 4);
  const auto problems = Reader(directory.path()).verify();
  CHECK(problems.size() == 1);
  CHECK(problems.front().find("row " + std::to_string(rows[1])) != std::string::npos);
}

void imported_rows_have_checksums_and_what_lies_around_them_has_none() {
  const TemporaryDirectory directory;
  make_pool(directory.path(), log_bytes, format::Store::in_place, {.row_checksums = true});
  {
    Run run(directory.path(), {});
    const std::vector<float> weights(3 * 8, 0.5f);
    run.pool.import_rows(0, 20, std::as_bytes(std::span(weights)), {});
    run.pool.close();
  }
  CHECK(Reader(directory.path()).verify().empty());
  flip(table_file(directory.path(), "checksums"), 19 * 4, 0);  // of a row that nothing ever wrote
  CHECK(Reader(directory.path()).verify().size() == 1);
}

void the_file_of_checksums_must_be_there() {
  const TemporaryDirectory directory;
  make_trained_pool(directory.path(), 1);
  std::filesystem::resize_file(table_file(directory.path(), "checksums"), 16);
  CHECK(kind_thrown_by([&] { Run(directory.path(), {}); }) == ErrorKind::corrupted);
  std::filesystem::remove(table_file(directory.path(), "checksums"));
  CHECK(kind_thrown_by([&] { Run(directory.path(), {}); }) == ErrorKind::corrupted);
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  checksums_change_no_row();
  no_bit_of_a_row_flips_unnoticed();
  another_rows_bytes_are_noticed_even_with_their_checksum();
  imported_rows_have_checksums_and_what_lies_around_them_has_none();
  the_file_of_checksums_must_be_there();
  return check::passed();
}

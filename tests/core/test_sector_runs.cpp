// Sector runs: what lies close together is read and written at once, and little is written that nobody changed.
#include <cstddef>
#include <initializer_list>
#include <utility>
#include <vector>

#include "check.h"
#include "log_store/sector_runs.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

constexpr std::size_t block = format::block_bytes;
constexpr RunShape at_home{.read_gap_bytes = read_gap_bytes,
                           .write_gap_bytes = write_gap_bytes,
                           .least_before_write_gap = least_before_write_gap,
                           .unit_bytes = block};

using Ranges = std::vector<std::pair<std::size_t, std::size_t>>;  // first block, blocks

template <class Pieces>
Ranges ranges_of(const Pieces& pieces) {
  Ranges ranges;
  for (const auto& piece : pieces) ranges.emplace_back(piece.offset / block, piece.bytes / block);
  return ranges;
}

// Where rows in these blocks are read and written.
struct Gathered {
  Ranges reads;
  Ranges writes;
};

Gathered gathered(std::initializer_list<std::size_t> blocks) {
  const TemporaryDirectory directory;
  BlockFile::create(directory.path() + "/home", 64 * block);
  const BlockFile file(directory.path() + "/home", Caching::buffered);
  const SectorBuffer buffer(64 * block);
  SectorRuns runs(buffer, at_home);
  std::size_t written = 0;
  for (const std::size_t number : blocks) CHECK(runs.place(file, number * block + 272, 272) != nullptr);
  for (const BlockWrite& write : runs.writes()) written += write.bytes;
  CHECK(runs.written_bytes() == written);
  return {ranges_of(runs.reads()), ranges_of(runs.writes())};
}

void blocks_by_themselves_are_written_alone_and_read_with_what_is_between() {
  const Gathered runs = gathered({1, 3, 6, 8});
  CHECK((runs.reads == Ranges{{1, 8}}));
  CHECK((runs.writes == Ranges{{1, 1}, {3, 1}, {6, 1}, {8, 1}}));
}

void a_block_between_many_and_the_next_is_written_with_them() {
  CHECK((gathered({1, 2, 3, 4, 6, 8}).writes == Ranges{{1, 8}}));
  CHECK((gathered({1, 2, 3, 5, 6}).writes == Ranges{{1, 3}, {5, 2}}));
}

void two_blocks_between_are_read_and_not_written() {
  const Gathered runs = gathered({1, 2, 3, 4, 7});
  CHECK((runs.reads == Ranges{{1, 7}}));
  CHECK((runs.writes == Ranges{{1, 4}, {7, 1}}));
}

void three_blocks_between_are_not_read() { CHECK((gathered({1, 2, 3, 7}).reads == Ranges{{1, 3}, {7, 1}})); }

}  // namespace
}  // namespace holdfast

int main() {
  holdfast::blocks_by_themselves_are_written_alone_and_read_with_what_is_between();
  holdfast::a_block_between_many_and_the_next_is_written_with_them();
  holdfast::two_blocks_between_are_read_and_not_written();
  holdfast::three_blocks_between_are_not_read();
  return check::passed();
}

// Huge pages: tables in memory lie in them as far as nearly all of their small pages are there, whoever reads and writes
// meanwhile; what nobody has touched takes no memory.
#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "in_place/huge_pages.h"
#include "temporary_directory.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t small = format::block_bytes;
constexpr std::size_t small_in_huge = huge_page_bytes / small;

bool comes_true(const std::function<bool()>& holds) {
  for (const auto began = Clock::now(); Clock::now() - began < std::chrono::seconds(20);) {
    if (holds()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  return false;
}

// Of the mapping that has this address, in bytes.
std::size_t in_huge_pages(const std::byte* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_here = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2 && line.find('-') < line.find(' ')) {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      is_here = begin <= at && at < end;
    }
    std::size_t found = 0;
    if (is_here && std::sscanf(line.c_str(), "ShmemPmdMapped: %zu kB", &found) == 1) return found << 10;
  }
  return 0;
}

std::size_t bytes_on_medium(const File& file) {
  struct stat status{};
  CHECK(::stat(file.name().c_str(), &status) == 0);
  return static_cast<std::size_t>(status.st_blocks) * 512;
}

std::uint64_t pattern(std::size_t word) { return word * 0x9e3779b97f4a7c15ULL + 1; }

void fill(File& file, AllocatedPages& pages, std::size_t first, std::size_t count) {
  pages.ensure(first * small, count * small);
  auto* words = reinterpret_cast<std::uint64_t*>(file.data());
  for (std::size_t i = first * small / 8; i < (first + count) * small / 8; ++i) words[i] = pattern(i);
}

void check_filled(const File& file, std::size_t first, std::size_t count) {
  const auto* words = reinterpret_cast<const std::uint64_t*>(file.data());
  for (std::size_t i = first * small / 8; i < (first + count) * small / 8; ++i) CHECK(words[i] == pattern(i));
}

std::unique_ptr<File> open_file(const TemporaryDirectory& directory, const std::string& name, std::size_t num_small) {
  const auto medium = open_mapped_medium(directory.path());
  if (medium->exists(name)) return medium->open(name, true, Access::random);
  return medium->create(name, num_small * small, Access::random);
}

bool kernel_can(const TemporaryDirectory& directory) {
  const auto file = open_file(directory, "tried", small_in_huge);
  std::memset(file->data(), 1, huge_page_bytes);
  const bool can = file->may_lie_in_huge_pages() && file->move_to_huge_page(0) != File::Moved::no;
  if (!can) std::printf("this kernel moves no pages: what is tried is that nothing else changes\n");
  return can;
}

void what_is_nearly_all_there_is_moved_and_the_rest_takes_no_memory(const TemporaryDirectory& directory, bool can) {
  const std::size_t enough = small_in_huge - small_in_huge / 8;
  const std::size_t num_small = 5 * small_in_huge + 100;
  const auto file = open_file(directory, "sparse", num_small);
  AllocatedPages pages(*file, num_small);
  fill(*file, pages, 0, small_in_huge);
  fill(*file, pages, 2 * small_in_huge, enough - 1);
  fill(*file, pages, 3 * small_in_huge, enough);
  fill(*file, pages, 5 * small_in_huge, 100);  // less than a huge page, at the end
  const std::size_t before = bytes_on_medium(*file);
  CHECK(before == (small_in_huge + 2 * enough - 1 + 100) * small);
  const HugePages moving({{file.get(), &pages}});
  if (can) CHECK(comes_true([&] { return in_huge_pages(file->data()) == 2 * huge_page_bytes; }));
  CHECK(bytes_on_medium(*file) == before + (can ? small_in_huge - enough : 0) * small);
  fill(*file, pages, 2 * small_in_huge + enough - 1, 1);  // while it goes on
  if (can) CHECK(comes_true([&] { return in_huge_pages(file->data()) == 3 * huge_page_bytes; }));
  check_filled(*file, 0, small_in_huge);
  check_filled(*file, 2 * small_in_huge, enough);
  check_filled(*file, 3 * small_in_huge, enough);
  check_filled(*file, 5 * small_in_huge, 100);
  for (std::size_t i = 0; i < huge_page_bytes; ++i) CHECK(file->data()[huge_page_bytes + i] == std::byte{});
}

void what_an_earlier_life_wrote_is_known(const TemporaryDirectory& directory, bool can) {
  const std::size_t num_small = 3 * small_in_huge;
  {
    const auto file = open_file(directory, "again", num_small);
    AllocatedPages pages(*file, num_small);
    fill(*file, pages, 0, num_small);
  }
  const auto file = open_file(directory, "again", num_small);
  AllocatedPages pages(*file, num_small);
  CHECK(!pages.complete());
  const HugePages moving({{file.get(), &pages}});
  CHECK(comes_true([&] { return pages.complete(); }));
  if (can) CHECK(comes_true([&] { return in_huge_pages(file->data()) == 3 * huge_page_bytes; }));
  check_filled(*file, 0, num_small);
}

void pieces_are_moved_where_they_begin_at_huge_pages(const TemporaryDirectory& directory, bool can) {
  const auto medium = open_mapped_medium(directory.path());
  const std::size_t piece_bytes = 2 * huge_page_bytes;
  for (const char* name : {"first", "second", "third"}) medium->create(name, piece_bytes, Access::random);
  const std::vector<JoinedPiece> pieces = {{"first", 0, piece_bytes, piece_bytes},
                                           {"second", 3 * huge_page_bytes, piece_bytes, piece_bytes},
                                           {"third", 6 * huge_page_bytes + small, piece_bytes, piece_bytes}};
  const auto file = medium->open_joined(pieces, 9 * huge_page_bytes, true, Access::random);
  const std::size_t num_small = pieces.size() * piece_bytes / small;
  AllocatedPages pages(*file, num_small);
  for (const JoinedPiece& piece : pieces) fill(*file, pages, piece.offset / small, piece.bytes / small);
  AllocatedPages learnt(*file, num_small);
  const HugePages moving({{file.get(), &learnt}});
  CHECK(comes_true([&] { return learnt.complete(); }));
  for (const std::size_t at : {std::size_t{0}, 3 * huge_page_bytes}) {
    if (can) CHECK(comes_true([&] { return in_huge_pages(file->data() + at) == piece_bytes; }));
  }
  CHECK(in_huge_pages(file->data() + pieces.back().offset) == 0);
  for (const JoinedPiece& piece : pieces) check_filled(*file, piece.offset / small, piece.bytes / small);
}

void a_range_over_several_pieces_is_allocated_in_all_of_them(const TemporaryDirectory& directory) {
  const auto medium = open_mapped_medium(directory.path());
  for (const char* name : {"a", "b", "c"}) medium->create(name, 3 * small, Access::random);
  const auto file = medium->open_joined({{"a", 0, 3 * small, 3 * small},
                                         {"b", 3 * small, 3 * small, 3 * small},
                                         {"c", 6 * small, 2 * small + 8, 3 * small}},
                                        8 * small + 8, true, Access::random);
  AllocatedPages pages(*file, 9);
  pages.ensure(2 * small, 6 * small + 8);
  struct stat status{};
  for (const auto& [name, num_pages] : {std::pair{"a", 1}, {"b", 3}, {"c", 3}}) {
    CHECK(::stat((directory.path() + "/" + name).c_str(), &status) == 0);
    CHECK(static_cast<std::size_t>(status.st_blocks) * 512 == static_cast<std::size_t>(num_pages) * small);
  }
}

void what_is_allocated_in_one_piece_has_huge_pages_at_once(const TemporaryDirectory& directory, bool can) {
  const std::size_t num_small = 5 * small_in_huge;
  const auto file = open_file(directory, "written", num_small);
  AllocatedPages pages(*file, num_small);
  fill(*file, pages, 2 * small_in_huge + 7, 1);  // somebody has begun with the third
  const std::size_t from = huge_page_bytes - small;
  pages.ensure(from, file->size() - from - small);  // of the second and the fourth all
  CHECK(in_huge_pages(file->data()) == (can ? 2 : 0) * huge_page_bytes);
  CHECK(bytes_on_medium(*file) == file->size() - from - small);
  check_filled(*file, 2 * small_in_huge + 7, 1);
  fill(*file, pages, 0, num_small);
  check_filled(*file, 0, num_small);
  CHECK(bytes_on_medium(*file) == file->size() && pages.complete());
}

void no_store_is_lost_meanwhile(const TemporaryDirectory& directory, std::uint64_t seed, bool can) {
  constexpr std::size_t num_huge = 6;
  constexpr std::size_t num_threads = 3;
  const auto file = open_file(directory, "busy", num_huge * small_in_huge);
  AllocatedPages pages(*file, num_huge * small_in_huge);
  pages.ensure(0, file->size());
  auto* words = reinterpret_cast<std::uint64_t*>(file->data());
  std::atomic<bool> is_over = false;
  std::vector<std::vector<std::uint64_t>> stored(num_threads);
  std::vector<std::thread> threads;
  for (std::size_t t = 0; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 draw(seed + t);
      std::vector<std::uint64_t> mine(file->size() / 8 / num_threads);  // words of its own, on every page
      for (std::uint64_t number = 1; !is_over.load(std::memory_order_relaxed); ++number) {
        const std::size_t i = draw() % mine.size();
        CHECK(words[i * num_threads + t] == mine[i]);
        words[i * num_threads + t] = mine[i] = number;
      }
      stored[t] = std::move(mine);
    });
  }
  {
    const HugePages moving({{file.get(), &pages}});
    if (can) CHECK(comes_true([&] { return in_huge_pages(file->data()) == num_huge * huge_page_bytes; }));
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  for (std::size_t t = 0; t < num_threads; ++t) {
    for (std::size_t i = 0; i < stored[t].size(); ++i) CHECK(words[i * num_threads + t] == stored[t][i]);
  }
}

void it_ends_when_it_is_told_to(const TemporaryDirectory& directory) {
  const std::size_t num_small = 64 * small_in_huge;
  const auto file = open_file(directory, "ends", num_small);
  AllocatedPages pages(*file, num_small);
  pages.ensure(0, file->size());
  const auto began = Clock::now();
  for (int i = 0; i < 5; ++i) const HugePages moving({{file.get(), &pages}});
  CHECK(Clock::now() - began < std::chrono::seconds(5));
}

void what_is_small_or_on_a_disk_is_left_alone(const TemporaryDirectory& directory) {
  const auto little = open_file(directory, "little", small_in_huge - 1);
  CHECK(little->size() < huge_page_bytes);
  AllocatedPages pages_of_little(*little, small_in_huge - 1);
  const HugePages of_little({{little.get(), &pages_of_little}});
  const TemporaryDirectory on_disk(TemporaryDirectory::Place::disk);
  const auto file = open_file(on_disk, "file", small_in_huge);
  struct stat there{};
  struct stat memory{};
  CHECK(::stat(on_disk.path().c_str(), &there) == 0 && ::stat(directory.path().c_str(), &memory) == 0);
  if (there.st_dev != memory.st_dev) CHECK(!file->may_lie_in_huge_pages());
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  const std::uint64_t seed = check::seed_from(argc, argv);
  const TemporaryDirectory directory;
  const bool can = holdfast::kernel_can(directory);
  holdfast::what_is_nearly_all_there_is_moved_and_the_rest_takes_no_memory(directory, can);
  holdfast::what_an_earlier_life_wrote_is_known(directory, can);
  holdfast::pieces_are_moved_where_they_begin_at_huge_pages(directory, can);
  holdfast::a_range_over_several_pieces_is_allocated_in_all_of_them(directory);
  holdfast::what_is_allocated_in_one_piece_has_huge_pages_at_once(directory, can);
  holdfast::no_store_is_lost_meanwhile(directory, seed, can);
  holdfast::it_ends_when_it_is_told_to(directory);
  holdfast::what_is_small_or_on_a_disk_is_left_alone(directory);
  return check::passed();
}

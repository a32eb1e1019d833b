// What the addresses of homes cost whose rows lie by first touch. Usage: addresses_bench DIRECTORY [rows of a home] [homes]
// [touched, of a thousand]
//
// Rows are given addresses in random order, as a first pass over a data set gives them, by portions of 65,536. Then all
// homes are read as opening reads them, which is as fast as the larger of two: what the disk takes for five bytes a row, and
// what the processor takes. Then rows are looked for at random.
#include <malloc.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "layout/label.h"
#include "log_store/home.h"

namespace holdfast {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t portion_rows = 65536;
constexpr std::uint64_t num_searches = 4000000;

double seconds_since(Clock::time_point began) { return std::chrono::duration<double>(Clock::now() - began).count(); }

// A number below the power of two for each, and no two the same.
std::uint64_t mixed(std::uint64_t i, unsigned bits, std::uint64_t seed) {
  const std::uint64_t mask = (std::uint64_t{1} << bits) - 1;
  for (int round = 0; round < 3; ++round) {
    i = (i * 0x9e3779b97f4a7c15 + seed) & mask;
    i ^= i >> (bits / 2);
  }
  return i;
}

std::vector<std::uint64_t> rows_in_random_order(std::uint64_t num_rows, std::uint64_t count, std::uint64_t seed) {
  unsigned bits = 1;
  while (std::uint64_t{1} << bits < num_rows) ++bits;
  std::vector<std::uint64_t> rows;
  rows.reserve(count);
  for (std::uint64_t i = 0; rows.size() < count; ++i) {
    if (const std::uint64_t row = mixed(i, bits, seed); row < num_rows) rows.push_back(row);
  }
  return rows;
}

std::size_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::size_t size;
  std::size_t resident;
  file >> size >> resident;
  return resident * 4096;
}

RowTable table_of(std::uint64_t num_rows) {
  RowTable table{{64, RowDtype::f32, RowOptimizer::rowwise_adagrad, 1, 1, 0, -0.1f, 0.1f}, num_rows};
  table.home_order = HomeOrder::by_first_touch;
  return table;
}

std::vector<std::unique_ptr<HomeAddresses>> open(const std::string& directory, std::uint64_t num_rows,
                                                 std::size_t num_homes, BlockQueue& queue) {
  std::vector<std::unique_ptr<HomeAddresses>> homes;
  const RowTable table = table_of(num_rows);
  for (std::size_t i = 0; i < num_homes; ++i) {
    Home home = open_home(directory, table, i, table.owned_pieces().front(), Caching::direct, nullptr,
                          Opening::read_write, queue);
    homes.push_back(std::move(home.addresses));
  }
  return homes;
}

void measure(const std::string& directory, std::uint64_t num_rows, std::size_t num_homes, double share) {
  const auto count = static_cast<std::uint64_t>(share * static_cast<double>(num_rows));
  const double all = static_cast<double>(count) * static_cast<double>(num_homes);
  std::filesystem::remove_all(directory);
  std::filesystem::create_directories(directory);
  BlockQueue queue;
  {
    const RowTable table = table_of(num_rows);
    for (std::size_t i = 0; i < num_homes; ++i) create_home(directory, table, i, table.owned_pieces().front());
    std::mutex finders;
    Clock::duration adding{};
    for (std::size_t i = 0; i < num_homes; ++i) {  // one in memory at a time
      Home home = open_home(directory, table, i, table.owned_pieces().front(), Caching::direct, nullptr,
                            Opening::read_write, queue);
      const std::vector<std::uint64_t> rows = rows_in_random_order(num_rows, count, i);
      const auto began = Clock::now();
      for (std::size_t done = 0; done < rows.size(); done += portion_rows) {
        home.addresses->add(std::span(rows).subspan(done, std::min(portion_rows, rows.size() - done)), finders);
      }
      adding += Clock::now() - began;
      home.addresses->sync();
    }
    std::printf("%.1f%% of %zu homes of %.1f M rows, %.2f M in all: add %.0f ns a row", 100 * share, num_homes,
                static_cast<double>(num_rows) / 1e6, all / 1e6,
                std::chrono::duration<double>(adding).count() / all * 1e9);
  }
  ::malloc_trim(0);
  const std::size_t resident = resident_bytes();
  const auto homes = open(directory, num_rows, num_homes, queue);
  std::vector<HomeAddresses*> to_read;
  for (const auto& home : homes) to_read.push_back(home.get());
  const auto began = Clock::now();
  HomeAddresses::read_all(to_read, count * num_homes);
  const double loading = seconds_since(began);
  ::malloc_trim(0);
  std::size_t bytes = 0;
  for (const auto& home : homes) bytes += home->memory_bytes();
  std::printf(", load %.3f s (%.1f ns a row), %.2f bytes a row (%.2f of the process)", loading, loading / all * 1e9,
              static_cast<double>(bytes) / all, static_cast<double>(resident_bytes() - resident) / all);
  const std::vector<std::uint64_t> rows = rows_in_random_order(num_rows, count, 0);
  std::uint64_t num_found = 0;
  const auto found_began = Clock::now();
  for (std::uint64_t i = 0; i < num_searches; ++i) {
    const std::uint64_t row = rows[i * 7919 % count];
    num_found += homes[i % num_homes]->find(row).has_value() ? 1 : 0;
  }
  std::printf(", find %.0f ns (%.0f%% there)\n", seconds_since(found_began) / num_searches * 1e9,
              100.0 * static_cast<double>(num_found) / num_searches);
  std::fflush(stdout);
  std::filesystem::remove_all(directory);
}

// Blocks of the disk, as many as there are of addresses, in requests like theirs.
void measure_disk(const std::string& directory) {
  constexpr std::size_t bytes = std::size_t{1} << 30;
  std::filesystem::create_directories(directory);
  const std::string path = directory + "/disk";
  BlockQueue queue;
  create_labelled_blocks(path, bytes, {}, {format::FileKind::row_log});
  {
    BlockFile file(path, Caching::direct);
    const SectorBuffer buffer(std::size_t{8} << 20);
    std::fill_n(reinterpret_cast<std::uint8_t*>(buffer.data()), buffer.size(), std::uint8_t{1});
    for (std::size_t done = 0; done < bytes; done += buffer.size())
      queue.write_range(file, done, buffer.size(), buffer.data());
    file.sync();
    const auto began = Clock::now();
    for (std::size_t done = 0; done < bytes; done += buffer.size())
      queue.read_range(file, done, buffer.size(), buffer.data());
    std::printf("the disk: %.2f GB/s\n", bytes / seconds_since(began) / 1e9);
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  if (argc < 2)
    return std::fprintf(stderr, "usage: addresses_bench DIRECTORY [rows] [homes] [touched, of 1000]...\n"), 2;
  const std::string directory = std::string(argv[1]) + "/addresses_bench";
  const std::uint64_t num_rows = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 20000000;
  const std::size_t num_homes = argc > 3 ? std::strtoull(argv[3], nullptr, 10) : 20;
  holdfast::measure_disk(directory);
  if (argc <= 4) {
    for (const double share : {0.001, 0.016, 0.1, 0.5, 1.0}) holdfast::measure(directory, num_rows, num_homes, share);
  }
  for (int i = 4; i < argc; ++i) holdfast::measure(directory, num_rows, num_homes, std::atof(argv[i]) / 1000);
  return 0;
}

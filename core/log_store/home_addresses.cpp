#include "log_store/home_addresses.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/format.h"
#include "base/native_thread.h"
#include "base/parallel.h"
#include "log_store/numbered_checksum.h"

namespace holdfast {
namespace {

using format::block_bytes;
using format::HomeAddressesHeader;
using format::sector_bytes;

constexpr std::uint64_t rows_offset = block_bytes;  // of the file, behind the header's block
constexpr std::size_t row_bytes = 5;
constexpr std::size_t sector_rows = (sector_bytes - sizeof(std::uint32_t)) / row_bytes;
constexpr std::size_t checksum_offset = sector_bytes - sizeof(std::uint32_t);
constexpr std::size_t block_rows = block_bytes / sector_bytes * sector_rows;
constexpr std::uint64_t blocks_at_once = 2048;  // written or read
constexpr std::uint64_t blocks_loaded_at_once = 512;  // by one of several threads

std::uint64_t blocks_for(std::uint64_t count) { return (count + block_rows - 1) / block_rows; }

std::uint32_t checksum_of(const std::byte* sector, std::uint64_t number, std::uint32_t seed) {
  return numbered_checksum(sector, checksum_offset, number, seed);
}

bool holds(const std::byte* sector, std::uint64_t number, std::uint32_t seed) {
  std::uint32_t checksum;
  std::memcpy(&checksum, sector + checksum_offset, sizeof(checksum));
  return checksum == checksum_of(sector, number, seed);
}

// Sector `number` of the rows', with `count` of them.
void pack(const std::uint64_t* rows, std::size_t count, std::uint64_t number, std::uint32_t seed, std::byte* sector) {
  std::memset(sector, 0, sector_bytes);
  for (std::size_t i = 0; i < count; ++i) std::memcpy(sector + i * row_bytes, rows + i, row_bytes);
  const std::uint32_t checksum = checksum_of(sector, number, seed);
  std::memcpy(sector + checksum_offset, &checksum, sizeof(checksum));
}

std::uint32_t seed_of(const FileRole& role, std::uint32_t pool_seed) {
  const std::array<std::uint32_t, 2> file = {role.table, role.shard};
  return crc32c(pool_seed, reinterpret_cast<const std::byte*>(file.data()), sizeof(file));
}

}  // namespace

std::uint64_t HomeAddresses::file_bytes(std::uint64_t num_rows) {
  return rows_offset + blocks_for(num_rows) * block_bytes;
}

HomeAddresses::HomeAddresses(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint64_t num_rows,
                             const FileRole& role, std::uint32_t seed)
    : file_(std::move(file)),
      queue_(queue),
      num_rows_(num_rows),
      pool_seed_(seed),
      own_seed_(seed_of(role, seed)),
      map_(num_rows) {}

std::uint64_t HomeAddresses::read_count() const { return read_header().count; }

format::HomeAddressesHeader HomeAddresses::read_header() const {
  const SectorBuffer block(block_bytes);
  queue_.read_range(*file_, 0, block_bytes, block.data());
  HomeAddressesHeader header;
  std::memcpy(&header, block.data(), sizeof(header));
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  if (std::all_of(bytes, bytes + sizeof(header), [](std::byte b) { return b == std::byte{0}; })) {
    header.own_seed = 1;
    return header;
  }
  if (header.magic != format::home_addresses_magic || header.own_seed > 1 ||
      header.crc != crc_of(header, seed(header.own_seed == 1))) {
    throw Error(ErrorKind::corrupted,
                file_->place(0) + ": the header of a home's addresses does not hold its checksum");
  }
  if (header.count > std::min(num_rows_, AddressMap::most_addresses)) {
    throw Error(ErrorKind::corrupted, file_->place(0) + ": " + std::to_string(header.count) +
                                          " rows have addresses, of " + std::to_string(num_rows_));
  }
  return header;
}

// Some threads wait for the device while others compute. Where there are as many homes, each thread reads its own.
void HomeAddresses::read_all(std::span<HomeAddresses* const> homes, std::uint64_t num_rows) {
  constexpr std::uint64_t rows_worth_threads = 1 << 18;
  const std::size_t most_threads = num_rows < rows_worth_threads ? 1 : 2 * static_cast<std::size_t>(num_threads());
  const std::size_t num_outside = homes.size() < most_threads ? 1 : most_threads;
  std::atomic<std::size_t> next{0};
  in_threads(num_outside, "hf-addresses", [&](std::size_t) {
    AddressMap::Loading::Memory memory(most_threads / num_outside);
    for (std::size_t i = next++; i < homes.size(); i = next++) homes[i]->read(memory);
  });
}

void HomeAddresses::read(AddressMap::Loading::Memory& memory) {
  constexpr auto moment = std::chrono::milliseconds(1);
  constexpr int turns = 20;
  for (int turn = 1;; ++turn) {
    try {
      const HomeAddressesHeader header = read_header();
      has_own_seed_ = header.own_seed == 1;
      load(header.count, memory);
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupted || turn == turns) throw;
      std::this_thread::sleep_for(moment);
    }
  }
}

void HomeAddresses::load(std::uint64_t count, AddressMap::Loading::Memory& memory) {
  const std::uint64_t end_block = blocks_for(count);
  const std::size_t some = std::min(end_block, blocks_loaded_at_once);
  AddressMap::Loading loading(map_, count, memory);
  std::atomic<std::uint64_t> next_block{0};
  in_threads(memory.size(), "hf-addresses", [&](std::size_t part) {
    const SectorBuffer buffer(some * block_bytes);
    for (;;) {
      const std::uint64_t block = next_block.fetch_add(some);
      if (block >= end_block) return;
      visit_sectors(
          block, std::min<std::uint64_t>(some, end_block - block), 0, count, buffer,
          [&](std::uint64_t address, std::span<const std::uint64_t> rows) { loading.put(part, rows, address); });
    }
  });
  if (const auto twice = loading.finish()) {
    throw Error(ErrorKind::corrupted, file_->name() + ": row " + std::to_string(*twice) + " has two addresses");
  }
  durable_count_ = count;
  unwritten_ = rows_at(count / block_rows * block_rows, count % block_rows);
}

// What the sectors of these blocks say of addresses [first, end): of each sector the first of its addresses, and the rows.
template <class Visit>
void HomeAddresses::visit_sectors(std::uint64_t first_block, std::uint64_t num_blocks, std::uint64_t first,
                                  std::uint64_t end, const SectorBuffer& buffer, const Visit& visit) const {
  queue_.read_range(*file_, rows_offset + first_block * block_bytes, num_blocks * block_bytes, buffer.data());
  const std::uint64_t first_sector = first_block * (block_bytes / sector_bytes);
  for (std::uint64_t i = 0; i < num_blocks * (block_bytes / sector_bytes); ++i) {
    const std::uint64_t address = (first_sector + i) * sector_rows;  // of its first row
    if (address + sector_rows <= first || address >= end) continue;
    const std::byte* sector = buffer.data() + i * sector_bytes;
    const auto place = [&] { return file_->place(rows_offset + (first_sector + i) * sector_bytes); };
    if (!holds(sector, first_sector + i, seed(has_own_seed_))) {
      throw Error(ErrorKind::corrupted, place() + ": addresses of rows do not hold their checksum");
    }
    std::array<std::uint64_t, sector_rows> rows;
    std::uint64_t last_row = 0;
    const std::size_t begin_row = std::max(first, address) - address;
    const std::size_t end_row = std::min(end, address + sector_rows) - address;
    for (std::size_t r = begin_row; r < end_row; ++r) {
      std::uint64_t row;  // the sector has more bytes behind its last row's
      std::memcpy(&row, sector + r * row_bytes, sizeof(row));
      rows[r] = row & ((std::uint64_t{1} << 8 * row_bytes) - 1);
      last_row = std::max(last_row, rows[r]);
    }
    if (last_row >= num_rows_) {
      throw Error(ErrorKind::corrupted,
                  place() + ": row " + std::to_string(last_row) + " of a home of " + std::to_string(num_rows_));
    }
    visit(address + begin_row, std::span(rows).subspan(begin_row, end_row - begin_row));
  }
}

std::vector<std::uint64_t> HomeAddresses::rows_at(std::uint64_t first, std::uint64_t count) const {
  std::vector<std::uint64_t> rows;
  if (count == 0) return rows;
  rows.reserve(count);
  const std::uint64_t end_block = blocks_for(first + count);
  const SectorBuffer buffer(std::min(end_block - first / block_rows, blocks_at_once) * block_bytes);
  for (std::uint64_t block = first / block_rows; block < end_block; block += blocks_at_once) {
    visit_sectors(block, std::min(end_block - block, blocks_at_once), first, first + count, buffer,
                  [&](std::uint64_t, std::span<const std::uint64_t> of_sector) {
                    rows.insert(rows.end(), of_sector.begin(), of_sector.end());
                  });
  }
  return rows;
}

// Chapters of the map are made anew beside those that there are: so many rows at once that these do not take too much memory.
std::uint64_t HomeAddresses::add(std::span<const std::uint64_t> rows, std::mutex& finders) {
  constexpr std::size_t most_bytes = std::size_t{256} << 20;
  if (rows.size() > AddressMap::most_addresses - map_.size()) {
    throw Error(ErrorKind::full, file_->name() + ": a home has room for 2^32 - 1 rows; more shards give more homes");
  }
  const std::uint64_t first = map_.size();
  for (std::size_t done = 0; done < rows.size();) {
    const std::size_t at_once = map_.memory_bytes() <= most_bytes ? rows.size() : most_bytes / map_.chapter_bytes();
    const auto some = rows.subspan(done, std::min(at_once, rows.size() - done));
    AddressMap::Additions additions = map_.prepare(some);
    unwritten_.insert(unwritten_.end(), some.begin(), some.end());
    const std::lock_guard lock(finders);
    map_.add(additions);
    done += some.size();
  }
  return first;
}

void HomeAddresses::sync() {
  if (durable_count_ == map_.size()) return;
  const std::uint64_t first_block = durable_count_ / block_rows;
  const std::uint64_t num_blocks = blocks_for(unwritten_.size());
  const SectorBuffer buffer(std::min(num_blocks, blocks_at_once) * block_bytes);
  for (std::uint64_t done = 0; done < num_blocks;) {
    const std::uint64_t some = std::min(num_blocks - done, blocks_at_once);
    for (std::uint64_t i = 0; i < some * (block_bytes / sector_bytes); ++i) {
      const std::uint64_t number = done * (block_bytes / sector_bytes) + i;  // of the sectors that are written
      const std::uint64_t first = std::min<std::uint64_t>(number * sector_rows, unwritten_.size());
      const std::uint64_t count = std::min<std::uint64_t>(sector_rows, unwritten_.size() - first);
      pack(unwritten_.data() + first, count, first_block * (block_bytes / sector_bytes) + number, seed(has_own_seed_),
           buffer.data() + i * sector_bytes);
    }
    queue_.write_range(*file_, rows_offset + (first_block + done) * block_bytes, some * block_bytes, buffer.data());
    done += some;
  }
  file_->sync();
  write_header(map_.size());
  durable_count_ = map_.size();
  unwritten_.erase(unwritten_.begin(), unwritten_.end() - static_cast<std::ptrdiff_t>(durable_count_ % block_rows));
}

void HomeAddresses::write_header_again() {
  if (durable_count_ != 0) write_header(durable_count_);
}

void HomeAddresses::write_header(std::uint64_t count) {
  HomeAddressesHeader header{};
  header.magic = format::home_addresses_magic;
  header.count = count;
  header.own_seed = has_own_seed_ ? 1 : 0;
  header.crc = crc_of(header, seed(has_own_seed_));
  const SectorBuffer block(block_bytes);
  std::memcpy(block.data(), &header, sizeof(header));
  queue_.write_range(*file_, 0, file_->unit_bytes(), block.data());
  file_->sync();
}

}  // namespace holdfast

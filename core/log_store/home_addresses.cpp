#include "log_store/home_addresses.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/checksum.h"
#include "base/error.h"
#include "base/format.h"

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

std::uint64_t blocks_for(std::uint64_t count) { return (count + block_rows - 1) / block_rows; }

std::uint32_t checksum_of(const std::byte* sector, std::uint64_t number, std::uint32_t seed) {
  const std::uint32_t of_number = crc32c(seed, reinterpret_cast<const std::byte*>(&number), sizeof(number));
  return crc32c(of_number, sector, checksum_offset);
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

}  // namespace

std::uint64_t HomeAddresses::file_bytes(std::uint64_t num_rows) {
  return rows_offset + blocks_for(num_rows) * block_bytes;
}

HomeAddresses::HomeAddresses(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint64_t num_rows,
                             std::uint32_t seed)
    : file_(std::move(file)), queue_(queue), num_rows_(num_rows), seed_(seed), map_(num_rows) {}

std::uint64_t HomeAddresses::read_count() const {
  const SectorBuffer block(block_bytes);
  queue_.read_range(*file_, 0, block_bytes, block.data());
  HomeAddressesHeader header;
  std::memcpy(&header, block.data(), sizeof(header));
  const auto* bytes = reinterpret_cast<const std::byte*>(&header);
  if (std::all_of(bytes, bytes + sizeof(header), [](std::byte b) { return b == std::byte{0}; })) return 0;
  if (header.magic != format::home_addresses_magic || header.crc != crc_of(header, seed_)) {
    throw Error(ErrorKind::corrupted,
                file_->place(0) + ": the header of a home's addresses does not hold its checksum");
  }
  if (header.count > std::min(num_rows_, AddressMap::most_addresses)) {
    throw Error(ErrorKind::corrupted, file_->place(0) + ": " + std::to_string(header.count) +
                                          " rows have addresses, of " + std::to_string(num_rows_));
  }
  return header.count;
}

void HomeAddresses::read() {
  constexpr auto moment = std::chrono::milliseconds(1);
  constexpr int turns = 20;
  for (int turn = 1;; ++turn) {
    try {
      const std::vector<std::uint64_t> rows = rows_at(0, read_count());
      load(rows);
      return;
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corrupted || turn == turns) throw;
      std::this_thread::sleep_for(moment);
    }
  }
}

void HomeAddresses::load(std::span<const std::uint64_t> rows) {
  if (const auto twice = map_.load(rows)) {
    throw Error(ErrorKind::corrupted, file_->name() + ": row " + std::to_string(*twice) + " has two addresses");
  }
  durable_count_ = rows.size();
  unwritten_.assign(rows.end() - static_cast<std::ptrdiff_t>(rows.size() % block_rows), rows.end());
}

std::vector<std::uint64_t> HomeAddresses::rows_at(std::uint64_t first, std::uint64_t count) const {
  std::vector<std::uint64_t> rows;
  rows.reserve(count);
  const std::uint64_t first_block = first / block_rows;
  const std::uint64_t end_block = blocks_for(first + count);
  const SectorBuffer buffer(std::min(end_block - first_block, blocks_at_once) * block_bytes);
  for (std::uint64_t block = first_block; block < end_block;) {
    const std::uint64_t some = std::min(end_block - block, blocks_at_once);
    queue_.read_range(*file_, rows_offset + block * block_bytes, some * block_bytes, buffer.data());
    const std::uint64_t sectors = some * (block_bytes / sector_bytes);
    const std::uint64_t first_sector = block * (block_bytes / sector_bytes);
    for (std::uint64_t i = 0; i < sectors; ++i) {
      const std::uint64_t address = (first_sector + i) * sector_rows;  // of its first row
      if (address + sector_rows <= first || address >= first + count) continue;
      const std::byte* sector = buffer.data() + i * sector_bytes;
      if (!holds(sector, first_sector + i, seed_)) {
        throw Error(ErrorKind::corrupted, file_->place(rows_offset + (first_sector + i) * sector_bytes) +
                                              ": addresses of rows do not hold their checksum");
      }
      for (std::uint64_t a = std::max(first, address); a < std::min(first + count, address + sector_rows); ++a) {
        std::uint64_t row = 0;
        std::memcpy(&row, sector + (a - address) * row_bytes, row_bytes);
        if (row >= num_rows_) {
          throw Error(ErrorKind::corrupted, file_->place(rows_offset + (first_sector + i) * sector_bytes) + ": row " +
                                                std::to_string(row) + " of a home of " + std::to_string(num_rows_));
        }
        rows.push_back(row);
      }
    }
    block += some;
  }
  return rows;
}

std::uint64_t HomeAddresses::add(std::uint64_t row) {
  if (map_.size() == AddressMap::most_addresses) {
    throw Error(ErrorKind::full, file_->name() + ": a home has room for 2^32 - 1 rows; more shards give more homes");
  }
  unwritten_.push_back(row);
  try {
    return map_.add(row);
  } catch (...) {
    unwritten_.pop_back();
    throw;
  }
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
      pack(unwritten_.data() + first, count, first_block * (block_bytes / sector_bytes) + number, seed_,
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
  header.crc = crc_of(header, seed_);
  const SectorBuffer block(block_bytes);
  std::memcpy(block.data(), &header, sizeof(header));
  queue_.write_range(*file_, 0, file_->unit_bytes(), block.data());
  file_->sync();
}

}  // namespace holdfast

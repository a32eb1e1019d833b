#include "log_store/home_bits.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <filesystem>

#include "log_store/numbered_checksum.h"

namespace holdfast {
namespace {

constexpr std::size_t bit_bytes = format::block_bytes - sizeof(std::uint32_t);  // of a block; its checksum is behind
constexpr std::uint64_t bits_per_block = 8 * bit_bytes;
constexpr std::uint64_t blocks_at_once = 2048;  // written or read

std::uint64_t blocks_for(std::uint64_t num_rows) { return num_rows / bits_per_block + 1; }

std::uint32_t checksum_of(const std::byte* block, std::uint64_t number, std::uint32_t seed) {
  return numbered_checksum(block, bit_bytes, number, seed);
}

bool is_empty(const std::byte* block) {
  return std::all_of(block, block + format::block_bytes, [](std::byte b) { return b == std::byte{0}; });
}

bool holds(const std::byte* block, std::uint64_t number, std::uint32_t seed) {
  std::uint32_t checksum;
  std::memcpy(&checksum, block + bit_bytes, sizeof(checksum));
  return checksum == checksum_of(block, number, seed) || is_empty(block);
}

}  // namespace

void HomeBits::create(const std::string& path, std::uint64_t num_rows) {
  BlockFile::create(path, blocks_for(num_rows) * format::block_bytes);
}

std::unique_ptr<HomeBits> HomeBits::open(const std::string& path, std::uint64_t num_rows, Caching caching,
                                         BlockWatcher* watcher, BlockQueue& queue, std::uint32_t seed) {
  std::error_code unknown;
  const std::uintmax_t bytes = std::filesystem::file_size(path, unknown);
  if (unknown || bytes != blocks_for(num_rows) * format::block_bytes) return nullptr;
  std::unique_ptr<HomeBits> rows(new HomeBits(std::make_unique<BlockFile>(path, caching, watcher), queue, seed));
  rows->read();
  return rows;
}

HomeBits::HomeBits(std::unique_ptr<BlockFile> file, BlockQueue& queue, std::uint32_t seed)
    : file_(std::move(file)),
      queue_(queue),
      seed_(seed),
      blocks_(file_->size()),
      is_new_(file_->size() / format::block_bytes) {
  blocks_.keep_from_children();  // they are read into directly
}

void HomeBits::read() {
  for (std::uint64_t first = 0; first < num_blocks();) {
    first = file_->next_data(first * format::block_bytes) / format::block_bytes;
    const std::uint64_t end = std::min(first + blocks_at_once, num_blocks());
    if (first >= end) break;
    queue_.read_range(*file_, first * format::block_bytes, (end - first) * format::block_bytes, block(first));
    for (; first < end; ++first) {
      if (!holds(block(first), first, seed_)) {
        std::memset(block(first), 0xff, bit_bytes);
        is_new_[first] = true;
      }
      for (std::size_t i = 0; i < bit_bytes; ++i)
        count_ += static_cast<std::size_t>(std::popcount(std::to_integer<unsigned>(block(first)[i])));
    }
  }
}

bool HomeBits::may_have(std::uint64_t row) const {
  const std::uint64_t bit = row % bits_per_block;
  const auto byte = std::to_integer<unsigned>(block(row / bits_per_block)[bit / 8]);
  return (byte >> bit % 8 & 1) != 0;
}

void HomeBits::add(std::uint64_t row) {
  const std::uint64_t bit = row % bits_per_block;
  std::byte& byte = block(row / bits_per_block)[bit / 8];
  const std::byte added = byte | std::byte{1} << (bit % 8);
  if (added == byte) return;
  byte = added;
  ++count_;
  is_new_[row / bits_per_block] = true;
}

void HomeBits::write_again() {
  for (std::uint64_t number = 0; number < num_blocks(); ++number) {
    if (!is_empty(block(number))) is_new_[number] = true;
  }
}

void HomeBits::sync() {
  if (std::ranges::find(is_new_, true) == is_new_.end()) return;
  for (std::uint64_t first = 0; first < num_blocks(); ++first) {
    if (!is_new_[first]) continue;
    std::uint64_t end = first;
    for (; end < std::min(first + blocks_at_once, num_blocks()) && is_new_[end]; ++end) {
      const std::uint32_t checksum = checksum_of(block(end), end, seed_);
      std::memcpy(block(end) + bit_bytes, &checksum, sizeof(checksum));
    }
    queue_.write_range(*file_, first * format::block_bytes, (end - first) * format::block_bytes, block(first));
    first = end - 1;
  }
  file_->sync();
  is_new_.assign(num_blocks(), false);
}

}  // namespace holdfast

// CRC-32C (Castagnoli), by carry-less multiplication or the CRC instruction where the CPU has them, by tables
// elsewhere; the same value every way.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/format.h"

namespace holdfast {

// The checksum of the bytes that gave `crc` followed by `bytes` more; start with 0.
std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes);

// The same of several messages of one length, each of which goes on from crcs[i], side by side: a short one alone is a
// chain of instructions that wait for each other.
constexpr std::size_t checksums_at_once = 4;
using Crcs = std::array<std::uint32_t, checksums_at_once>;
using Messages = std::array<const std::byte*, checksums_at_once>;
Crcs crc32c_of_each(Crcs crcs, const Messages& messages, std::size_t bytes);

// Seals a persistent struct: its last field is the checksum of everything before it. seed: what the checksum goes on
// from, of whoever owns the struct (identity.h).
template <format::Persistent T>
std::uint32_t crc_of(const T& value, std::uint32_t seed) {
  return crc32c(seed, &value, offsetof(T, crc));
}

// The crc32c of a message whose parts become known in any order, on any thread: each is summed where it has just been
// written, while it is in that thread's caches. What no part covers counts as zeros; parts do not overlap.
class PartsChecksum {
 public:
  explicit PartsChecksum(std::size_t message_bytes, std::uint32_t seed = 0)
      : message_bytes_(message_bytes), seed_(seed) {}
  void add(std::size_t offset, const void* data, std::size_t bytes);
  std::uint32_t value() const;

 private:
  std::size_t message_bytes_;
  std::uint32_t seed_;  // that the message's checksum goes on from
  std::atomic<std::uint32_t> sum_{0};
};

// Every way that this CPU has of computing it, by name, for tests.
struct ChecksumWay {
  const char* name;
  std::uint32_t (*update)(std::uint32_t state, const unsigned char* data, std::size_t bytes);  // state = ~crc
  Crcs (*of_each)(Crcs crcs, const Messages& messages, std::size_t bytes);  // crc32c_of_each
  bool runs_here;
};
extern const ChecksumWay checksum_ways[3];  // the best first, the portable one last

}  // namespace holdfast

// Identity: whose a pool's files are. What is checksummed goes on from a seed that the pool's uuid gives, and files that
// keep bytes without checksums carry a label with the uuid itself (label.h): so a file of another pool, however alike, is
// never taken for one of this.
//
// Invariants
// - A pool's structures go on from its own seed; its rows, and the labels of their files, from that of the group that it
//   is a part of, where there is one: rows change writers, and are not rewritten.
// - Pools before version 4 have none: their checksums go on from 0, and their files have no labels.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "base/checksum.h"

namespace holdfast {

using Uuid = std::array<std::uint8_t, 16>;

class Identity {
 public:
  Identity() = default;
  explicit Identity(const Uuid& uuid) : uuid_(uuid), seed_(crc32c(0, uuid.data(), uuid.size())) {}

  std::uint32_t seed() const { return seed_; }
  const std::optional<Uuid>& uuid() const { return uuid_; }

 private:
  std::optional<Uuid> uuid_;
  std::uint32_t seed_ = 0;
};

}  // namespace holdfast

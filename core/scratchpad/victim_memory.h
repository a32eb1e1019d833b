// Victim memory: byte-addressable memory for rows that leave a scratchpad, in a file that has no name or on memory nodes.
//
// Invariants
// - All of it is there from the beginning: a medium that has no room for it says so before anything is put there.
// - Nothing of it outlives the process, whatever the medium.
// - A file is one of memory (of a DAX file system, or tmpfs): elsewhere each row would be read through the page cache, as
//   if from a disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/huge_array.h"
#include "media/dial.h"

namespace holdfast {

struct VictimOptions {
  std::uint64_t bytes;
  std::string directory{};  // of the file; empty: the machine's memory
  std::vector<unsigned> nodes{};  // on which that lies; none: on any
  std::optional<DialSpec> dial{};  // the memory is made as slow as this
};

class VictimMemory {
 public:
  // Throws config where the directory is none that has files of memory, or nodes cannot be had, full where there is no
  // room.
  explicit VictimMemory(const VictimOptions& options);
  ~VictimMemory();
  VictimMemory(const VictimMemory&) = delete;
  VictimMemory& operator=(const VictimMemory&) = delete;

  std::byte* data() const { return mapped_ != nullptr ? mapped_ : memory_.data(); }
  std::uint64_t bytes() const { return bytes_; }
  Dial* dial() const { return dial_.get(); }  // null: as it is

 private:
  const std::uint64_t bytes_;
  HugeArray<std::byte> memory_;
  std::byte* mapped_ = nullptr;  // of a file
  std::unique_ptr<Dial> dial_;
};

}  // namespace holdfast

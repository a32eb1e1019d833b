// Dial probe: real reads and writes of a file on a dialled medium, so that what the dial declares can be measured from
// outside. Of a mapped file through its mapping, of a block file through a block queue.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "media/block_file.h"
#include "media/block_queue.h"
#include "media/dial.h"
#include "media/medium.h"

namespace holdfast {

class DialProbe {
 public:
  enum class Kind { mapped, block };

  // Makes `name` in `directory`, of `bytes` bytes that are written once; the caller removes it.
  DialProbe(const std::string& directory, const std::string& name, std::uint64_t bytes, Kind kind,
            const DialSpec& spec);

  // What random pieces are multiples of.
  std::size_t unit_bytes() const { return blocks_ ? blocks_->unit_bytes() : 1; }

  // All bytes of the file, in long runs.
  void read_all();
  void write_all();
  void sync();
  // So many pieces at random places, as many as the medium lets be under way at a time.
  void read_at_random(std::uint64_t count, std::size_t bytes_each);
  void write_at_random(std::uint64_t count, std::size_t bytes_each);
  // The same, each begun when the one before has come.
  void read_one_by_one(std::uint64_t count, std::size_t bytes_each);

 private:
  static constexpr std::size_t piece_bytes = std::size_t{4} << 20;

  std::vector<std::uint64_t> places(std::uint64_t count, std::size_t bytes_each) const;
  std::byte* at(std::uint64_t offset) const { return mapped_->data() + offset; }

  std::shared_ptr<Dial> dial_;
  std::uint64_t bytes_;
  std::unique_ptr<Medium> medium_;
  std::unique_ptr<File> mapped_;       // of one kind
  std::unique_ptr<BlockFile> blocks_;  // of the other
  BlockQueue queue_;
  SectorBuffer buffer_;
};

}  // namespace holdfast

// File labels: a block in each of a pool's files that says which pool it is of, and which of its files it is.
//
// Invariants
// - A label is written once, when its file is made, and before the superblock names the pool.
// - It is the first block of a file that grows, and the last of one that keeps its size. Whoever uses the file sees what
//   is beside it alone: offsets and sizes are of that.
// - Opening refuses a file whose label is not this pool's, before anything else of it is believed. Files of a pool
//   without an identity have none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/format.h"
#include "base/identity.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "media/medium.h"

namespace holdfast {

// Which of a pool's files.
struct FileRole {
  format::FileKind kind = format::FileKind::log;
  std::uint32_t table = 0;
  std::uint32_t shard = 0;

  bool grows() const { return kind == format::FileKind::log; }
};

// Mapped files of `bytes` beside their labels. Opening throws corrupted; bytes: of a file that keeps its size.
std::unique_ptr<File> create_labelled(Medium& medium, const std::string& name, std::size_t bytes, Access access,
                                      const Identity& identity, const FileRole& role);
std::unique_ptr<File> open_labelled(Medium& medium, const std::string& name, bool writable, Access access,
                                    const Identity& identity, const FileRole& role,
                                    std::optional<std::size_t> bytes = std::nullopt);

// A file with a label, by its name in the pool's directory.
struct LabelledName {
  std::string name;
  FileRole role;
  Identity identity;
};

// A label that is not what it has to be: the bytes that it had, and where. They are known where what is left of it says
// that it was this one: its uuid and its place among the pool's files hold, or its checksum does.
struct DamagedLabel {
  std::uint64_t offset;
  std::optional<std::vector<std::byte>> bytes;
};
std::optional<DamagedLabel> damaged_label(const std::string& path, const Identity& identity, const FileRole& role);

// The size of a file that keeps `bytes` for good.
std::size_t labelled_bytes(std::size_t bytes, const Identity& identity);
// Of a file that is mapped together with others: throws corrupted where the label is not this one.
void check_label_of(Medium& medium, const std::string& name, const Identity& identity, const FileRole& role);

// The same of files on a block device, of whole blocks.
void create_labelled_blocks(const std::string& path, std::uint64_t bytes, const Identity& identity,
                            const FileRole& role);
void check_label_of(BlockFile& file, BlockQueue& queue, const Identity& identity, const FileRole& role);

}  // namespace holdfast

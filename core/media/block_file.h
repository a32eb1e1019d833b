// Block files: files on a block device, read and written by sector, or by larger units where the device has them, past
// the page cache where the file system lets them.
//
// What a block device guarantees
// - A write of one 512-byte sector is atomic: after a crash the sector holds the old bytes or the new ones. Nothing
//   larger is atomic: of a longer write any subset of its sectors may have arrived, in any order.
// - A read that begins after a write returned sees it. Bytes that were never written read as zeros.
// - A write is durable once a sync that began after it returned has succeeded. After a sync that failed nothing is
//   known about the writes before it, so the file refuses everything from then on.
//
// Invariants
// - Offsets, lengths and addresses are multiples of the file's unit; others are a config error and touch nothing.
// - The unit follows the device: 512 bytes, or 4096, or what lies between; it is never taken for atomic beyond a sector.
// - Where reads_device is not said, a read may give what the page cache holds, and after a failed sync that may be nowhere
//   else: whoever rests on what an earlier life has written writes it again first.
// - A write is done in full or ends in an error that names file and offset.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/format.h"
#include "base/huge_array.h"
#include "media/dial.h"

namespace holdfast {

// Memory for direct I/O: zeros at first, whole pages, and large ones of huge pages where those can be had: the kernel pins
// memory page by page, and a page of 4096 bytes takes as long as one of 2 MiB. The child of a fork does not have it: where
// a fork shares a page with a child while the device writes to it, the child may be left with what was read, and its
// parent with a copy of what was there before.
class SectorBuffer {
 public:
  SectorBuffer() = default;
  explicit SectorBuffer(std::size_t bytes)
      : memory_(format::align_up(bytes, bytes < huge_page_bytes ? format::block_bytes : huge_page_bytes)) {
    memory_.keep_from_children();
  }
  std::byte* data() const { return memory_.data(); }
  std::size_t size() const { return memory_.size(); }

 private:
  static constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

  HugeArray<std::byte> memory_;
};

class BlockFile;

// What tests see of a file, before it happens. They may throw instead, or wait.
class BlockWatcher {
 public:
  virtual ~BlockWatcher() = default;
  virtual void before_read(const BlockFile& file) = 0;
  virtual void before_write(const BlockFile& file, std::uint64_t offset, std::span<const std::byte> data) = 0;
  virtual void before_sync(const BlockFile& file) = 0;
  virtual void after_sync(const BlockFile& file) = 0;
};

// direct: past the page cache, where the file system and the device take it, by units of up to a block. buffered_blocks:
// by blocks through the cache, as if the device had such sectors; for tests.
enum class Caching { direct, buffered, buffered_blocks };

enum class Opening { read_only, read_write };

class BlockFile {
 public:
  // A new file of `bytes` zeros, sparse, and `tail` behind them; it and its name are durable. Throws exists where the
  // name is taken.
  static void create(const std::string& path, std::uint64_t bytes, std::span<const std::byte> tail = {});

  // Opens. Where direct I/O cannot be had, as if buffered were asked for.
  BlockFile(std::string path, Caching caching, BlockWatcher* watcher = nullptr, Opening opening = Opening::read_write);
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  const std::string& name() const { return path_; }
  std::uint64_t size() const { return bytes_; }
  // What lies in the last `bytes` is not counted from now on.
  void hide_tail(std::uint64_t bytes) { bytes_ -= bytes; }
  int fd() const { return fd_; }
  // What is read and written as a whole: a power of two from sector_bytes to block_bytes.
  std::size_t unit_bytes() const { return unit_bytes_; }
  // Whether a read gives what the device has, for certain, and never what the page cache has kept.
  bool reads_device() const { return reads_device_; }

  // Reads, writes and syncs take as long as the dial says; null: as they do.
  void set_dial(Dial* dial) { dial_ = dial; }
  Dial* dial() const { return dial_; }

  // Throws full where there is no space, failed otherwise. Any part of the range may have been written then.
  void write(std::uint64_t offset, std::size_t bytes, const std::byte* src);
  // Everything that was written is durable.
  void sync();
  // Writes to the range need no more space. Throws full, and nothing has changed.
  void allocate(std::uint64_t offset, std::uint64_t bytes);

  // Where data begins at or after `offset`; the end of the file where only holes follow.
  std::uint64_t next_data(std::uint64_t offset) const;

  // For messages.
  std::string place(std::uint64_t offset) const { return path_ + " at offset " + std::to_string(offset); }
  // Before a read or write by other means: throws where the file failed, or the range is no range of whole units.
  void check_read(std::uint64_t offset, std::size_t bytes, const std::byte* dst) const;
  void check_write(std::uint64_t offset, std::size_t bytes, const std::byte* src) const;

 private:
  void check(std::uint64_t offset, std::size_t bytes, const std::byte* memory) const;

  std::string path_;
  int fd_ = -1;
  std::size_t unit_bytes_ = format::sector_bytes;
  bool reads_device_ = false;
  std::uint64_t bytes_ = 0;
  BlockWatcher* watcher_;
  Dial* dial_ = nullptr;
  std::atomic<bool> failed_{false};
};

}  // namespace holdfast

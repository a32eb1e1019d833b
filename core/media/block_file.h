// Block files: files on a block device, read and written by sector, past the page cache.
//
// What a block device guarantees
// - A write of one 512-byte sector is atomic: after a crash the sector holds the old bytes or the new ones. Nothing
//   larger is atomic: of a longer write any subset of its sectors may have arrived, in any order.
// - A read that begins after a write returned sees it. Bytes that were never written read as zeros.
// - A write is durable once a sync that began after it returned has succeeded. After a sync that failed nothing is
//   known about the writes before it, so the file refuses everything from then on.
//
// Invariants
// - Offsets, lengths and addresses are multiples of a sector; others are a config error and touch nothing.
// - A write is done in full or ends in an error that names file and offset.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <span>
#include <string>

#include "../format.h"
#include "../huge_array.h"

namespace holdfast {

// Memory for direct I/O. Contents are not initialised. Large ones are of huge pages where those can be had: the kernel
// pins memory page by page, and a page of 4096 bytes takes as long as one of 2 MiB.
class SectorBuffer {
 public:
  SectorBuffer() = default;
  explicit SectorBuffer(std::size_t bytes) {
    if (bytes >= huge_page_bytes) {
      large_ = HugeArray<std::byte>(format::align_up(bytes, huge_page_bytes));
      return;
    }
    bytes_ = format::align_up(bytes, format::block_bytes);
    if (bytes_ == 0) return;
    small_.reset(static_cast<std::byte*>(std::aligned_alloc(format::block_bytes, bytes_)));
    if (!small_) throw std::bad_alloc();
  }
  std::byte* data() const { return small_ ? small_.get() : large_.data(); }
  std::size_t size() const { return small_ ? bytes_ : large_.size(); }

 private:
  static constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte[], Free> small_;
  std::size_t bytes_ = 0;  // of that
  HugeArray<std::byte> large_;
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

enum class Caching { direct, buffered };  // buffered: for file systems without direct I/O, never faster

enum class Opening { read_only, read_write };

// direct where the file systems of `directory` take it.
Caching caching_of(const std::string& directory);

class BlockFile {
 public:
  // A new file of `bytes` zeros, sparse, and `tail` behind them; it and its name are durable. Throws exists where the
  // name is taken.
  static void create(const std::string& path, std::uint64_t bytes, std::span<const std::byte> tail = {});

  // Opens. Throws config where the file system or the device takes no direct I/O by sector.
  BlockFile(std::string path, Caching caching, BlockWatcher* watcher = nullptr, Opening opening = Opening::read_write);
  ~BlockFile();
  BlockFile(const BlockFile&) = delete;
  BlockFile& operator=(const BlockFile&) = delete;

  const std::string& name() const { return path_; }
  std::uint64_t size() const { return bytes_; }
  // What lies in the last `bytes` is not counted from now on.
  void hide_tail(std::uint64_t bytes) { bytes_ -= bytes; }
  int fd() const { return fd_; }

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
  // Before a read or write by other means: throws where the file failed, or the range is no range of whole sectors.
  void check_read(std::uint64_t offset, std::size_t bytes, const std::byte* dst) const;
  void check_write(std::uint64_t offset, std::size_t bytes, const std::byte* src) const;

 private:
  void check(std::uint64_t offset, std::size_t bytes, const std::byte* memory) const;

  std::string path_;
  int fd_ = -1;
  std::uint64_t bytes_ = 0;
  BlockWatcher* watcher_;
  std::atomic<bool> failed_{false};
};

}  // namespace holdfast

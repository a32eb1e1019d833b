// Block queue: many reads or writes of block files at once, so that a device with a deep queue is kept busy.
//
// Invariants
// - Every read or write is done in full, or the call ends in an error that names file and offset: the first of those
//   that failed, in the order given. The kernel uses the callers' buffers until the call has returned or thrown, no
//   longer.
// - Every thread that calls has an io_uring of its own, made at its first call and kept as long as the queue:
//   submission takes no lock. Where the kernel refuses (containers often do), or has none for one more thread, a few
//   threads with blocking calls do the same.
// - Not used in the child of a fork, which does not have the memory either (SectorBuffer).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "media/block_file.h"
#include "media/dial.h"

namespace holdfast {

// One range of a file, and where its bytes go or come from.
struct BlockRead {
  const BlockFile* file;
  std::uint64_t offset;
  std::size_t bytes;
  std::byte* dst;
};
struct BlockWrite {
  const BlockFile* file;
  std::uint64_t offset;
  std::size_t bytes;
  const std::byte* src;
};

// Many reads or writes at once, of any files. Thread-safe.
class BlockQueue {
 public:
  enum class Way { io_uring, threads };
  // Requests in flight: as many as the kernel has tags for of a virtual disk. The rest would wait in its scheduler, and
  // be handed over by its block worker as others complete, on cores that train.
  static constexpr unsigned depth = 128;

  // Threads where they are asked for, or where the kernel refuses an io_uring.
  explicit BlockQueue(Way wanted = Way::io_uring);
  ~BlockQueue();

  // Returns when all are done. Throws corrupted where a file ends too early, failed where a read fails.
  void read_many(std::span<const BlockRead> reads);
  // Returns when all are done. Ranges do not overlap. Throws as BlockFile::write does; any part may have been written.
  void write_many(std::span<const BlockWrite> writes);

  // The same of one long range, in several requests.
  void read_range(const BlockFile& file, std::uint64_t offset, std::size_t bytes, std::byte* dst);
  void write_range(const BlockFile& file, std::uint64_t offset, std::size_t bytes, const std::byte* src);

  Way way() const;

 private:
  class Engine;
  class RingEngine;
  class ThreadEngine;
  std::unique_ptr<Engine> engine_;
};

}  // namespace holdfast

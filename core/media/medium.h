// Medium: what a pool's bytes lie on, behind as little as the stores need.
//
// What a medium guarantees
// - Aligned stores of 8 bytes are never torn. Nothing else is assumed to be atomic.
// - Level `process`: a store to a file's mapping survives the death of the process once it has retired; stores of
//   one thread survive in program order. flush and fence then cost nothing, and mean nothing for a power cut.
// - Level `power`: a store survives a power cut once flush of its range was followed by a fence on the same thread.
//   Before that any subset of its 8-byte words may have arrived, in any order.
// - allocate(range) returned: stores into the range cannot fail for want of space.
//
// Not assumed: that the medium keeps bits right (structures are checksummed), that unallocated ranges stay zero after
// a failed allocate, that sync orders anything but itself.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/huge_mapping.h"
#include "media/dial.h"

namespace holdfast {

// One file, mapped whole. A range that was never allocated reads as zeros.
class File {
 public:
  virtual ~File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::string& name() const { return name_; }
  // For messages.
  virtual std::string place(std::size_t offset) const { return name_ + " at offset " + std::to_string(offset); }
  // Where `offset` lies in the file: elsewhere where only a part of it is seen here.
  virtual std::size_t file_offset(std::size_t offset) const { return offset; }

  // Makes sure that [offset, offset + bytes) has space of its own. Throws full, and nothing has changed.
  virtual void allocate(std::size_t offset, std::size_t bytes) = 0;
  // The first offset at or after `offset` that may hold something else than zeros; size() when there is none.
  virtual std::size_t next_data(std::size_t offset) const = 0;
  // The first offset at or after `offset` that may hold nothing; `offset` itself where that cannot be told.
  virtual std::size_t next_hole(std::size_t offset) const { return offset; }
  // Whether some of it lies in memory, mapped where huge pages may begin.
  virtual bool may_lie_in_huge_pages() const { return false; }
  enum class Moved { yes, not_now, no };
  // Moves what is at [offset, offset + huge_page_bytes) into one huge page, and fills holes there. The same bytes at the
  // same addresses, beside whoever reads or writes them. offset: a multiple of huge_page_bytes.
  virtual Moved move_to_huge_page(std::size_t) { return Moved::no; }
  // Grows or shrinks the file; data() may move. Where it throws, the old mapping is there.
  virtual void resize(std::size_t bytes) = 0;
  // Stores bytes that nobody keeps an address of; flush and fence mean the same for them. Cheaper than stores where
  // flushing takes a page's write permission away.
  virtual void write(std::size_t offset, const void* from, std::size_t bytes) = 0;
  // Everything stored so far survives a power cut, whatever the level (clean close).
  virtual void sync() = 0;

 protected:
  explicit File(std::string name) : name_(std::move(name)) {}
  std::string name_;
  std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

enum class Access { random, sequential };

// One of several files that are mapped as one.
struct JoinedPiece {
  std::string name;
  std::size_t offset;  // where it begins in the whole, a multiple of block_bytes
  std::size_t bytes;  // of it that are mapped, from its first on
  std::size_t file_bytes;  // its size
};

class Medium {
 public:
  virtual ~Medium() = default;

  virtual format::Level level() const = 0;
  // One line for people: "tmpfs, process", "DAX (MAP_SYNC, clwb), power".
  virtual std::string description() const = 0;

  virtual bool exists(const std::string& name) const = 0;
  // A new file of `bytes` zeros; sparse unless allocated. Throws exists where the name is taken.
  virtual std::unique_ptr<File> create(const std::string& name, std::size_t bytes, Access access) = 0;
  virtual std::unique_ptr<File> open(const std::string& name, bool writable, Access access) = 0;
  // The last bytes of a file, `bytes` from the place on that is `from_end` before its end; zeros where it is shorter.
  struct Tail {
    std::vector<std::byte> bytes;
    std::string place;  // for messages
  };
  virtual Tail read_tail(const std::string& name, std::size_t bytes, std::size_t from_end) const = 0;
  // Files that exist, mapped as one of `bytes`. Pieces ascend; of each its size is checked (corrupted). Between them
  // nothing is mapped. What is allocated, written or resized is within a piece; it is not resized.
  virtual std::unique_ptr<File> open_joined(const std::vector<JoinedPiece>& pieces, std::size_t bytes, bool writable,
                                            Access access) = 0;
  // Atomically gives `from` the name `to`; durable at every level when it returns.
  virtual void rename(const std::string& from, const std::string& to) = 0;

  // Starts writing the range back to the persistence domain.
  virtual void flush(const void* data, std::size_t bytes) = 0;
  // Waits for this thread's flushes.
  virtual void fence() = 0;

  // flush + fence of one range, and a numbered persist point: where tests kill the process.
  void persist(const void* data, std::size_t bytes) {
    flush(data, bytes);
    persist_point();
  }
  void persist_point() {
    fence();
    count_persist_point();
  }

  // Makes it as slow as the dial says, for whoever asks `dial`: the stores above it. Null: as it is.
  void set_dial(std::shared_ptr<Dial> dial) { dial_ = std::move(dial); }
  Dial* dial() const { return dial_.get(); }

  // Kills the process with SIGKILL at the n-th persist point from now (0: never). For crash tests.
  static void kill_at_persist_point(std::int64_t n) { kill_at_.store(n); }
  // What is left of n: crash tests count the points of a run with a large n.
  static std::int64_t persist_points_left() { return kill_at_.load(); }
  // Also of what writes files another way.
  static void count_persist_point() {
    if (kill_at_.load(std::memory_order_relaxed) != 0) strike_persist_point();
  }

 private:
  std::shared_ptr<Dial> dial_;

  static void strike_persist_point();
  static std::atomic<std::int64_t> kill_at_;
};

// mapped: level `power` on DAX, `process` elsewhere. synced: level `power` on any file system whose msync reaches the
// device; every flush costs a write.
enum class Flushing { mapped, synced };
std::unique_ptr<Medium> open_mapped_medium(const std::string& directory, Flushing flushing = Flushing::mapped);

// Whether files of `directory` can be mapped with MAP_SYNC, and whether they are in memory only.
bool is_dax(const std::string& directory);
// The same of an open file that may be mapped with this protection.
bool takes_map_sync(int fd, int protection);
bool is_volatile(const std::string& directory);

// Raises what this process may have open to what the system lets it: a file for each shard of each column is many.
void allow_many_files();

}  // namespace holdfast

// Allocated pages: which pages of a file are known to have space, so that no store to them can fail for want of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/format.h"
#include "media/medium.h"

namespace holdfast {

class AllocatedPages {
 public:
  // num_pages: that the file has; fewer than its size says, where it is joined of pieces.
  AllocatedPages(File& file, std::size_t num_pages);
  // Whether all of the file's pages are known.
  bool complete() const { return num_unknown_.load(std::memory_order_relaxed) == 0; }
  // Allocates the pages of [offset, offset + bytes) that are not known yet; bytes > 0. Thread-safe.
  void ensure(std::size_t offset, std::size_t bytes) {
    const std::size_t first = offset / format::block_bytes;
    const std::size_t last = (offset + bytes - 1) / format::block_bytes;
    if (last - first <= 1 && known(first) && known(last)) return;
    allocate(first, last);
  }
  // Pages [first, end) have space: somebody has seen it. Thread-safe.
  void note(std::size_t first, std::size_t end);
  // Of the 64 pages from `first` on, a multiple of that, which are known: a bit for each.
  std::uint64_t known_of_64(std::size_t first) const { return words_[first / 64].load(std::memory_order_relaxed); }

 private:
  bool known(std::size_t page) const {
    return (words_[page / 64].load(std::memory_order_relaxed) >> (page % 64) & 1) != 0;
  }
  void allocate(std::size_t first_page, std::size_t last_page);

  File& file_;
  std::atomic<std::size_t> num_unknown_;
  // Anonymous zero pages: a file of terabytes costs nothing until pages are touched.
  struct Unmap {
    std::size_t bytes;
    void operator()(std::atomic<std::uint64_t>* words) const;
  };
  std::unique_ptr<std::atomic<std::uint64_t>[], Unmap> words_;
};

}  // namespace holdfast

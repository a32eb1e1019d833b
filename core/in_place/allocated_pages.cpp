#include "in_place/allocated_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>

namespace holdfast {

void AllocatedPages::Unmap::operator()(std::atomic<std::uint64_t>* words) const { ::munmap(words, bytes); }

AllocatedPages::AllocatedPages(File& file, std::size_t num_pages) : file_(file), num_unknown_(num_pages) {
  const std::size_t bytes = (file.size() / format::block_bytes / 64 + 2) * 8;
  void* words = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (words == MAP_FAILED) throw std::bad_alloc();
  words_ = {static_cast<std::atomic<std::uint64_t>*>(words), Unmap{bytes}};
}

void AllocatedPages::allocate(std::size_t first, std::size_t last) {
  for (std::size_t page = first; page <= last; ++page) {
    if (known(page)) continue;
    std::size_t end = page + 1;
    while (end <= last && !known(end)) ++end;
    const std::size_t from = page * format::block_bytes;
    file_.allocate(from, std::min(end * format::block_bytes, file_.size()) - from);
    note(page, end);
    page = end;
  }
}

void AllocatedPages::note(std::size_t first, std::size_t end) {
  for (std::size_t page = first; page < end; ++page) {
    const std::uint64_t bit = std::uint64_t{1} << (page % 64);
    const std::uint64_t before = words_[page / 64].fetch_or(bit, std::memory_order_relaxed);
    if ((before & bit) == 0) num_unknown_.fetch_sub(1, std::memory_order_relaxed);
  }
}

}  // namespace holdfast

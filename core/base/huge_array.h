// Huge array: zeros that take memory as they are touched, in huge pages where they can be had, for what is read and
// written at random.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>
#include <utility>

#include "base/format.h"
#include "base/huge_mapping.h"

namespace holdfast {

template <class T>
class HugeArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  HugeArray() = default;
  explicit HugeArray(std::size_t size) : size_(size) {
    if (size == 0) return;
    std::byte* const begin = map_for_huge_pages(bytes(), PROT_READ | PROT_WRITE);
    if (begin == nullptr) throw std::bad_alloc();
    ::madvise(begin, bytes(), MADV_HUGEPAGE);
    data_ = reinterpret_cast<T*>(begin);
  }
  ~HugeArray() {
    if (data_ != nullptr) ::munmap(data_, bytes());
  }
  HugeArray(HugeArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  HugeArray& operator=(HugeArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  // The child of a fork does not have it.
  void keep_from_children() const {
    if (data_ != nullptr) ::madvise(data_, bytes(), MADV_DONTFORK);
  }

  // Elements [begin, end) are zeros by now: those of whole huge pages take no memory until they are touched again. Returns
  // the first one that it is worth to begin with next time.
  std::size_t give_back(std::size_t begin, std::size_t end) const {
    const std::size_t from = format::align_up(begin * sizeof(T), huge_page_bytes);
    const std::size_t to = end * sizeof(T) / huge_page_bytes * huge_page_bytes;
    if (from >= to) return begin;
    ::madvise(reinterpret_cast<std::byte*>(data_) + from, to - from, MADV_DONTNEED);
    return to / sizeof(T);
  }

  std::size_t size() const { return size_; }
  T* data() const { return data_; }
  T& operator[](std::size_t i) const { return data_[i]; }
  T* begin() const { return data_; }
  T* end() const { return data_ + size_; }

 private:
  std::size_t bytes() const { return size_ * sizeof(T); }

  T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace holdfast

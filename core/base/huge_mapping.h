// Addresses that begin at a huge page: the kernel puts what is no multiple of one anywhere.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

#include "base/format.h"

namespace holdfast {

// What a huge page of the processor holds, where pages of 4 KiB are the small ones.
constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

// Maps memory that takes none until it is touched, from a multiple of huge_page_bytes on; where it is smaller than that,
// anywhere. bytes > 0. Null, and errno says why, where there are no addresses; munmap gives them back.
inline std::byte* map_for_huge_pages(std::size_t bytes, int protection) {
  // More is mapped, and given back around it.
  const std::size_t kept = format::align_up(bytes, format::block_bytes);
  const std::size_t alignment = kept < huge_page_bytes ? format::block_bytes : huge_page_bytes;
  const std::size_t spare = alignment - format::block_bytes;
  void* mapped = ::mmap(nullptr, kept + spare, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  const std::size_t before = format::align_up(address, alignment) - address;
  std::byte* const begin = static_cast<std::byte*>(mapped) + before;
  if (before != 0) ::munmap(mapped, before);
  if (before != spare) ::munmap(begin + kept, spare - before);
  return begin;
}

}  // namespace holdfast

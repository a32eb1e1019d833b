#include "commit/finite.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/parallel.h"
#include "kernels/kernels.h"

namespace holdfast {
namespace {

constexpr std::size_t chunk_bytes = 256 * 1024;

// Infinities and NaNs are what has all bits of the exponent set.
template <class Bits>
bool is_finite(const std::byte* data, std::size_t bytes, Bits exponent) {
  Bits found = 0;
  for (std::size_t at = 0; at + sizeof(Bits) <= bytes; at += sizeof(Bits)) {
    Bits value;
    std::memcpy(&value, data + at, sizeof(value));
    found = static_cast<Bits>(found | ((value & exponent) == exponent));
  }
  return found == 0;
}

bool is_finite(const FloatTensor& tensor, std::size_t at, std::size_t bytes) {
  const std::byte* data = tensor.data + at;
  switch (tensor.format) {
    case FloatFormat::float16: return is_finite<std::uint16_t>(data, bytes, 0x7c00);
    case FloatFormat::bfloat16: return is_finite<std::uint16_t>(data, bytes, 0x7f80);
    case FloatFormat::float32:
      return best_kernels().all_finite(reinterpret_cast<const float*>(data), bytes / sizeof(float));
    case FloatFormat::float64: return is_finite<std::uint64_t>(data, bytes, 0x7ff0000000000000);
  }
  return true;
}

}  // namespace

std::optional<std::size_t> first_non_finite(std::span<const FloatTensor> tensors) {
  struct Chunk {
    std::size_t tensor;
    std::size_t at;
  };
  std::vector<Chunk> chunks;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    for (std::size_t at = 0; at < tensors[i].bytes; at += chunk_bytes) chunks.push_back({i, at});
  }
  std::atomic<std::size_t> first = tensors.size();
  parallel_for(chunks.size(), [&](std::size_t c) {
    const auto [i, at] = chunks[c];
    if (is_finite(tensors[i], at, std::min(chunk_bytes, tensors[i].bytes - at))) return;
    std::size_t known = first.load(std::memory_order_relaxed);
    while (i < known && !first.compare_exchange_weak(known, i, std::memory_order_relaxed)) {
    }
  });
  const std::size_t found = first.load(std::memory_order_relaxed);
  if (found == tensors.size()) return std::nullopt;
  return found;
}

}  // namespace holdfast

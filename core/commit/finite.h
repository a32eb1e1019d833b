// Whether floating-point tensors are finite: a gradient or a parameter that is not makes every later step worthless.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

namespace holdfast {

enum class FloatFormat : std::uint8_t { float16, bfloat16, float32, float64 };

// Contiguous elements of one format.
struct FloatTensor {
  const std::byte* data;
  std::size_t bytes;
  FloatFormat format;
};

// The index of the first tensor that has an infinity or a NaN; nothing where all are finite. Reads on all threads.
std::optional<std::size_t> first_non_finite(std::span<const FloatTensor> tensors);

}  // namespace holdfast

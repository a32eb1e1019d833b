// Rows of a known or unknown number of elements, cut into blocks of 16 lanes; how far ahead memory is asked for.

namespace holdfast::HOLDFAST_ISA {
namespace {

constexpr std::uint32_t max_dim = 4096;

// A row of Dim elements; Dim 0 stands for any number up to max_dim.
template <std::uint32_t Dim>
struct Shape {
  static constexpr std::uint32_t max_blocks = (Dim == 0 ? max_dim : Dim + num_lanes - 1) / num_lanes;
  explicit Shape(std::uint32_t) {}
  static constexpr std::uint32_t dim() { return Dim; }
};
template <>
struct Shape<0> {
  static constexpr std::uint32_t max_blocks = max_dim / num_lanes;
  explicit Shape(std::uint32_t dim) : dim_(dim) {}
  std::uint32_t dim() const { return dim_; }

 private:
  std::uint32_t dim_;
};

// Calls body(block, extent) for each block of a row: block b starts at element 16 b.
template <std::uint32_t Dim, class Body>
HOLDFAST_INLINE void for_each_block(Shape<Dim> shape, Body&& body) {
  const std::uint32_t num_full = shape.dim() / num_lanes;
  if constexpr (Dim != 0) {
#pragma GCC unroll 8
    for (std::uint32_t block = 0; block < num_full; ++block) body(block, Full{});
    if constexpr (Dim % num_lanes != 0) body(num_full, Tail{Dim % num_lanes});
  } else {
    for (std::uint32_t block = 0; block < num_full; ++block) body(block, Full{});
    if (shape.dim() % num_lanes != 0) body(num_full, Tail{shape.dim() % num_lanes});
  }
}

// Whether rows of common numbers of elements are compiled for themselves: for sanitizers that takes minutes, and half a
// minute for an x86-64 that is too old for AVX2.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || (defined(__x86_64__) && HOLDFAST_VECTOR_BYTES < 32)
#define HOLDFAST_COMMON_SHAPES 0
#else
#define HOLDFAST_COMMON_SHAPES 1
#endif

// Calls body(shape) with the shape of rows of `dim` elements.
template <class Body>
HOLDFAST_INLINE void with_shape(std::uint32_t dim, Body&& body) {
  switch (dim) {
#if HOLDFAST_COMMON_SHAPES
    case 8: return body(Shape<8>(dim));
    case 32: return body(Shape<32>(dim));
    case 64: return body(Shape<64>(dim));
    case 128: return body(Shape<128>(dim));
#endif
    case 16: return body(Shape<16>(dim));
    default: return body(Shape<0>(dim));
  }
}

// Calls body(format) with the format of `dtype`.
template <class Body>
HOLDFAST_INLINE void with_format(RowDtype dtype, Body&& body) {
  switch (dtype) {
    case RowDtype::f32: return body(Float32{});
    case RowDtype::f16: return body(Float16{});
    case RowDtype::bf16: return body(Bfloat16{});
  }
}

template <class Format>
HOLDFAST_INLINE const typename Format::Element* elements(const std::byte* bytes) {
  return reinterpret_cast<const typename Format::Element*>(bytes);
}
template <class Format>
HOLDFAST_INLINE typename Format::Element* elements(std::byte* bytes) {
  return reinterpret_cast<typename Format::Element*>(bytes);
}

// Sum of the squares of a row's elements: lane i adds up the squares of elements i, i + 16, i + 32 … in this order
// (the last block is padded with zeros), then the lanes are folded.
template <std::uint32_t Dim>
HOLDFAST_INLINE float reduce_row(Shape<Dim> shape, const Lanes* blocks) {
  Lanes sum = zero();
  for_each_block(shape, [&](std::uint32_t block, auto) { sum = sum + blocks[block] * blocks[block]; });
  return fold(sum);
}

constexpr std::size_t line_bytes = 64;
constexpr std::size_t max_prefetched_lines = 16;  // of one row: behind these, the hardware follows by itself

enum class Access { read, write };

template <Access access>
HOLDFAST_INLINE void prefetch_line(const void* address) {
#if defined(__x86_64__)
  // The compiler would need -mprfchw for this; CPUs without the instruction take it for a NOP.
  if constexpr (access == Access::write) {
    asm volatile("prefetchw %0" : : "m"(*static_cast<const char*>(address)));
    return;
  }
#endif
  __builtin_prefetch(address, access == Access::write ? 1 : 0, 3);
}

template <Access access>
HOLDFAST_INLINE void prefetch(const void* address, std::size_t bytes) {
  const char* const first = static_cast<const char*>(address);
  for (std::size_t line = 0; line < max_prefetched_lines && line * line_bytes < bytes; ++line) {
    prefetch_line<access>(first + line * line_bytes);
  }
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA

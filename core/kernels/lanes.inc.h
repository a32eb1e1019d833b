// Sixteen lanes of float32 or of 32-bit integers, in as many registers as the instruction set needs, and the two
// reductions over them.

#define HOLDFAST_INLINE inline __attribute__((always_inline))

namespace holdfast::HOLDFAST_ISA {
namespace {

constexpr std::uint32_t num_lanes = 16;
constexpr std::uint32_t part_lanes = HOLDFAST_VECTOR_BYTES / 4;
constexpr std::uint32_t num_parts = num_lanes / part_lanes;

using FloatPart = float __attribute__((vector_size(HOLDFAST_VECTOR_BYTES)));
using WordPart = std::uint32_t __attribute__((vector_size(HOLDFAST_VECTOR_BYTES)));
using IntPart = std::int32_t __attribute__((vector_size(HOLDFAST_VECTOR_BYTES)));
using HalfPart = std::uint16_t __attribute__((vector_size(HOLDFAST_VECTOR_BYTES / 2)));

struct Lanes {
  FloatPart part[num_parts];
};

// How many lanes of a block are elements of the row: all of them, or the first few in the row's last block.
struct Full {
  static constexpr std::uint32_t count = num_lanes;
};
struct Tail {
  std::uint32_t count;
};

HOLDFAST_INLINE Lanes zero() {
  Lanes lanes;
  for (auto& part : lanes.part) part = FloatPart{};
  return lanes;
}

HOLDFAST_INLINE Lanes broadcast(float value) {
  Lanes lanes;
  for (auto& part : lanes.part) part = value - FloatPart{};  // not zero + value, which loses the sign of -0.0
  return lanes;
}

HOLDFAST_INLINE Lanes operator+(Lanes a, const Lanes& b) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] += b.part[p];
  return a;
}
HOLDFAST_INLINE Lanes operator-(Lanes a, const Lanes& b) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] -= b.part[p];
  return a;
}
HOLDFAST_INLINE Lanes operator*(Lanes a, const Lanes& b) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] *= b.part[p];
  return a;
}
HOLDFAST_INLINE Lanes operator*(float factor, Lanes a) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] = factor * a.part[p];
  return a;
}
HOLDFAST_INLINE Lanes operator/(Lanes a, const Lanes& b) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] /= b.part[p];
  return a;
}
HOLDFAST_INLINE Lanes operator/(Lanes a, float divisor) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] /= divisor;
  return a;
}
HOLDFAST_INLINE Lanes operator+(Lanes a, float b) {
  for (std::uint32_t p = 0; p < num_parts; ++p) a.part[p] += b;
  return a;
}

// a where mask is all ones, 0.0 where it is 0.
HOLDFAST_INLINE Lanes keep_bits(Lanes a, std::uint32_t mask) {
  for (auto& part : a.part) part = reinterpret_cast<FloatPart>(reinterpret_cast<WordPart>(part) & (WordPart{} + mask));
  return a;
}

HOLDFAST_INLINE FloatPart sqrt_part(FloatPart x) {
#if HOLDFAST_VECTOR_BYTES == 64
  return _mm512_sqrt_ps(x);
#elif HOLDFAST_VECTOR_BYTES == 32
  return _mm256_sqrt_ps(x);
#elif defined(__x86_64__)
  return _mm_sqrt_ps(x);
#else
  for (std::uint32_t i = 0; i < part_lanes; ++i) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}
HOLDFAST_INLINE Lanes sqrt(Lanes x) {
  for (auto& part : x.part) part = sqrt_part(part);
  return x;
}
// Not __builtin_sqrtf: without -fno-math-errno that is a call for negative numbers.
HOLDFAST_INLINE float sqrt(float x) {
#if defined(__x86_64__)
  return _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x)));
#else
  return __builtin_sqrtf(x);
#endif
}

HOLDFAST_INLINE Lanes load(const float* from, Full) {
  Lanes lanes;
  __builtin_memcpy(&lanes, from, sizeof lanes);
  return lanes;
}
HOLDFAST_INLINE void store(float* to, const Lanes& lanes, Full) { __builtin_memcpy(to, &lanes, sizeof lanes); }

// Past the caches, to an address that is a multiple of 64; finish_streaming comes before anybody is told.
HOLDFAST_INLINE void stream(float* to, const Lanes& lanes) {
#if defined(__x86_64__)
  for (std::uint32_t p = 0; p < num_parts; ++p) {
#if HOLDFAST_VECTOR_BYTES == 64
    _mm512_stream_ps(to + p * part_lanes, lanes.part[p]);
#elif HOLDFAST_VECTOR_BYTES == 32
    _mm256_stream_ps(to + p * part_lanes, lanes.part[p]);
#else
    _mm_stream_ps(to + p * part_lanes, lanes.part[p]);
#endif
  }
#else
  store(to, lanes, Full{});
#endif
}
HOLDFAST_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

#if HOLDFAST_VECTOR_BYTES == 32
// All bits set in the lanes of part p that lie before `count`.
HOLDFAST_INLINE __m256i lanes_before(std::uint32_t count, std::uint32_t p) {
  const IntPart lane = {0, 1, 2, 3, 4, 5, 6, 7};
  return reinterpret_cast<__m256i>(lane + static_cast<std::int32_t>(p * part_lanes) <
                                   static_cast<std::int32_t>(count) + IntPart{});
}
#endif

// The first `count` elements; the lanes behind them are zero, and no byte behind them is read.
HOLDFAST_INLINE Lanes load(const float* from, Tail tail) {
  Lanes lanes = zero();
#if HOLDFAST_VECTOR_BYTES == 64
  lanes.part[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << tail.count) - 1), from);
#else
  for (std::uint32_t p = 0; p < num_parts; ++p) {
#if HOLDFAST_VECTOR_BYTES == 32
    lanes.part[p] = _mm256_maskload_ps(from + p * part_lanes, lanes_before(tail.count, p));
#else
    for (std::uint32_t i = 0; i < part_lanes; ++i) {
      if (p * part_lanes + i < tail.count) lanes.part[p][i] = from[p * part_lanes + i];
    }
#endif
  }
#endif
  return lanes;
}
HOLDFAST_INLINE void store(float* to, const Lanes& lanes, Tail tail) {
#if HOLDFAST_VECTOR_BYTES == 64
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << tail.count) - 1), lanes.part[0]);
#else
  for (std::uint32_t p = 0; p < num_parts; ++p) {
#if HOLDFAST_VECTOR_BYTES == 32
    _mm256_maskstore_ps(to + p * part_lanes, lanes_before(tail.count, p), lanes.part[p]);
#else
    for (std::uint32_t i = 0; i < part_lanes; ++i) {
      if (p * part_lanes + i < tail.count) to[p * part_lanes + i] = lanes.part[p][i];
    }
#endif
  }
#endif
}

// The lanes that are elements of the row; 0.0 behind them.
HOLDFAST_INLINE Lanes only(const Lanes& lanes, Full) { return lanes; }
HOLDFAST_INLINE Lanes only(Lanes lanes, Tail tail) {
#if HOLDFAST_VECTOR_BYTES == 64
  lanes.part[0] = _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << tail.count) - 1), lanes.part[0]);
#else
  for (std::uint32_t p = 0; p < num_parts; ++p) {
#if HOLDFAST_VECTOR_BYTES == 32
    lanes.part[p] = _mm256_and_ps(lanes.part[p], reinterpret_cast<__m256>(lanes_before(tail.count, p)));
#else
    for (std::uint32_t i = 0; i < part_lanes; ++i) {
      if (p * part_lanes + i >= tail.count) lanes.part[p][i] = 0;
    }
#endif
  }
#endif
  return lanes;
}

// The fixed tree's upper half: lane i + lane (i + 8), of those i + (i + 4), i + (i + 2), i + (i + 1).
HOLDFAST_INLINE float fold(const Lanes& lanes) {
  using Four = float __attribute__((vector_size(16)));
#if HOLDFAST_VECTOR_BYTES == 64
  const FloatPart all = lanes.part[0];
  const auto eight = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
  const Four four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#elif HOLDFAST_VECTOR_BYTES == 32
  const FloatPart eight = lanes.part[0] + lanes.part[1];
  const Four four =
      __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
#else
  const Four four = (lanes.part[0] + lanes.part[2]) + (lanes.part[1] + lanes.part[3]);
#endif
  const Four two = four + __builtin_shufflevector(four, four, 2, 3, 2, 3);
  return two[0] + two[1];
}

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA

// How elements of rows are stored: float32 as it is; float16 and bfloat16 are widened to float32 for arithmetic and
// rounded stochastically when they are stored.
//
// Rounding to 16 bits adds random bits below the last one that is kept, then cuts them off: a value between two
// neighbours becomes the upper one with a probability proportional to its distance from the lower one, so that the
// mean of the result is the value. For subnormal float16 the unit is 2^-24 throughout; there, probabilities are exact
// to 2^-31 (values below 2^-31 units round to zero). The random bits of an element are
//   element_bits(absorb(absorb(absorb(absorb(stochastic_rounding, rounding_seed), table), step), row), element)
// of counter_rng.h, of which the lower as many as are cut off are used.
// - A finite value never becomes infinite: beyond the largest finite number it becomes that number (as FBGEMM's
//   stochastic rounding does, which truncates towards zero in the end).
// - Infinities stay; a NaN stays a NaN, made quiet, with the upper bits of its payload.

namespace holdfast::HOLDFAST_ISA {
namespace {

struct Words {
  WordPart part[num_parts];
};

// Random bits of a row's elements when it is written.
struct RoundingKey {
  std::uint64_t key;
};

HOLDFAST_INLINE Words element_bits(std::uint64_t key, std::uint32_t first_element) {
  Words bits;
  for (std::uint32_t p = 0; p < num_parts; ++p) {
    WordPart element{};
    for (std::uint32_t i = 0; i < part_lanes; ++i) element[i] = p * part_lanes + i;
    bits.part[p] = counter_rng::element_bits<WordPart>(key, element + first_element);
  }
  return bits;
}

// Every lane from one of two words: a mask's lanes are all ones or all zeros.
HOLDFAST_INLINE WordPart choose(IntPart mask, WordPart yes, WordPart no) {
  const WordPart bits = reinterpret_cast<WordPart>(mask);
  return (bits & yes) | (~bits & no);
}

// Sixteen 16-bit elements, or the first `count` of them.
struct Halves {
  HalfPart part[num_parts];
};
template <class Extent>
HOLDFAST_INLINE Halves load_halves(const std::uint16_t* from, Extent extent) {
  Halves halves{};
  __builtin_memcpy(&halves, from, extent.count * 2);
  return halves;
}
template <class Extent>
HOLDFAST_INLINE void store_halves(std::uint16_t* to, const Halves& halves, Extent extent) {
  __builtin_memcpy(to, &halves, extent.count * 2);
}

struct Float32 {
  using Element = float;
  static constexpr bool can_stream = true;
  static constexpr std::uint32_t infinity = 0x7f800000u;  // all bits of the exponent

  template <class Extent>
  static HOLDFAST_INLINE Lanes load_elements(const float* from, Extent extent) {
    return load(from, extent);
  }
  template <class Extent>
  static HOLDFAST_INLINE void store_elements(float* to, const Lanes& lanes, Extent extent, RoundingKey, std::uint32_t) {
    store(to, lanes, extent);
  }
  static HOLDFAST_INLINE void stream_elements(float* to, const Lanes& lanes) { stream(to, lanes); }
  template <class Extent>
  static HOLDFAST_INLINE void store_nearest(float* to, const Lanes& lanes, Extent extent) {
    store(to, lanes, extent);
  }
};

// What float16 and bfloat16 share: Format widens and rounds parts.
template <class Format>
struct Float16Bits {
  using Element = std::uint16_t;
  static constexpr bool can_stream = false;
  static constexpr std::uint32_t infinity = Format::infinity;

  template <class Extent>
  static HOLDFAST_INLINE Lanes load_elements(const std::uint16_t* from, Extent extent) {
    const Halves halves = load_halves(from, extent);
    Lanes lanes;
    for (std::uint32_t p = 0; p < num_parts; ++p) lanes.part[p] = Format::widen(halves.part[p]);
    return lanes;
  }
  template <class Extent>
  static HOLDFAST_INLINE void store_elements(std::uint16_t* to, const Lanes& lanes, Extent extent, RoundingKey rounding,
                                             std::uint32_t first_element) {
    const Words random = element_bits(rounding.key, first_element);
    Halves halves;
    for (std::uint32_t p = 0; p < num_parts; ++p) {
      halves.part[p] = Format::narrow(
          lanes.part[p], [&](WordPart, WordPart cut) { return random.part[p] & (((WordPart{} + 1u) << cut) - 1u); });
    }
    store_halves(to, halves, extent);
  }
  // To the nearest, ties to even.
  template <class Extent>
  static HOLDFAST_INLINE void store_nearest(std::uint16_t* to, const Lanes& lanes, Extent extent) {
    Halves halves;
    for (std::uint32_t p = 0; p < num_parts; ++p) {
      halves.part[p] = Format::narrow(lanes.part[p], [](WordPart significand, WordPart cut) {
        return ((WordPart{} + 1u) << (cut - 1u)) - 1u + (significand >> cut & 1u);
      });
    }
    store_halves(to, halves, extent);
  }
};

// Puts sign, infinities and NaNs to the rounded magnitude of a finite value.
HOLDFAST_INLINE HalfPart finish_narrow(WordPart bits, WordPart magnitude, std::uint32_t infinity,
                                       unsigned payload_shift, std::uint32_t quiet_bit) {
  const WordPart absolute = bits & 0x7fffffffu;
  const WordPart limited = choose(magnitude < infinity, magnitude, WordPart{} + (infinity - 1));
  const WordPart nan = infinity | quiet_bit | (absolute >> payload_shift & (quiet_bit - 1));
  const WordPart special = choose(absolute > 0x7f800000u, nan, WordPart{} + infinity);
  const WordPart result = choose(absolute < 0x7f800000u, limited, special) | (bits >> 16 & 0x8000u);
  return __builtin_convertvector(result, HalfPart);
}

struct BfloatFormat {
  static constexpr std::uint32_t infinity = 0x7f80u;
  static HOLDFAST_INLINE FloatPart widen(HalfPart halves) {
    const WordPart bits = __builtin_convertvector(halves, WordPart) << 16;
    return reinterpret_cast<FloatPart>(bits);
  }
  // added_below(significand, cut) gives what to add before the lower `cut` bits are cut off.
  template <class AddedBelow>
  static HOLDFAST_INLINE HalfPart narrow(FloatPart value, const AddedBelow& added_below) {
    const WordPart bits = reinterpret_cast<WordPart>(value);
    const WordPart absolute = bits & 0x7fffffffu;
    const WordPart magnitude = (absolute + added_below(absolute, WordPart{} + 16u)) >> 16;
    return finish_narrow(bits, magnitude, infinity, 16, 0x40u);
  }
};

struct HalfFormat {
  static constexpr std::uint32_t infinity = 0x7c00u;
  static HOLDFAST_INLINE FloatPart widen(HalfPart halves) {
#if HOLDFAST_VECTOR_BYTES == 64
    return _mm512_cvtph_ps(reinterpret_cast<__m256i>(halves));
#elif HOLDFAST_VECTOR_BYTES == 32
    return _mm256_cvtph_ps(reinterpret_cast<__m128i>(halves));
#else
    // As F16C does it: exact, and a signalling NaN becomes quiet.
    const WordPart bits = __builtin_convertvector(halves, WordPart);
    const WordPart absolute = bits & 0x7fffu;
    const WordPart normal = (absolute << 13) + (112u << 23);
    const FloatPart scaled = __builtin_convertvector(reinterpret_cast<IntPart>(absolute), FloatPart) * 0x1p-24f;
    const WordPart subnormal = reinterpret_cast<WordPart>(scaled);
    const WordPart quiet = choose(absolute > 0x7c00u, WordPart{} + 0x7fc00000u, WordPart{} + 0x7f800000u);
    const WordPart special = quiet | absolute << 13;
    const WordPart magnitude = choose(absolute < 0x400u, subnormal, choose(absolute < 0x7c00u, normal, special));
    return reinterpret_cast<FloatPart>(magnitude | (bits & 0x8000u) << 16);
#endif
  }
  template <class AddedBelow>
  static HOLDFAST_INLINE HalfPart narrow(FloatPart value, const AddedBelow& added_below) {
    const WordPart bits = reinterpret_cast<WordPart>(value);
    const WordPart exponent = bits >> 23 & 0xffu;
    const WordPart fraction = bits & 0x7fffffu;
    // value = significand × 2^(scale - 150). Below 2^-14 (scale 113) float16 keeps fewer bits, down to none.
    const WordPart significand = choose(exponent != 0u, fraction | 0x800000u, fraction);
    const WordPart below = choose(exponent < 113u, 113u - exponent, WordPart{});
    const WordPart cut = choose(below > 18u, WordPart{} + 31u, below + 13u);
    const WordPart lost = choose(below > 18u, below - 18u, WordPart{});  // 31 random bits reach no deeper
    const WordPart kept = significand >> choose(lost > 31u, WordPart{} + 31u, lost);
    // The implicit bit of a normal number is the 1 in its exponent's lowest place; a carry goes where it belongs.
    const WordPart magnitude =
        choose(exponent > 113u, (exponent - 113u) << 10, WordPart{}) + ((kept + added_below(kept, cut)) >> cut);
    return finish_narrow(bits, magnitude, infinity, 13, 0x200u);
  }
};

using Bfloat16 = Float16Bits<BfloatFormat>;
using Float16 = Float16Bits<HalfFormat>;

}  // namespace
}  // namespace holdfast::HOLDFAST_ISA

#include "base/checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own avx512fintrin.h
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

// A checksum state is a polynomial over GF(2) of degree below 32, reflected: bit 31 - d is the coefficient of x^d.
// Bytes that follow multiply it by x^8 each, modulo the polynomial P; a message's own contribution is linear in its
// bits.

namespace holdfast {
namespace {

constexpr std::uint32_t polynomial = 0x82f63b78;  // P without x^32, reflected
constexpr std::uint32_t one = 0x80000000;         // x^0

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) != 0 ? polynomial : 0); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1, b = times_x(b)) {
    if ((a & one) != 0) product ^= b;
  }
  return product;
}

constexpr std::uint32_t power_of_x(std::size_t exponent) {
  std::uint32_t power = one;
  for (; exponent != 0; --exponent) power = times_x(power);
  return power;
}

// zeros[k][b] = x^(8 × b × 256^k): what b × 256^k bytes of zeros do to a state.
constexpr std::size_t max_length_bytes = 6;
using Zeros = std::array<std::array<std::uint32_t, 256>, max_length_bytes>;

Zeros make_zeros() {
  Zeros powers{};
  std::uint32_t unit = power_of_x(8);
  for (auto& of_digit : powers) {
    of_digit[0] = one;
    for (std::size_t b = 1; b < 256; ++b) of_digit[b] = multiply(of_digit[b - 1], unit);
    unit = multiply(of_digit[255], unit);
  }
  return powers;
}

// The state after `bytes` zeros more.
std::uint32_t advance(std::uint32_t state, std::size_t bytes) {
  static const Zeros zeros = make_zeros();
  for (std::size_t k = 0; bytes != 0; ++k, bytes >>= 8) {
    if ((bytes & 0xff) != 0) state = multiply(state, zeros[k][bytes & 0xff]);
  }
  return state;
}

// tables[k][b]: the checksum of byte b followed by k zero bytes.
constexpr auto tables = [] {
  std::array<std::array<std::uint32_t, 256>, 8> of{};
  for (std::uint32_t b = 0; b < 256; ++b) {
    of[0][b] = b;
    for (int bit = 0; bit < 8; ++bit) of[0][b] = times_x(of[0][b]);
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::size_t b = 0; b < 256; ++b) of[k][b] = (of[k - 1][b] >> 8) ^ of[0][of[k - 1][b] & 0xff];
  }
  return of;
}();

std::uint32_t update_portable(std::uint32_t state, const unsigned char* data, std::size_t bytes) {
  while (bytes >= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= state;
    state = 0;
    for (std::size_t k = 0; k < 8; ++k) state ^= tables[7 - k][(word >> (8 * k)) & 0xff];
    data += 8;
    bytes -= 8;
  }
  while (bytes-- > 0) state = (state >> 8) ^ tables[0][(state ^ *data++) & 0xff];
  return state;
}

template <std::uint32_t (*update)(std::uint32_t, const unsigned char*, std::size_t)>
Crcs one_by_one(Crcs crcs, const Messages& messages, std::size_t bytes) {
  for (std::size_t m = 0; m < messages.size(); ++m) {
    crcs[m] = ~update(~crcs[m], reinterpret_cast<const unsigned char*>(messages[m]), bytes);
  }
  return crcs;
}

#if defined(__x86_64__)

std::uint64_t word_at(const unsigned char* data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

// The CRC instruction has a latency of three cycles and a throughput of one, so three blocks are summed side by side
// and joined: advancing a state over `block` zeros is linear, hence four table look-ups.
constexpr std::size_t block = 1024;
using BlockZeros = std::array<std::array<std::uint32_t, 256>, 4>;

BlockZeros make_block_zeros() {
  BlockZeros of{};
  const std::uint32_t factor = advance(one, block);
  for (std::uint32_t byte = 0; byte < 4; ++byte) {
    for (std::uint32_t value = 0; value < 256; ++value) of[byte][value] = multiply(value << 8 * byte, factor);
  }
  return of;
}

std::uint32_t advance_block(std::uint32_t state) {
  static const BlockZeros block_zeros = make_block_zeros();
  return block_zeros[0][state & 0xff] ^ block_zeros[1][(state >> 8) & 0xff] ^ block_zeros[2][(state >> 16) & 0xff] ^
         block_zeros[3][state >> 24];
}

__attribute__((target("sse4.2"))) std::uint32_t update_sse42(std::uint32_t state, const unsigned char* data,
                                                             std::size_t bytes) {
  while (bytes >= 3 * block) {
    std::uint64_t a = state;
    std::uint64_t b = 0;
    std::uint64_t c = 0;
    for (std::size_t i = 0; i < block; i += 8) {
      a = _mm_crc32_u64(a, word_at(data + i));
      b = _mm_crc32_u64(b, word_at(data + block + i));
      c = _mm_crc32_u64(c, word_at(data + 2 * block + i));
    }
    state = advance_block(advance_block(static_cast<std::uint32_t>(a)) ^ static_cast<std::uint32_t>(b)) ^
            static_cast<std::uint32_t>(c);
    data += 3 * block;
    bytes -= 3 * block;
  }
  std::uint64_t wide = state;
  for (; bytes >= 8; data += 8, bytes -= 8) wide = _mm_crc32_u64(wide, word_at(data));
  state = static_cast<std::uint32_t>(wide);
  while (bytes-- > 0) state = _mm_crc32_u8(state, *data++);
  return state;
}

// Everything stays in registers: a load of what several stores have put together waits until these, and all before them,
// are in the cache.
__attribute__((target("sse4.2"))) Crcs of_each_sse42(Crcs crcs, const Messages& messages, std::size_t bytes) {
  const auto at = [&](std::size_t m, std::size_t i) { return reinterpret_cast<const unsigned char*>(messages[m]) + i; };
  std::uint64_t a = ~crcs[0];
  std::uint64_t b = ~crcs[1];
  std::uint64_t c = ~crcs[2];
  std::uint64_t d = ~crcs[3];
  std::size_t i = 0;
  for (; i + 8 <= bytes; i += 8) {
    a = _mm_crc32_u64(a, word_at(at(0, i)));
    b = _mm_crc32_u64(b, word_at(at(1, i)));
    c = _mm_crc32_u64(c, word_at(at(2, i)));
    d = _mm_crc32_u64(d, word_at(at(3, i)));
  }
  auto last_a = static_cast<std::uint32_t>(a);
  auto last_b = static_cast<std::uint32_t>(b);
  auto last_c = static_cast<std::uint32_t>(c);
  auto last_d = static_cast<std::uint32_t>(d);
  for (; i < bytes; ++i) {
    last_a = _mm_crc32_u8(last_a, *at(0, i));
    last_b = _mm_crc32_u8(last_b, *at(1, i));
    last_c = _mm_crc32_u8(last_c, *at(2, i));
    last_d = _mm_crc32_u8(last_d, *at(3, i));
  }
  return {~last_a, ~last_b, ~last_c, ~last_d};
}

// Folding (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009): 128
// bits that stand D bits before others are congruent to (their first 64) × x^(D + 64) + (their last 64) × x^D. The
// product of two reflected words comes out one bit low, so the constants are for D - 1.
constexpr std::uint64_t folding_constant(std::size_t bits) { return std::uint64_t{power_of_x(bits - 1)} << 32; }

#define HOLDFAST_CLMUL __attribute__((target("avx512f,avx512vl,avx512dq,vpclmulqdq,pclmul,sse4.2")))

struct Folding {
  std::uint64_t first;  // for the first 64 bits of 128
  std::uint64_t last;
};
constexpr Folding folding_over(std::size_t bits) { return {folding_constant(bits + 64), folding_constant(bits)}; }
constexpr Folding over_128 = folding_over(128);
constexpr Folding over_512 = folding_over(512);
constexpr Folding over_2048 = folding_over(2048);

HOLDFAST_CLMUL inline __m128i constants_of(const Folding& folding) {
  return _mm_set_epi64x(static_cast<long long>(folding.last), static_cast<long long>(folding.first));
}
HOLDFAST_CLMUL inline __m512i fold(__m512i bits, __m512i constants, __m512i next) {
  constexpr int a_xor_b_xor_c = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(bits, constants, 0x00),
                                   _mm512_clmulepi64_epi128(bits, constants, 0x11), next, a_xor_b_xor_c);
}
HOLDFAST_CLMUL inline __m128i fold(__m128i bits, __m128i constants, __m128i next) {
  return _mm_xor_si128(
      next, _mm_xor_si128(_mm_clmulepi64_si128(bits, constants, 0x00), _mm_clmulepi64_si128(bits, constants, 0x11)));
}

HOLDFAST_CLMUL inline __m512i load(const unsigned char* from) { return _mm512_loadu_si512(from); }

HOLDFAST_CLMUL std::uint32_t update_clmul(std::uint32_t state, const unsigned char* data, std::size_t bytes) {
  constexpr std::size_t stride = 256;
  if (bytes < stride) return update_sse42(state, data, bytes);
  const __m512i by_512 = _mm512_broadcast_i64x2(constants_of(over_512));
  const __m512i by_2048 = _mm512_broadcast_i64x2(constants_of(over_2048));
  __m512i a = _mm512_xor_si512(load(data), _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  __m512i b = load(data + 64);
  __m512i c = load(data + 128);
  __m512i d = load(data + 192);
  for (data += stride, bytes -= stride; bytes >= stride; data += stride, bytes -= stride) {
    a = fold(a, by_2048, load(data));
    b = fold(b, by_2048, load(data + 64));
    c = fold(c, by_2048, load(data + 128));
    d = fold(d, by_2048, load(data + 192));
  }
  a = fold(fold(fold(a, by_512, b), by_512, c), by_512, d);
  for (; bytes >= 64; data += 64, bytes -= 64) a = fold(a, by_512, load(data));
  const __m128i by_128 = constants_of(over_128);
  __m128i last = fold(_mm512_castsi512_si128(a), by_128, _mm512_extracti64x2_epi64(a, 1));
  last = fold(last, by_128, _mm512_extracti64x2_epi64(a, 2));
  last = fold(last, by_128, _mm512_extracti64x2_epi64(a, 3));
  std::uint64_t wide = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_extract_epi64(last, 0)));
  wide = _mm_crc32_u64(wide, static_cast<std::uint64_t>(_mm_extract_epi64(last, 1)));
  return update_sse42(static_cast<std::uint32_t>(wide), data, bytes);
}

HOLDFAST_CLMUL Crcs of_each_clmul(Crcs crcs, const Messages& messages, std::size_t bytes) {
  constexpr std::size_t long_bytes = 512;  // from here on folding one is faster than the instruction is for four
  return bytes < long_bytes ? of_each_sse42(crcs, messages, bytes) : one_by_one<update_clmul>(crcs, messages, bytes);
}

#endif

// Nothing of this file is made before it is wanted: objects of other files may take checksums before main, and before this
// file's turn.
ChecksumWay checksum_way(std::size_t number) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_sse42 = __builtin_cpu_supports("sse4.2") != 0;
  const bool has_clmul = has_sse42 && __builtin_cpu_supports("pclmul") != 0 &&
                         __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0 &&
                         __builtin_cpu_supports("vpclmulqdq") != 0;
  const ChecksumWay ways[] = {{"clmul", update_clmul, of_each_clmul, has_clmul},
                              {"sse4.2", update_sse42, of_each_sse42, has_sse42},
                              {"portable", update_portable, one_by_one<update_portable>, true}};
#else
  const ChecksumWay ways[] = {{"clmul", nullptr, nullptr, false},
                              {"sse4.2", nullptr, nullptr, false},
                              {"portable", update_portable, one_by_one<update_portable>, true}};
#endif
  return ways[number];
}

const ChecksumWay& best_way() {
  static const ChecksumWay best = [] {
    std::size_t number = 0;
    while (!checksum_way(number).runs_here) ++number;
    return checksum_way(number);
  }();
  return best;
}

std::uint32_t update(std::uint32_t state, const void* data, std::size_t bytes) {
  return best_way().update(state, static_cast<const unsigned char*>(data), bytes);
}

}  // namespace

const ChecksumWay checksum_ways[3] = {checksum_way(0), checksum_way(1), checksum_way(2)};

std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) { return ~update(~crc, data, bytes); }

Crcs crc32c_of_each(Crcs crcs, const Messages& messages, std::size_t bytes) {
  return best_way().of_each(crcs, messages, bytes);
}

void PartsChecksum::add(std::size_t offset, const void* data, std::size_t bytes) {
  sum_.fetch_xor(advance(update(0, data, bytes), message_bytes_ - offset - bytes), std::memory_order_relaxed);
}

std::uint32_t PartsChecksum::value() const {
  return ~(advance(~seed_, message_bytes_) ^ sum_.load(std::memory_order_relaxed));
}

}  // namespace holdfast

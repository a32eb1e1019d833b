// Counter-based random bits: a pure function of what they are for, with no state to save or to advance.
//
// A 64-bit key is derived for each row (four rounds of a 64-bit mixer), and 32 bits for each element of the row from
// the key and the element's number (one 32-bit mixer, cheap in vectors). The mixers are David Stafford's "Mix13" of
// MurmurHash3's 64-bit finaliser (the one in SplitMix64) and TheIronBorn's 32-bit constants from Chris Wellons's
// hash-prospector. Good for initial weights and for stochastic rounding, where each bit is used once; this is no
// cryptography, and no generator for long simulations.
//
// All functions are `static`: translation units compiled for different instruction sets include this header, and the
// linker must not give one of them the other's copy.
#pragma once

#include <cstdint>

namespace holdfast::counter_rng {

// What bits are for: keeps the streams of one seed apart.
inline constexpr std::uint64_t initial_values = 0x696e697469616c00u;
inline constexpr std::uint64_t stochastic_rounding = 0x726f756e64696e67u;
inline constexpr std::uint64_t shards_of_keys = 0x6b65792073686172u;
inline constexpr std::uint64_t admission = 0x61646d697373696fu;

static inline std::uint64_t mix64(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The key of a longer tuple: key(a, b, c) = absorb(absorb(absorb(purpose, a), b), c).
static inline std::uint64_t absorb(std::uint64_t key, std::uint64_t value) {
  return mix64((key + 0x9e3779b97f4a7c15u) ^ value);
}

// 32 bits for one element. Word is std::uint32_t or a vector of them: one lane per element.
template <class Word>
static inline Word element_bits(std::uint64_t row_key, Word element) {
  Word x = element * 0x9e3779b9u + static_cast<std::uint32_t>(row_key);
  x = (x ^ (x >> 16)) * 0x21f0aaadu;
  x = x ^ static_cast<std::uint32_t>(row_key >> 32);
  x = (x ^ (x >> 15)) * 0x735a2d97u;
  return x ^ (x >> 15);
}

}  // namespace holdfast::counter_rng

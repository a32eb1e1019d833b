#include "base/text_hash.h"

#include <bit>
#include <cstring>

namespace holdfast {

namespace {

static_assert(std::endian::native == std::endian::little, "words are read as they lie");

constexpr std::uint64_t prime_1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t prime_2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t prime_3 = 0x165667B19E3779F9;
constexpr std::uint64_t prime_4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t prime_5 = 0x27D4EB2F165667C5;

template <class Word>
std::uint64_t word_at(const std::uint8_t* text) {
  Word word;
  std::memcpy(&word, text, sizeof(word));
  return word;
}

std::uint64_t round(std::uint64_t sum, std::uint64_t lane) { return std::rotl(sum + lane * prime_2, 31) * prime_1; }

std::uint64_t merged(std::uint64_t hash, std::uint64_t sum) { return (hash ^ round(0, sum)) * prime_1 + prime_4; }

// Of the stripes of 32 bytes at the text's beginning.
std::uint64_t hash_of_stripes(const std::uint8_t* text, const std::uint8_t* end, std::uint64_t seed) {
  std::uint64_t sums[4] = {seed + prime_1 + prime_2, seed + prime_2, seed, seed - prime_1};
  for (; text != end; text += 32) {
    for (std::size_t lane = 0; lane < 4; ++lane)
      sums[lane] = round(sums[lane], word_at<std::uint64_t>(text + 8 * lane));
  }
  std::uint64_t hash = std::rotl(sums[0], 1) + std::rotl(sums[1], 7) + std::rotl(sums[2], 12) + std::rotl(sums[3], 18);
  for (const std::uint64_t sum : sums) hash = merged(hash, sum);
  return hash;
}

}  // namespace

std::uint64_t xxh64(const std::uint8_t* text, std::size_t bytes, std::uint64_t seed) {
  const std::size_t in_stripes = bytes / 32 * 32;
  std::uint64_t hash = in_stripes != 0 ? hash_of_stripes(text, text + in_stripes, seed) : seed + prime_5;
  hash += bytes;
  std::size_t at = in_stripes;
  for (; at + 8 <= bytes; at += 8) {
    hash = std::rotl(hash ^ round(0, word_at<std::uint64_t>(text + at)), 27) * prime_1 + prime_4;
  }
  if (at + 4 <= bytes) {
    hash = std::rotl(hash ^ (word_at<std::uint32_t>(text + at) * prime_1), 23) * prime_2 + prime_3;
    at += 4;
  }
  for (; at < bytes; ++at) hash = std::rotl(hash ^ (text[at] * prime_5), 11) * prime_1;
  hash = (hash ^ (hash >> 33)) * prime_2;
  hash = (hash ^ (hash >> 29)) * prime_3;
  return hash ^ (hash >> 32);
}

bool hash_texts(const std::uint8_t* data, std::size_t bytes, const std::int64_t* starts, const std::int64_t* lengths,
                std::size_t num_texts, std::int64_t* hashes) {
  const auto end = static_cast<std::int64_t>(bytes);
  for (std::size_t i = 0; i < num_texts; ++i) {
    if (starts[i] < 0 || lengths[i] < 0 || starts[i] > end || lengths[i] > end - starts[i]) return false;
  }
  for (std::size_t i = 0; i < num_texts; ++i) {
    hashes[i] = static_cast<std::int64_t>(xxh64(data + starts[i], static_cast<std::size_t>(lengths[i]), 0));
  }
  return true;
}

}  // namespace holdfast

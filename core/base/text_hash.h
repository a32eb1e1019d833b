// XXH64 of texts, as its specification has it (xxHash, doc/xxhash_spec.md 0.1.1): what the keys of texts are, so it never
// changes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace holdfast {

std::uint64_t xxh64(const std::uint8_t* text, std::size_t bytes, std::uint64_t seed);

// hashes[i] is that of the `lengths[i]` bytes at data + starts[i], with the seed 0. Whether a text lies beyond the
// `bytes` of data is looked at first of all: then nothing is written, and the answer is false.
bool hash_texts(const std::uint8_t* data, std::size_t bytes, const std::int64_t* starts, const std::int64_t* lengths,
                std::size_t num_texts, std::int64_t* hashes);

}  // namespace holdfast

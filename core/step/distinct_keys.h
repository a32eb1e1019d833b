// Distinct keys: those of a batch's ids, numbered in the order in which they come first.
//
// What is looked up for each key, and not for each of its occurrences, is looked up by these numbers: the map is one of
// a batch's keys alone, which the processor's own caches hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace holdfast {

class DistinctKeys {
 public:
  // seed: of their hashes, so that nobody who chooses keys chooses where they go.
  // Forgets those that there were; num_ids are going to be added, at most.
  void begin(std::uint64_t seed, std::size_t num_ids);
  void add(std::span<const std::int64_t> ids);

  std::span<const std::int64_t> keys() const { return {keys_.data(), num_keys_}; }
  std::span<const std::uint32_t> counts() const { return {counts_.data(), num_keys_}; }  // of each key's occurrences
  std::span<const std::uint32_t> number_of() const { return {number_of_.data(), num_ids_}; }  // each occurrence's key

 private:
  // Of 64 bits: the upper half of a key's hash, by whose upper bits it is found, and its number + 1. 0: empty.
  using Slot = std::uint64_t;

  void grow();

  std::uint64_t seed_ = 0;
  unsigned shift_ = 0;  // a hash's first slot is hash >> shift_
  std::vector<Slot> slots_;
  std::vector<Slot> outgrown_;
  std::size_t num_ids_ = 0;
  std::size_t num_keys_ = 0;
  // Longer than that: their memory is the thread's, for all batches.
  std::vector<std::int64_t> keys_;
  std::vector<std::uint32_t> counts_;
  std::vector<std::uint32_t> number_of_;
};

}  // namespace holdfast

// Victim cache: which rows that left a scratchpad for want of room are in its victim memory, and where (Jouppi, ISCA 1990).
//
// Rows lie in sets of eight places, of which the one that was filled first is overwritten first. A set's tags fill a cache
// line: to ask for a row takes one miss of the processor's caches, and DRAM has eight bytes and an eighth for each place.
//
// Invariants
// - A row is in the scratchpad or here, never in both: it comes when it leaves there, and leaves when it is wanted there.
//   So what is here is its newest version, as long as whoever changes rows below drops them here.
// - Which rows are here is a function of the calls made, and decides where a row is read from, never what it is.
// - Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/counter_rng.h"
#include "base/huge_array.h"
#include "scratchpad/shelf.h"
#include "scratchpad/victim_memory.h"

namespace holdfast {

class VictimCache {
 public:
  // Of rows of one size: the places of a shelf's.
  struct Ways {
    std::byte* begin;
    std::uint64_t row_bytes;
    std::uint64_t num_sets;
    HugeArray<std::uint64_t> tags;  // one more than the key of the row in a place; 0: there is none
    HugeArray<std::uint8_t> hands;  // of each set, the place whose turn it is to be overwritten
  };
  static constexpr std::uint64_t num_ways = 8;

  // num_sets: of each shelf, as `victim_sets` shares the memory out.
  VictimCache(const VictimMemory& memory, std::span<const std::unique_ptr<Shelf>> shelves,
              std::span<const std::uint64_t> num_sets);

  bool has_room(std::size_t shelf) const { return ways_[shelf].num_sets != 0; }
  std::uint64_t num_sets() const;
  std::uint64_t num_rows() const { return num_sets() * num_ways; }  // that there is room for
  Dial* dial() const { return memory_.dial(); }

  // The row of `key` leaves, if it is here: where its values lie until something is put there.
  const std::byte* take(std::size_t shelf, std::uint64_t key);
  // Where the values of the row of `key` are to lie, which is not here.
  std::byte* put(std::size_t shelf, std::uint64_t key);
  // Asks for the memory that one of these is going to read.
  void prefetch(std::size_t shelf, std::uint64_t key) const {
    const Ways& ways = ways_[shelf];
    __builtin_prefetch(&ways.tags[set_of(ways, key) * num_ways], 1);
  }

  // DRAM that so many sets take.
  static constexpr std::uint64_t dram_bytes(std::uint64_t num_sets) { return num_sets * (num_ways * 8 + 1); }

 private:
  static std::uint64_t set_of(const Ways& ways, std::uint64_t key) {
    const auto hash = static_cast<unsigned __int128>(counter_rng::mix64(key + 1));
    return static_cast<std::uint64_t>(hash * ways.num_sets >> 64);
  }

  const VictimMemory& memory_;
  std::vector<Ways> ways_;  // by shelf
};

// How a scratchpad's memory and a victim cache's are shared out. The tags count towards the scratchpad's; victims' memory is
// for the shelves whose rows do not all fit.
struct VictimShelving {
  Shelving shelving;
  std::vector<std::uint64_t> num_sets;  // of each shelf
};
// Keeps pointers to the tables. Throws config where `bytes` has no room for the tags.
VictimShelving shelve_with_victims(const std::vector<RowTable>& tables, std::uint64_t bytes,
                                   std::uint64_t victim_bytes);

}  // namespace holdfast

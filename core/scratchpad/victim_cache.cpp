#include "scratchpad/victim_cache.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "base/error.h"

namespace holdfast {
namespace {

// Of each shelf, where it wants any.
std::vector<std::uint64_t> share_out_sets(std::uint64_t bytes, std::span<const Shelving::Size> sizes,
                                          const std::vector<bool>& wants) {
  constexpr std::uint64_t num_ways = VictimCache::num_ways;
  std::vector<std::size_t> wanting;
  std::vector<Want> wanted;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (!wants[i]) continue;
    wanting.push_back(i);
    wanted.push_back({(sizes[i].num_rows + num_ways - 1) / num_ways, sizes[i].row_bytes() * num_ways});
  }
  const std::vector<std::uint64_t> granted = share_out(bytes, wanted);
  std::vector<std::uint64_t> num_sets(sizes.size());
  for (std::size_t k = 0; k < wanting.size(); ++k) num_sets[wanting[k]] = granted[k];
  return num_sets;
}

}  // namespace

VictimCache::VictimCache(const VictimMemory& memory, std::span<const std::unique_ptr<Shelf>> shelves,
                         std::span<const std::uint64_t> num_sets)
    : memory_(memory) {
  std::byte* begin = memory.data();
  for (std::size_t i = 0; i < shelves.size(); ++i) {
    const std::uint64_t row_bytes = shelves[i]->weight_bytes + shelves[i]->state_bytes;
    ways_.push_back({begin, row_bytes, num_sets[i], HugeArray<std::uint64_t>(num_sets[i] * num_ways),
                     HugeArray<std::uint8_t>(num_sets[i])});
    begin += num_sets[i] * num_ways * row_bytes;
  }
}

std::uint64_t VictimCache::num_sets() const {
  return std::accumulate(ways_.begin(), ways_.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const Ways& ways) { return sum + ways.num_sets; });
}

const std::byte* VictimCache::take(std::size_t shelf, std::uint64_t key) {
  const Ways& ways = ways_[shelf];
  const std::uint64_t first = set_of(ways, key) * num_ways;
  for (std::uint64_t place = first; place < first + num_ways; ++place) {
    if (ways.tags[place] != key + 1) continue;
    ways.tags[place] = 0;
    return ways.begin + place * ways.row_bytes;
  }
  return nullptr;
}

std::byte* VictimCache::put(std::size_t shelf, std::uint64_t key) {
  const Ways& ways = ways_[shelf];
  const std::uint64_t set = set_of(ways, key);
  std::uint64_t* const tags = &ways.tags[set * num_ways];
  const std::uint64_t* const free = std::find(tags, tags + num_ways, std::uint64_t{0});
  auto way = static_cast<std::uint64_t>(free - tags);
  if (way == num_ways) {
    way = ways.hands[set];
    ways.hands[set] = static_cast<std::uint8_t>((way + 1) % num_ways);
  }
  tags[way] = key + 1;
  return ways.begin + (set * num_ways + way) * ways.row_bytes;
}

// Tags take room from slots, so that a shelf that had room for all its rows may have none for some any more.
VictimShelving shelve_with_victims(const std::vector<RowTable>& tables, std::uint64_t bytes,
                                   std::uint64_t victim_bytes) {
  VictimShelving both{shelve(tables, bytes), {}};
  both.num_sets.resize(both.shelving.shelves.size());
  if (victim_bytes == 0) return both;
  std::vector<bool> wants(both.num_sets.size());
  while (true) {
    bool more = false;
    for (std::size_t i = 0; i < wants.size(); ++i) {
      const Shelving::Size& size = both.shelving.shelves[i];
      if (wants[i] || size.num_slots == size.num_rows) continue;
      wants[i] = more = true;
    }
    if (!more) return both;
    both.num_sets = share_out_sets(victim_bytes, both.shelving.shelves, wants);
    const std::uint64_t tags =
        VictimCache::dram_bytes(std::accumulate(both.num_sets.begin(), both.num_sets.end(), std::uint64_t{0}));
    if (tags >= bytes) {
      throw Error(ErrorKind::config, "what says where victims are takes " + std::to_string(tags) +
                                         " bytes of DRAM, and "
                                         "scratchpad_bytes = " +
                                         std::to_string(bytes) +
                                         "; make scratchpad_bytes larger or victims.bytes smaller");
    }
    both.shelving = shelve(tables, bytes - tags);
  }
}

}  // namespace holdfast

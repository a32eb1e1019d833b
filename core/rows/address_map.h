// Address map: of a home whose rows lie by first touch, which image each row has. Addresses are given in order, from 0 on.
//
// Invariants
// - A row's address never changes, and no two rows have the same.
// - Rows are in chapters of 16384. A chapter is a block of memory, made anew when rows are added: so it is never larger than
//   it need be, and as its rows are few or many it names them in the way that takes least. Addresses have two bytes while
//   all of a chapter's are that small, then three, then four.
//     few:   the rows' numbers, two bytes each, ascending; then their addresses
//     some:  where the rows of each 256 begin, two bytes each; then for each of these its rows, a byte each, ascending, and
//            their addresses
//     many:  for each 256 a bit for every row, and how many come before, two bytes; then the addresses, by row
//   A row that is looked for is found after one or two misses of the processor's caches, as a rule.
// - What fails for want of memory changes nothing.
// - Not thread-safe, but for `prepare`, beside which others may look.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/huge_array.h"

namespace holdfast {

class AddressMap {
 public:
  static constexpr std::uint64_t most_addresses = std::numeric_limits<std::uint32_t>::max();
  static constexpr std::size_t chapter_rows = 16384;

  explicit AddressMap(std::uint64_t num_rows) : chapters_(num_rows / chapter_rows + 1) {}
  ~AddressMap();
  AddressMap(const AddressMap&) = delete;
  AddressMap& operator=(const AddressMap&) = delete;

  std::optional<std::uint64_t> find(std::uint64_t row) const;
  // Asks for the memory that a call for `row` is going to read first.
  void prefetch(std::uint64_t row) const;
  // The first row at or after `row` that has an address.
  std::optional<std::uint64_t> next(std::uint64_t row) const;

  class Additions;
  // What gives these rows, which have none and are all different, the next addresses, in their order. There are fewer
  // than most_addresses then.
  Additions prepare(std::span<const std::uint64_t> rows) const;
  // Nothing was added since they were prepared. What the map does not need any more goes with them.
  void add(Additions& additions) noexcept;

  class Loading;

  // How many rows have one: the next address.
  std::uint64_t size() const { return size_; }
  std::size_t memory_bytes() const { return memory_bytes_; }
  // Of a chapter that has rows, the mean.
  std::size_t chapter_bytes() const;

 private:
  // All zeros: none of its rows has an address.
  struct Chapter {
    std::byte* block;
    std::uint16_t count_less_one;
    std::uint8_t width;  // of an address, in bytes

    std::size_t count() const { return block == nullptr ? 0 : std::size_t{count_less_one} + 1; }
  };
  static_assert(sizeof(Chapter) == 16);
  // What is added to a chapter.
  struct Addition {
    std::uint64_t row;
    std::uint32_t address;
  };
  struct Page;  // a chapter, spread out

  static std::size_t bytes_of(std::size_t count, std::size_t width);
  static std::size_t bytes_of(const Chapter& chapter) { return bytes_of(chapter.count(), chapter.width); }
  static Chapter make(std::size_t count, std::size_t width);
  static Chapter pack(Page& page, std::uint32_t last_address);
  static void spread(const Chapter& chapter, Page& page);
  static Chapter with(const Chapter& chapter, std::span<const Addition> added, Page& page);
  static Chapter with_more_bits(const Chapter& chapter, std::span<const Addition> added);
  static std::optional<std::size_t> next_in(const Chapter& chapter, std::size_t key);

  HugeArray<Chapter> chapters_;
  std::uint64_t size_ = 0;
  std::size_t memory_bytes_ = 0;
  std::size_t num_chapters_ = 0;  // that have rows
};

// Chapters as they are going to be; once they were added, as they were.
class AddressMap::Additions {
 public:
  Additions() = default;
  ~Additions();
  Additions(Additions&& other) noexcept
      : chapters_(std::exchange(other.chapters_, {})), num_rows_(std::exchange(other.num_rows_, 0)) {}
  Additions& operator=(Additions&&) = delete;

 private:
  friend class AddressMap;

  std::vector<std::pair<std::size_t, Chapter>> chapters_;
  std::uint64_t num_rows_ = 0;
};

// Fills a map that has no rows: they are put in in any order, by several threads, each of which has a part of its own; then
// all chapters are made at once. Rows of a chapter are gathered first, in pieces of memory that are chained, so that what is
// written at random lies in the processor's caches. An entry names a row of the chapter and the lower bits of its address;
// one of its own says the upper ones where they are others than before, which is seldom where addresses ascend.
class AddressMap::Loading {
 public:
  // Of each part, what its rows are gathered in; whoever fills one map after another keeps it, and is given no new pages.
  using Memory = std::vector<HugeArray<std::uint32_t>>;

  // With as many parts as there is memory for.
  Loading(AddressMap& map, std::uint64_t num_rows, Memory& memory);

  // Some rows of consecutive addresses from one on. Where their entries go is asked for first, since writes
  // reach the caches in their order and each would wait for its line.
  void put(std::size_t part, std::span<const std::uint64_t> rows, std::uint64_t address) {
    Part& to = parts_[part];
    for (const std::uint64_t row : rows) __builtin_prefetch(to.entries + to.chains[row / chapter_rows].end, 1);
    for (const std::uint64_t row : rows) {
      Chain& chain = to.chains[row / chapter_rows];
      const auto upper = static_cast<std::uint32_t>(address >> lower_bits);
      if (chain.upper != upper) {
        append(to, chain, is_upper | upper);
        chain.upper = upper;
      }
      append(to, chain, static_cast<std::uint32_t>(row % chapter_rows << lower_bits | address++ % (1 << lower_bits)));
    }
  }
  // Returns a row that is there twice; then the map has none.
  std::optional<std::uint64_t> finish();

 private:
  static constexpr std::size_t piece_entries = 256;  // the last one says which piece comes next
  static constexpr std::uint64_t nowhere = piece_entries - 1;
  static constexpr unsigned lower_bits = 17;  // of an address, beside the 14 that say which row of the chapter it is
  static constexpr std::uint32_t is_upper = std::uint32_t{1} << 31;

  // What a part has of a chapter.
  struct Chain {
    std::uint64_t end = nowhere;  // where the next entry goes
    std::uint32_t first_piece = 0;
    std::uint32_t upper = 0;  // bits of the address that came last
  };
  struct Part {
    std::uint32_t* entries;
    std::vector<Chain> chains;  // of each chapter
    std::uint32_t num_pieces = 1;  // the first one is no chapter's
  };

  // What all parts have of it; nothing where they have no row.
  struct Gathered {
    std::optional<std::uint32_t> last_address;  // the greatest
    std::optional<std::uint64_t> twice;  // a row
  };

  static void append(Part& part, Chain& chain, std::uint32_t entry) {
    if (chain.end % piece_entries == nowhere) begin_piece(part, chain);
    part.entries[chain.end++] = entry;
  }
  static void begin_piece(Part& part, Chain& chain);
  Gathered gather(std::size_t chapter, Page& page) const;

  AddressMap& map_;
  std::vector<Part> parts_;
};

}  // namespace holdfast

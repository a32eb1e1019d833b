#include "rows/address_map.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "base/parallel.h"

namespace holdfast {
namespace {

constexpr std::size_t group_rows = 256;
constexpr std::size_t num_groups = AddressMap::chapter_rows / group_rows;
constexpr std::size_t word_bits = 64;
constexpr std::size_t group_words = group_rows / word_bits;
constexpr std::size_t word_bytes = sizeof(std::uint64_t);

// Of each way: how many rows a chapter has at most, and how long it is without its addresses.
constexpr std::size_t starts_bytes = num_groups * sizeof(std::uint16_t);
constexpr std::size_t bits_bytes = group_words * word_bytes + sizeof(std::uint16_t);  // of a group
constexpr std::size_t most_few = starts_bytes;  // there both ways take as much
constexpr std::size_t most_some = num_groups * bits_bytes - starts_bytes;

constexpr std::size_t padding = 4;  // addresses are read by four bytes

template <class T>
T load(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

template <class T>
void store(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

std::uint32_t address_at(const std::byte* addresses, std::size_t i, std::size_t width) {
  return load<std::uint32_t>(addresses + i * width) & ~std::uint32_t{0} >> (4 - width) * 8;
}

// Those after it are written later.
void put_address(std::byte* addresses, std::size_t i, std::size_t width, std::uint32_t address) {
  store(addresses + i * width, address);
}

std::size_t width_of(std::uint64_t address) {
  return address < std::uint64_t{1} << 16 ? 2 : address < std::uint64_t{1} << 24 ? 3 : 4;
}

std::size_t start_of(const std::byte* block, std::size_t group) {
  return load<std::uint16_t>(block + group * sizeof(std::uint16_t));
}

std::size_t end_of(const std::byte* block, std::size_t group, std::size_t count) {
  return group + 1 == num_groups ? count : start_of(block, group + 1);
}

std::uint64_t word_of(const std::byte* block, std::size_t group, std::size_t word) {
  return load<std::uint64_t>(block + group * bits_bytes + word * word_bytes);
}

// Of a chapter of many rows, how many come before that one.
std::size_t rank_of(const std::byte* block, std::size_t key) {
  const std::size_t group = key / group_rows;
  const std::size_t bit = key % group_rows;
  int rank = load<std::uint16_t>(block + group * bits_bytes + group_words * word_bytes);
  for (std::size_t word = 0; word < bit / word_bits; ++word) rank += std::popcount(word_of(block, group, word));
  const std::uint64_t below = (std::uint64_t{1} << bit % word_bits) - 1;
  return static_cast<std::size_t>(rank + std::popcount(word_of(block, group, bit / word_bits) & below));
}

// Of a chapter of few rows, the first that is not before `key`.
std::size_t first_few(const std::byte* keys, std::size_t count, std::size_t key) {
  std::size_t begin = 0;
  for (std::size_t left = count; left != 0;) {
    const std::size_t half = left / 2;
    const bool is_before = load<std::uint16_t>(keys + (begin + half) * sizeof(std::uint16_t)) < key;
    begin = is_before ? begin + half + 1 : begin;
    left = is_before ? left - half - 1 : half;
  }
  return begin;
}

}  // namespace

struct AddressMap::Page {
  std::array<std::uint64_t, chapter_rows / word_bits> bits{};
  std::array<std::uint32_t, chapter_rows> addresses;  // of rows that have a bit

  // Returns whether it was not there.
  bool put(std::size_t key, std::uint32_t address) {
    std::uint64_t& word = bits[key / word_bits];
    const std::uint64_t bit = std::uint64_t{1} << key % word_bits;
    addresses[key] = address;
    const bool is_new = (word & bit) == 0;
    word |= bit;
    return is_new;
  }
  std::size_t count() const {
    std::size_t rows = 0;
    for (const std::uint64_t word : bits) rows += static_cast<std::size_t>(std::popcount(word));
    return rows;
  }
  void prefetch(std::size_t key) const { __builtin_prefetch(&addresses[key], 1); }
  // Of `num_words` words from one on, ascending.
  template <class Visit>
  void visit(std::size_t word, std::size_t num_words, Visit&& visit_row) const {
    for (const std::size_t end = word + num_words; word < end; ++word) {
      for (std::uint64_t left = bits[word]; left != 0; left &= left - 1) {
        visit_row(word * word_bits + static_cast<std::size_t>(std::countr_zero(left)));
      }
    }
  }
  void clear() { bits.fill(0); }
};

AddressMap::~AddressMap() {
  if (size_ == 0) return;  // a look at chapters that were never touched would take memory
  for (const Chapter& chapter : chapters_) delete[] chapter.block;
}

AddressMap::Additions::~Additions() {
  for (const auto& [number, chapter] : chapters_) delete[] chapter.block;
}

std::size_t AddressMap::bytes_of(std::size_t count, std::size_t width) {
  if (count == 0) return 0;
  if (count <= most_few) return count * (sizeof(std::uint16_t) + width) + padding;
  if (count <= most_some) return starts_bytes + count * (1 + width) + padding;
  return num_groups * bits_bytes + count * width + padding;
}

AddressMap::Chapter AddressMap::make(std::size_t count, std::size_t width) {
  return {new std::byte[bytes_of(count, width)], static_cast<std::uint16_t>(count - 1),
          static_cast<std::uint8_t>(width)};
}

std::optional<std::uint64_t> AddressMap::find(std::uint64_t row) const {
  const Chapter& chapter = chapters_[row / chapter_rows];
  const std::size_t count = chapter.count();
  if (count == 0) return std::nullopt;
  const std::size_t key = row % chapter_rows;
  const std::size_t group = key / group_rows;
  const std::byte* block = chapter.block;
  if (count > most_some) {
    const std::size_t bit = key % group_rows;
    if ((word_of(block, group, bit / word_bits) >> bit % word_bits & 1) == 0) return std::nullopt;
    return address_at(block + num_groups * bits_bytes, rank_of(block, key), chapter.width);
  }
  if (count > most_few) {
    const std::size_t start = start_of(block, group);
    const std::size_t in_group = end_of(block, group, count) - start;
    const std::byte* rows = block + starts_bytes + start * (1 + chapter.width);
    const void* at = std::memchr(rows, static_cast<int>(key % group_rows), in_group);
    if (at == nullptr) return std::nullopt;
    return address_at(rows + in_group, static_cast<std::size_t>(static_cast<const std::byte*>(at) - rows),
                      chapter.width);
  }
  const std::size_t at = first_few(block, count, key);
  if (at == count || load<std::uint16_t>(block + at * sizeof(std::uint16_t)) != key) return std::nullopt;
  return address_at(block + count * sizeof(std::uint16_t), at, chapter.width);
}

void AddressMap::prefetch(std::uint64_t row) const {
  const Chapter& chapter = chapters_[row / chapter_rows];
  const std::size_t count = chapter.count();
  if (count == 0) return;
  const std::size_t group = row % chapter_rows / group_rows;
  __builtin_prefetch(chapter.block + (count > most_some ? group * bits_bytes : group * sizeof(std::uint16_t)));
}

std::optional<std::size_t> AddressMap::next_in(const Chapter& chapter, std::size_t key) {
  const std::size_t count = chapter.count();
  const std::byte* block = chapter.block;
  if (count == 0) return std::nullopt;
  if (count <= most_few) {
    const std::size_t at = first_few(block, count, key);
    if (at == count) return std::nullopt;
    return load<std::uint16_t>(block + at * sizeof(std::uint16_t));
  }
  for (std::size_t group = key / group_rows, first = key % group_rows; group < num_groups; ++group, first = 0) {
    if (count <= most_some) {
      const std::size_t start = start_of(block, group);
      const std::byte* rows = block + starts_bytes + start * (1 + chapter.width);
      const std::byte* end = rows + (end_of(block, group, count) - start);
      const std::byte* at =
          std::find_if(rows, end, [&](std::byte b) { return std::to_integer<std::size_t>(b) >= first; });
      if (at != end) return group * group_rows + std::to_integer<std::size_t>(*at);
      continue;
    }
    std::uint64_t mask = ~std::uint64_t{0} << first % word_bits;
    for (std::size_t word = first / word_bits; word < group_words; ++word, mask = ~std::uint64_t{0}) {
      if (const std::uint64_t left = word_of(block, group, word) & mask; left != 0) {
        return group * group_rows + word * word_bits + static_cast<std::size_t>(std::countr_zero(left));
      }
    }
  }
  return std::nullopt;
}

std::optional<std::uint64_t> AddressMap::next(std::uint64_t row) const {
  std::size_t key = row % chapter_rows;
  for (std::size_t number = row / chapter_rows; number < chapters_.size(); ++number, key = 0) {
    if (const auto found = next_in(chapters_[number], key)) return number * chapter_rows + *found;
  }
  return std::nullopt;
}

// last_address: the greatest of the page's, which is empty afterwards.
AddressMap::Chapter AddressMap::pack(Page& page, std::uint32_t last_address) {
  const std::size_t count = page.count();
  const std::size_t width = width_of(last_address);
  const Chapter chapter = make(count, width);
  std::byte* const block = chapter.block;
  std::size_t done = 0;
  if (count > most_some) {
    std::byte* to = block + num_groups * bits_bytes;
    for (std::size_t group = 0; group < num_groups; ++group) {
      std::byte* const of_group = block + group * bits_bytes;
      std::memcpy(of_group, &page.bits[group * group_words], group_words * word_bytes);
      store(of_group + group_words * word_bytes,
            static_cast<std::uint16_t>((static_cast<std::size_t>(to - block) - num_groups * bits_bytes) / width));
      page.visit(group * group_words, group_words, [&](std::size_t key) {
        store(to, page.addresses[key]);
        to += width;
      });
    }
  } else if (count > most_few) {
    std::byte* to = block + starts_bytes;
    for (std::size_t group = 0; group < num_groups; ++group) {
      store(block + group * sizeof(std::uint16_t), static_cast<std::uint16_t>(done));
      const std::size_t before = done;
      page.visit(group * group_words, group_words, [&](std::size_t key) {
        *to++ = static_cast<std::byte>(key % group_rows);
        ++done;
      });
      page.visit(group * group_words, group_words, [&, i = std::size_t{0}](std::size_t key) mutable {
        put_address(to, i++, width, page.addresses[key]);
      });
      to += (done - before) * width;
    }
  } else {
    page.visit(0, page.bits.size(), [&](std::size_t key) {
      store(block + done++ * sizeof(std::uint16_t), static_cast<std::uint16_t>(key));
    });
    page.visit(0, page.bits.size(), [&, i = std::size_t{0}](std::size_t key) mutable {
      put_address(block + count * sizeof(std::uint16_t), i++, width, page.addresses[key]);
    });
  }
  page.clear();
  return chapter;
}

void AddressMap::spread(const Chapter& chapter, Page& page) {
  const std::size_t count = chapter.count();
  const std::byte* block = chapter.block;
  if (count == 0) return;
  if (count <= most_few) {
    for (std::size_t i = 0; i < count; ++i) {
      page.put(load<std::uint16_t>(block + i * sizeof(std::uint16_t)),
               address_at(block + count * sizeof(std::uint16_t), i, chapter.width));
    }
    return;
  }
  for (std::size_t group = 0; group < num_groups; ++group) {
    if (count <= most_some) {
      const std::size_t start = start_of(block, group);
      const std::size_t in_group = end_of(block, group, count) - start;
      const std::byte* rows = block + starts_bytes + start * (1 + chapter.width);
      for (std::size_t i = 0; i < in_group; ++i) {
        page.put(group * group_rows + std::to_integer<std::size_t>(rows[i]),
                 address_at(rows + in_group, i, chapter.width));
      }
      continue;
    }
    std::size_t rank = rank_of(block, group * group_rows);
    for (std::size_t word = 0; word < group_words; ++word) {
      for (std::uint64_t left = word_of(block, group, word); left != 0; left &= left - 1) {
        page.put(group * group_rows + word * word_bits + static_cast<std::size_t>(std::countr_zero(left)),
                 address_at(block + num_groups * bits_bytes, rank++, chapter.width));
      }
    }
  }
}

// Ascending by row. The page is empty, before and afterwards.
AddressMap::Chapter AddressMap::with(const Chapter& chapter, std::span<const Addition> added, Page& page) {
  std::uint32_t last_address = 0;
  for (const Addition& addition : added) last_address = std::max(last_address, addition.address);
  if (chapter.count() > most_some && width_of(last_address) <= chapter.width) return with_more_bits(chapter, added);
  spread(chapter, page);
  for (const Addition& addition : added) page.put(addition.row % chapter_rows, addition.address);
  return pack(page, last_address);
}

// Addresses between two that are added are copied together.
AddressMap::Chapter AddressMap::with_more_bits(const Chapter& chapter, std::span<const Addition> added) {
  const std::size_t width = chapter.width;
  const Chapter more = make(chapter.count() + added.size(), width);
  constexpr std::size_t addresses_at = num_groups * bits_bytes;
  const std::byte* from = chapter.block + addresses_at;
  std::byte* to = more.block + addresses_at;
  std::memcpy(more.block, chapter.block, addresses_at);
  std::size_t copied = 0;
  const auto copy_up_to = [&](std::size_t end) {
    std::memcpy(to, from + copied * width, (end - copied) * width);
    to += (end - copied) * width;
    copied = end;
  };
  for (const Addition& addition : added) {
    const std::size_t key = addition.row % chapter_rows;
    copy_up_to(rank_of(chapter.block, key));
    store(to, addition.address);
    to += width;
    std::byte* const word = more.block + key / group_rows * bits_bytes + key % group_rows / word_bits * word_bytes;
    store(word, load<std::uint64_t>(word) | std::uint64_t{1} << key % word_bits);
  }
  copy_up_to(chapter.count());
  std::size_t rank = 0;
  for (std::size_t group = 0; group < num_groups; ++group) {
    store(more.block + group * bits_bytes + group_words * word_bytes, static_cast<std::uint16_t>(rank));
    for (std::size_t word = 0; word < group_words; ++word) {
      rank += static_cast<std::size_t>(std::popcount(word_of(more.block, group, word)));
    }
  }
  return more;
}

AddressMap::Additions AddressMap::prepare(std::span<const std::uint64_t> rows) const {
  std::vector<Addition> added;
  added.reserve(rows.size());
  for (const std::uint64_t row : rows) added.push_back({row, static_cast<std::uint32_t>(size_ + added.size())});
  std::ranges::sort(added, {}, &Addition::row);
  const auto page = std::make_unique<Page>();
  Additions additions;
  additions.chapters_.reserve(std::min(rows.size(), chapters_.size()));
  for (std::size_t begin = 0, end = 0; begin < added.size(); begin = end) {
    const std::size_t number = added[begin].row / chapter_rows;
    while (end < added.size() && added[end].row / chapter_rows == number) ++end;
    additions.chapters_.emplace_back(number,
                                     with(chapters_[number], std::span(added).subspan(begin, end - begin), *page));
  }
  additions.num_rows_ = rows.size();
  return additions;
}

void AddressMap::add(Additions& additions) noexcept {
  for (auto& [number, chapter] : additions.chapters_) {
    Chapter& old = chapters_[number];
    num_chapters_ += old.block == nullptr ? 1 : 0;
    memory_bytes_ += bytes_of(chapter) - bytes_of(old) + (old.block == nullptr ? sizeof(Chapter) : 0);
    std::swap(old, chapter);
  }
  size_ += additions.num_rows_;
}

std::size_t AddressMap::chapter_bytes() const { return num_chapters_ == 0 ? 0 : memory_bytes_ / num_chapters_; }

AddressMap::Loading::Loading(AddressMap& map, std::uint64_t num_rows, Memory& memory) : map_(map) {
  const std::size_t num_chapters = map.chapters_.size();
  const std::size_t most_entries = 2 * num_rows;  // upper bits before every row
  const std::size_t most_pieces =
      most_entries / (piece_entries - 1) + std::min<std::size_t>(num_rows, num_chapters) + 2;
  for (HugeArray<std::uint32_t>& entries : memory) {
    if (entries.size() < most_pieces * piece_entries) entries = HugeArray<std::uint32_t>(most_pieces * piece_entries);
    parts_.push_back({entries.data(), std::vector<Chain>(num_chapters)});
  }
}

void AddressMap::Loading::begin_piece(Part& part, Chain& chain) {
  const std::uint32_t piece = part.num_pieces++;
  (chain.end == nowhere ? chain.first_piece : part.entries[chain.end]) = piece;
  chain.end = piece * piece_entries;
}

// What is read and written at random is asked for some entries before it is needed.
AddressMap::Loading::Gathered AddressMap::Loading::gather(std::size_t chapter, Page& page) const {
  constexpr std::size_t entries_ahead = 16;
  Gathered gathered;
  for (const Part& part : parts_) {
    const Chain& chain = part.chains[chapter];
    if (chain.end == nowhere) continue;
    std::uint32_t upper = 0;
    std::uint32_t last_address = gathered.last_address.value_or(0);
    for (std::uint64_t begin = chain.first_piece * piece_entries;;) {
      const bool is_last = chain.end - begin < piece_entries;
      const std::uint64_t end = is_last ? chain.end : begin + nowhere;
      const std::uint64_t next = is_last ? begin : part.entries[end] * piece_entries;
      __builtin_prefetch(part.entries + next);
      for (std::uint64_t i = begin; i < end; ++i) {
        page.prefetch(part.entries[i + entries_ahead] >> lower_bits & (chapter_rows - 1));
        const std::uint32_t entry = part.entries[i];
        if ((entry & is_upper) != 0) {
          upper = entry << lower_bits;
          continue;
        }
        const std::size_t key = entry >> lower_bits;
        const std::uint32_t address = upper | entry % (1 << lower_bits);
        if (!page.put(key, address)) gathered.twice = chapter * chapter_rows + key;
        last_address = std::max(last_address, address);
      }
      if (is_last) break;
      begin = next;
    }
    gathered.last_address = last_address;
  }
  return gathered;
}

std::optional<std::uint64_t> AddressMap::Loading::finish() {
  constexpr std::size_t chapters_at_once = 64;
  const std::size_t num_chapters = map_.chapters_.size();
  std::atomic<std::uint64_t> num_rows{0};
  std::atomic<std::uint64_t> bytes{0};
  std::atomic<std::uint64_t> num_filled{0};
  std::atomic<std::uint64_t> twice{~std::uint64_t{0}};
  map_.size_ = AddressMap::most_addresses;  // from now on its destructor has something to do
  parallel_for((num_chapters + chapters_at_once - 1) / chapters_at_once, [&](std::size_t some) {
    const auto page = std::make_unique<Page>();
    for (std::size_t i = some * chapters_at_once; i < std::min(num_chapters, (some + 1) * chapters_at_once); ++i) {
      const Gathered gathered = gather(i, *page);
      if (gathered.twice) twice = *gathered.twice;
      if (!gathered.last_address) continue;
      Chapter& chapter = map_.chapters_[i];
      chapter = pack(*page, *gathered.last_address);
      num_rows += chapter.count();
      bytes += bytes_of(chapter) + sizeof(Chapter);
      ++num_filled;
    }
  });
  map_.size_ = num_rows;
  map_.memory_bytes_ = bytes;
  map_.num_chapters_ = num_filled;
  if (twice == ~std::uint64_t{0}) return std::nullopt;
  for (Chapter& chapter : map_.chapters_) delete[] std::exchange(chapter, {}).block;
  map_.size_ = 0;
  return twice.load();
}

}  // namespace holdfast

#include "routing/numbered_ids.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

namespace holdfast {

void NumberedIds::number(std::span<const std::int64_t> ids, std::uint64_t end_place) {
  const std::array<std::int64_t, 2> one_bag{0, static_cast<std::int64_t>(ids.size())};
  const FeatureInput input{{ids.data(), one_bag.data(), true, 1}, nullptr, 0, 0};
  plan_table({&input, 1}, end_place, Pooling::sum, plan_);
}

void NumberedIds::write(const BagCounts& counts, std::uint64_t end_place, std::uint32_t* to) const {
  const bool wide = words_of_place(end_place) == 2;
  for (const std::uint64_t place : plan_.rows) {
    *to++ = static_cast<std::uint32_t>(place);
    if (wide) *to++ = static_cast<std::uint32_t>(place >> 32);
  }
  const std::span<const std::uint32_t> numbers = plan_.position;
  if (!counts.numbers_are_short()) {
    std::copy(numbers.begin(), numbers.end(), to);
    return;
  }
  for (std::size_t i = 0; i + 1 < numbers.size(); i += 2) *to++ = numbers[i] | numbers[i + 1] << 16;
  if (numbers.size() % 2 != 0) *to = numbers.back();
}

void JoinedNumbers::join(std::span<const NumberedPart> parts, std::uint64_t num_rows, const Refuse& refuse) {
  const bool wide = words_of_place(num_rows) == 2;
  std::size_t num_places = 0;
  num_ids_ = 0;
  for (const NumberedPart& part : parts) {
    num_places += part.counts.distinct;
    num_ids_ += part.counts.ids;
  }
  places_.resize(num_places);
  if (number_of_.size() < num_ids_) number_of_.resize(num_ids_);
  std::uint64_t* place = places_.data();
  const auto word = [](std::int32_t bits) -> std::uint64_t { return static_cast<std::uint32_t>(bits); };
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const std::size_t count = parts[p].counts.distinct;
    const std::int32_t* const words = parts[p].words;
    for (std::size_t u = 0; u < count; ++u) {
      place[u] = wide ? word(words[2 * u]) | word(words[2 * u + 1]) << 32 : word(words[u]);
    }
    const std::span<const std::uint64_t> of_part(place, count);
    if (std::adjacent_find(of_part.begin(), of_part.end(), std::greater_equal<>()) != of_part.end()) {
      refuse(p, "places that do not ascend");
    }
    if (count != 0 && of_part.back() >= num_rows) {
      refuse(p, "place " + std::to_string(of_part.back()) + " is not below the table's " + std::to_string(num_rows));
    }
    place += count;
  }
  unite(parts);

  counts_.assign(rows_.size(), 0);
  std::uint32_t* number_of = number_of_.data();
  const std::uint32_t* row_of = row_of_.data();
  for (std::size_t p = 0; p < parts.size(); ++p) {
    const BagCounts& counts = parts[p].counts;
    const std::int32_t* const words = parts[p].words + counts.distinct * (wide ? std::size_t{2} : std::size_t{1});
    std::uint32_t largest = 0;
    if (counts.numbers_are_short()) {
      for (std::size_t i = 0; i < counts.ids; ++i) {
        number_of[i] = static_cast<std::uint32_t>(words[i / 2]) >> (i % 2 * 16) & 0xFFFF;
        largest = std::max(largest, number_of[i]);
      }
    } else {
      for (std::size_t i = 0; i < counts.ids; ++i) {
        number_of[i] = static_cast<std::uint32_t>(words[i]);
        largest = std::max(largest, number_of[i]);
      }
    }
    if (counts.ids != 0 && largest >= counts.distinct) {
      refuse(p, "number " + std::to_string(largest) + " of " + std::to_string(counts.distinct) + " places");
    }
    if (parts.size() > 1) {
      for (std::size_t i = 0; i < counts.ids; ++i) number_of[i] = row_of[number_of[i]];
    }
    for (std::size_t i = 0; i < counts.ids; ++i) ++counts_[number_of[i]];
    number_of += counts.ids;
    row_of += counts.distinct;
  }
  if (std::find(counts_.begin(), counts_.end(), 0u) != counts_.end()) refuse(0, "a place that no id has");
}

// rows_, and of several parts row_of_.
void JoinedNumbers::unite(std::span<const NumberedPart> parts) {
  if (parts.size() == 1) {
    std::swap(rows_, places_);
    return;
  }
  rows_.clear();
  auto first = places_.begin();
  for (const NumberedPart& part : parts) {
    const auto last = first + static_cast<std::ptrdiff_t>(part.counts.distinct);
    united_.clear();
    std::set_union(rows_.begin(), rows_.end(), first, last, std::back_inserter(united_));
    std::swap(rows_, united_);
    first = last;
  }
  row_of_.resize(places_.size());
  const std::uint64_t* place = places_.data();
  std::uint32_t* row_of = row_of_.data();
  for (const NumberedPart& part : parts) {
    std::uint32_t row = 0;
    for (const std::uint64_t* const end = place + part.counts.distinct; place != end; ++place) {
      while (rows_[row] != *place) ++row;
      *row_of++ = row;
    }
  }
}

}  // namespace holdfast

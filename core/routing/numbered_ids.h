// Numbered ids: a message's ids as distinct places and numbers of these (route_message.h), at either end.
//
// Invariants
// - What an owner makes of numbered ids is what it would make of the ids themselves: rows ascending, each once, and
//   lookups in their order.
// - Messages come from elsewhere: no number is used that has no place, and no place that no id has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "routing/route_message.h"
#include "step/plan.h"

namespace holdfast {

// A trainer's: of one owner and feature. It keeps its memory.
class NumberedIds {
 public:
  // ids: below end_place.
  void number(std::span<const std::int64_t> ids, std::uint64_t end_place);
  std::size_t num_distinct() const { return plan_.rows.size(); }
  // As `counts` of these ids says.
  void write(const BagCounts& counts, std::uint64_t end_place, std::uint32_t* to) const;

 private:
  TablePlan plan_;
};

// What a message says of one feature's ids.
struct NumberedPart {
  BagCounts counts;
  const std::int32_t* words;  // of the ids
};

// An owner's: the parts of a table, one after the other, as numbers of the same rows. It keeps its memory.
class JoinedNumbers {
 public:
  using Refuse = std::function<void(std::size_t part, const std::string& what)>;

  // refuse: throws.
  void join(std::span<const NumberedPart> parts, std::uint64_t num_rows, const Refuse& refuse);

  std::span<const std::uint64_t> rows() const { return rows_; }      // ascending
  std::span<const std::uint32_t> counts() const { return counts_; }  // of each row's lookups
  std::span<const std::uint32_t> number_of() const { return {number_of_.data(), num_ids_}; }

 private:
  void unite(std::span<const NumberedPart> parts);

  std::vector<std::uint64_t> places_;  // of all parts, one after the other
  std::vector<std::uint64_t> rows_;
  std::vector<std::uint64_t> united_;
  std::vector<std::uint32_t> row_of_;  // of each of places_
  std::vector<std::uint32_t> counts_;
  std::vector<std::uint32_t> number_of_;
  std::size_t num_ids_ = 0;
};

}  // namespace holdfast

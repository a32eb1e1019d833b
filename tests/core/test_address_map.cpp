// The address map against a plain map, dense and sparse.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "check.h"
#include "rows/address_map.h"

namespace holdfast {
namespace {

void check_equal(const AddressMap& map, const std::map<std::uint64_t, std::uint64_t>& model, std::uint64_t num_rows,
                 std::mt19937_64& random) {
  CHECK(map.size() == model.size());
  std::optional<std::uint64_t> row = map.next(0);
  for (const auto& [of_model, address] : model) {
    CHECK(row == of_model && map.find(of_model) == address);
    row = map.next(of_model + 1);
  }
  CHECK(!row);
  for (int i = 0; i < 1000; ++i) {
    const std::uint64_t any = random() % num_rows;
    const auto found = model.find(any);
    CHECK(map.find(any) == (found == model.end() ? std::nullopt : std::optional(found->second)));
    const auto next = model.lower_bound(any);
    CHECK(map.next(any) == (next == model.end() ? std::nullopt : std::optional(next->first)));
  }
}

void add(AddressMap& map, const std::vector<std::uint64_t>& rows) {
  AddressMap::Additions additions = map.prepare(rows);
  map.add(additions);
}

// Which has rows[i] at address i.
std::unique_ptr<AddressMap> load(std::uint64_t num_rows, const std::vector<std::uint64_t>& rows, std::size_t num_parts,
                                 std::optional<std::uint64_t>& twice) {
  auto map = std::make_unique<AddressMap>(num_rows);
  AddressMap::Loading::Memory memory(num_parts);
  AddressMap::Loading loading(*map, rows.size(), memory);
  for (std::size_t begin = 0; begin < rows.size(); begin += 70) {
    const std::size_t count = std::min<std::size_t>(70, rows.size() - begin);
    loading.put(begin / 700 % num_parts, std::span(rows).subspan(begin, count), begin);
  }
  twice = loading.finish();
  return map;
}

// Rows drawn from the first of `num_rows`: chapters have from few of them to nearly all.
void addresses_are_given_in_order_and_stay(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  struct Shape {
    std::uint64_t num_rows;
    std::uint64_t drawn_from;
    std::size_t most;
  };
  for (const Shape& shape :
       {Shape{1, 1, 1}, Shape{255, 255, 255}, Shape{20000, 20000, 19000}, Shape{20000, 20000, 60},
        Shape{100000, 100000, 90000}, Shape{1 << 20, 1 << 20, 20000}, Shape{1 << 20, 1 << 18, 9000},
        Shape{std::uint64_t{1} << 32, std::uint64_t{1} << 32, 20000}}) {
    check::context = std::to_string(shape.num_rows) + " rows, " + std::to_string(shape.most) + " at most";
    AddressMap map(shape.num_rows);
    std::map<std::uint64_t, std::uint64_t> model;
    const auto some_rows = [&](std::size_t count) {
      std::vector<std::uint64_t> rows;
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t row =
            i % 50 == 0 ? shape.num_rows - 1 - i / 50 % shape.num_rows : random() % shape.drawn_from;
        if (model.try_emplace(row, model.size()).second) rows.push_back(row);
      }
      return rows;
    };
    while (model.size() < shape.most) {
      add(map, some_rows(1 + random() % shape.most));
      check_equal(map, model, shape.num_rows, random);
    }
    // What is loaded is what was given, and goes on.
    std::vector<std::uint64_t> rows(model.size());
    for (const auto& [row, address] : model) rows[address] = row;
    std::optional<std::uint64_t> twice;
    const auto loaded = load(shape.num_rows, rows, 1 + random() % 3, twice);
    CHECK(!twice);
    CHECK(loaded->memory_bytes() == map.memory_bytes());
    check_equal(*loaded, model, shape.num_rows, random);
    add(*loaded, some_rows(2000));
    check_equal(*loaded, model, shape.num_rows, random);
    rows.push_back(rows[rows.size() / 2]);
    const auto empty = load(shape.num_rows, rows, 2, twice);
    CHECK(twice == rows.back());
    CHECK(empty->size() == 0 && !empty->next(0));
  }
}

// Addresses past 2^16 and 2^24, in chapters that have smaller ones, of each way in which a chapter names its rows.
[[maybe_unused]] void addresses_become_wider() {
  constexpr std::uint64_t num_rows = std::uint64_t{3} << 23;
  const auto nth_row = [](std::uint64_t i) { return i * 5 % num_rows; };  // prime to it: every row once
  AddressMap map(num_rows);
  std::vector<std::uint64_t> rows;
  constexpr std::uint64_t some = 1 << 19;
  constexpr std::uint64_t all = (std::uint64_t{1} << 24) + some;
  for (std::uint64_t done = 0; done < all; done += some) {
    rows.clear();
    for (std::uint64_t i = done; i < done + some; ++i) rows.push_back(nth_row(i));
    add(map, rows);
  }
  CHECK(map.size() == all);
  std::uint64_t num_right = 0;
  for (std::uint64_t i = 0; i < all; ++i) num_right += map.find(nth_row(i)) == i ? 1 : 0;
  CHECK(num_right == all);
  CHECK(!map.find(nth_row(all)));
}

// Rows few to a chapter and many, with addresses that need more bits than an entry has, put in from the last to the first and
// in leaps.
void rows_are_loaded_in_any_order(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const std::uint64_t num_rows : {std::uint64_t{1} << 32, std::uint64_t{700000}}) {
    check::context = "of " + std::to_string(num_rows) + " rows";
    std::vector<std::uint64_t> rows;
    for (std::uint64_t row = 0; rows.size() < 600000; row += 1 + random() % (num_rows / 600000)) rows.push_back(row);
    std::ranges::shuffle(rows, random);
    std::vector<std::size_t> order(rows.size() / 100);
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::reverse(order);
    std::shuffle(order.begin() + static_cast<std::ptrdiff_t>(order.size() / 2), order.end(), random);
    AddressMap::Loading::Memory memory(2);
    for (int again = 0; again < 2; ++again) {
      AddressMap loaded(num_rows);
      AddressMap::Loading loading(loaded, rows.size(), memory);
      for (const std::size_t i : order) loading.put(i % 3 % 2, std::span(rows).subspan(i * 100, 100), i * 100);
      CHECK(!loading.finish());
      CHECK(loaded.size() == rows.size());
      std::uint64_t num_right = 0;
      for (std::size_t i = 0; i < rows.size(); ++i) num_right += loaded.find(rows[i]) == i ? 1 : 0;
      CHECK(num_right == rows.size());
    }
  }
}

void a_touched_row_takes_few_bytes() {
  constexpr std::uint64_t num_rows = 1 << 20;
  for (const std::uint64_t every : {1, 2, 10, 64, 1000}) {
    check::context = "one row of " + std::to_string(every);
    AddressMap map(num_rows);
    std::vector<std::uint64_t> rows;
    for (std::uint64_t row = 0; row < num_rows; row += every) rows.push_back(row);
    add(map, rows);
    CHECK(map.memory_bytes() <= rows.size() * (every <= 2 ? 4 : 6));
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  addresses_are_given_in_order_and_stay(check::seed_from(argc, argv));
#if !defined(__SANITIZE_THREAD__)  // it has one thread, and many rows
  addresses_become_wider();
#endif
  rows_are_loaded_in_any_order(check::seed_from(argc, argv));
  a_touched_row_takes_few_bytes();
  return check::passed();
}

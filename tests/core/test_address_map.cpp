// The address map against a plain map, dense and sparse.
#include <cstdint>
#include <map>
#include <optional>
#include <random>
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

void addresses_are_given_in_order_and_stay(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  for (const std::uint64_t num_rows : {1ULL, 255ULL, 256ULL, 5000ULL, 1ULL << 32}) {
    check::context = std::to_string(num_rows) + " rows";
    AddressMap map(num_rows);
    std::map<std::uint64_t, std::uint64_t> model;
    for (std::uint64_t i = 0; i < std::min<std::uint64_t>(num_rows, 20000); ++i) {
      const std::uint64_t row = i % 3 == 0 ? num_rows - 1 - i / 3 : random() % num_rows;
      if (model.contains(row)) continue;
      const std::uint64_t address = map.add(row);
      CHECK(address == model.size());
      model[row] = address;
    }
    check_equal(map, model, num_rows, random);
    // What is loaded is what was given, and goes on.
    std::vector<std::uint64_t> rows(model.size());
    for (const auto& [row, address] : model) rows[address] = row;
    AddressMap loaded(num_rows);
    CHECK(!loaded.load(rows));
    check_equal(loaded, model, num_rows, random);
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const std::uint64_t row = random() % num_rows;
      if (model.contains(row)) continue;
      model[row] = loaded.add(row);
    }
    check_equal(loaded, model, num_rows, random);
    rows.push_back(rows[rows.size() / 2]);
    AddressMap twice(num_rows);
    CHECK(twice.load(rows) == rows.back());
  }
}

void a_touched_row_takes_few_bytes() {
  constexpr std::uint64_t num_rows = 1 << 20;
  AddressMap every(num_rows);
  for (std::uint64_t row = 0; row < num_rows; ++row) every.add(row * 7919 % num_rows);
  CHECK(every.memory_bytes() <= num_rows * 9 / 2);
  AddressMap half(num_rows);
  for (std::uint64_t row = 0; row < num_rows; row += 2) half.add(row);
  CHECK(half.memory_bytes() <= num_rows / 2 * 5);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  addresses_are_given_in_order_and_stay(check::seed_from(argc, argv));
  a_touched_row_takes_few_bytes();
  return check::passed();
}

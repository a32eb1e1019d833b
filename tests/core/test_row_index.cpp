// The row index against std::map, and the memory that it promises.
#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "check.h"
#include "rows/row_index.h"

namespace holdfast {
namespace {

void check_same(const RowIndex& index, const std::map<std::uint64_t, std::uint64_t>& model,
                const std::vector<std::uint64_t>& rows) {
  CHECK(index.size() == model.size());
  std::vector<std::uint64_t> listed = index.rows();
  std::sort(listed.begin(), listed.end());
  CHECK(std::equal(listed.begin(), listed.end(), model.begin(), model.end(),
                   [](std::uint64_t row, const auto& entry) { return row == entry.first; }));
  std::map<std::uint64_t, std::uint64_t> visited;
  for (std::size_t slot = 0; slot != index.num_slots();) {
    slot = index.visit(slot, 7, [&](std::uint64_t row, std::uint64_t location) { visited.emplace(row, location); });
  }
  CHECK(visited == model);
  for (const std::uint64_t row : rows) {
    const auto found = index.find(row);
    const auto expected = model.find(row);
    CHECK(found.has_value() == (expected != model.end()));
    if (found) CHECK(*found == expected->second);
  }
}

void random_calls_agree_with_a_map(std::mt19937_64& random) {
  std::vector<std::uint64_t> rows = {0, 1, RowIndex::end_row - 1};
  for (int i = 0; i < 3000; ++i) rows.push_back(i % 2 == 0 ? random() % 5000 : random() % RowIndex::end_row);
  RowIndex index;
  std::map<std::uint64_t, std::uint64_t> model;
  for (int round = 0; round < 40; ++round) {
    const std::uint64_t percent_inserted = 20 + random() % 60;
    for (int i = 0; i < 1500; ++i) {
      const std::uint64_t row = rows[random() % rows.size()];
      const auto known = model.find(row);
      if (random() % 100 < percent_inserted) {
        const std::uint64_t location = random() % 4 == 0 ? RowIndex::end_location - 1 : random() % 1000;
        index.insert(row, location);
        model[row] = location;
      } else if (known != model.end() && random() % 4 != 0) {
        index.erase_if_equal(row, known->second);
        model.erase(known);
      } else {  // another location, or a row that is not there
        index.erase_if_equal(row, known == model.end() ? random() % 1000 : known->second ^ 1);
      }
    }
    check_same(index, model, rows);
    if (round % 8 == 7) {
      const auto is_forgotten = [](std::uint64_t location) { return location % 3 == 0; };
      index.grow_on(index.num_slots());
      for (std::size_t slot = 0; slot != index.num_slots();) slot = index.erase_if(slot, 11, is_forgotten);
      std::erase_if(model, [&](const auto& entry) { return is_forgotten(entry.second); });
      check_same(index, model, rows);
    }
  }
  index.clear();
  check_same(index, {}, rows);
}

void it_answers_at_every_moment_of_its_growth() {
  RowIndex index;
  std::map<std::uint64_t, std::uint64_t> model;
  std::size_t num_moments = 0;
  for (std::uint64_t row = 0; row < 5000; ++row) {
    index.insert(row * 3, row);
    model[row * 3] = row;
    if (row % 5 == 0) {
      index.erase_if_equal(row, row / 3);
      if (row % 3 == 0) model.erase(row);
    }
    if (!index.is_growing() || row % 16 != 0) continue;
    ++num_moments;
    check_same(index, model, {0, 1, 3 * row, 3 * row + 3, 3 * row / 2});
    if (row % 64 == 0) {
      index.grow_on(100);
      check_same(index, model, {0, 1, 3 * row, 3 * row + 3, 3 * row / 2});
    }
  }
  CHECK(num_moments > 30);
}

// Whose memory is given back by huge pages.
void a_large_one_keeps_every_row_as_it_grows() {
  RowIndex index;
  constexpr std::uint64_t num_rows = 1500000;
  for (std::uint64_t row = 0; row < num_rows; ++row) index.insert(row, row ^ 1);
  std::uint64_t num_found = 0;
  for (std::uint64_t row = 0; row < num_rows; ++row) num_found += index.find(row) == (row ^ 1) ? 1 : 0;
  CHECK(num_found == num_rows);
  CHECK(index.size() == num_rows);
}

void an_entry_takes_fourteen_to_eighteen_bytes_while_the_index_grows() {
  RowIndex index;
  for (std::uint64_t row = 0; row < 200000; ++row) {
    index.insert(row * 7, row);
    if (row < 1000) continue;
    const double bytes = static_cast<double>(index.memory_bytes()) / static_cast<double>(index.size());
    CHECK(bytes > 13.8 && bytes < 18.3);
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  std::mt19937_64 random(check::seed_from(argc, argv));
  holdfast::random_calls_agree_with_a_map(random);
  holdfast::it_answers_at_every_moment_of_its_growth();
  holdfast::a_large_one_keeps_every_row_as_it_grows();
  holdfast::an_entry_takes_fourteen_to_eighteen_bytes_while_the_index_grows();
  return check::passed();
}

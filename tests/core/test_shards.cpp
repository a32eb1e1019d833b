// Which shard and which place each row has, for all small tables, and for some large ones.
#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "rows/shards.h"

namespace holdfast {
namespace {

std::vector<std::uint64_t> rows_per_shard(const ShardLayout& layout, std::uint64_t first, std::uint64_t step,
                                          std::uint64_t count) {
  std::vector<std::uint64_t> counts(layout.num_shards());
  for (std::uint64_t i = 0; i < count; ++i) ++counts[layout.shard_of_row(first + i * step)];
  return counts;
}

// Every row has a place of its own, every place that counts has a row, and shards differ by one row at most.
void check_layout(const ShardLayout& layout) {
  std::vector<std::set<std::uint64_t>> locals(layout.num_shards());
  for (std::uint64_t row = 0; row < layout.num_rows; ++row) {
    const std::uint64_t place = layout.place_of(row);
    CHECK(place < layout.end_place() && layout.is_place(place));
    CHECK(layout.row_of(place) == row);
    const std::uint32_t shard = layout.shard_of(place);
    CHECK(place == layout.first_place(shard) + layout.local_of(place));
    CHECK(locals[shard].insert(layout.local_of(place)).second);
    ShardSet owned;
    CHECK(!layout.holds(place, owned));
    owned.set(shard);
    CHECK(layout.holds(place, owned));
  }
  std::uint64_t least = layout.num_rows;
  std::uint64_t most = 0;
  for (std::uint32_t shard = 0; shard < layout.num_shards(); ++shard) {
    const std::uint64_t count = layout.rows_in(shard);
    CHECK(count == locals[shard].size() && (count == 0 || *locals[shard].rbegin() == count - 1));
    CHECK(!layout.is_place(layout.first_place(shard) + count));
    least = std::min(least, count);
    most = std::max(most, count);
  }
  CHECK(most - least <= 1);
  CHECK(layout.rows_in(static_cast<std::uint32_t>(layout.num_shards())) == 0);
  CHECK(!layout.is_place(layout.end_place()) && !layout.is_place(~std::uint64_t{0}));
}

void every_row_has_one_place_and_shards_are_even() {
  for (std::uint32_t num_shards = 2; num_shards <= 64; num_shards *= 2) {
    for (std::uint64_t num_rows = 1; num_rows <= 300; ++num_rows) {
      check_layout(ShardLayout::split(num_rows, num_shards, num_shards / 3));
    }
  }
  for (const std::uint64_t num_rows : {std::uint64_t{131073}, std::uint64_t{200001}}) {
    check_layout(ShardLayout::split(num_rows, 4));
  }
  check_layout(ShardLayout::split(10000, max_shards));
}

void a_shards_places_begin_at_a_multiple_of_32768() {
  CHECK(ShardLayout::split(1, 2).stride() == 32768);
  CHECK(ShardLayout::split(65536, 2).stride() == 32768);
  CHECK(ShardLayout::split(65537, 2).stride() == 65536);
  CHECK(ShardLayout::split(std::uint64_t{1} << 40, max_shards).end_place() == std::uint64_t{1} << 40);
}

void places_in_a_shard_ascend_with_rows() {
  const ShardLayout layout = ShardLayout::split(5000, 8);
  std::vector<std::uint64_t> next(8);
  for (std::uint64_t row = 0; row < layout.num_rows; ++row) {
    const std::uint64_t place = layout.place_of(row);
    CHECK(layout.local_of(place) == next[layout.shard_of(place)]++);
  }
}

void a_whole_tables_places_are_its_rows() {
  const ShardLayout layout = ShardLayout::whole(1000, 5);
  CHECK(layout.end_place() == 1000 && layout.rows_in(5) == 1000 && layout.rows_in(0) == 0);
  for (const std::uint64_t row : {std::uint64_t{0}, std::uint64_t{999}}) {
    CHECK(layout.place_of(row) == row && layout.row_of(row) == row && layout.shard_of(row) == 5);
  }
  CHECK(layout.is_place(999) && !layout.is_place(1000));
}

// Popular rows are often the first ones, or at a regular distance (ids that carry a field in their low bits).
void consecutive_and_strided_rows_spread_evenly() {
  const ShardLayout layout = ShardLayout::split(std::uint64_t{1} << 40, 16);
  for (const std::uint64_t first : {std::uint64_t{0}, std::uint64_t{12345}}) {
    for (const std::uint64_t count : rows_per_shard(layout, first, 1, 1600)) CHECK(count >= 99 && count <= 101);
    for (const std::uint64_t step : {2, 3, 16, 17, 64, 1000, 1024, 65536, 1 << 20}) {
      for (const std::uint64_t count : rows_per_shard(layout, first, step, 16000)) CHECK(count > 850 && count < 1150);
    }
  }
}

void the_first_rows_of_tables_that_are_turned_do_not_meet() {
  std::vector<bool> taken(16);
  for (std::uint32_t table = 0; table < 16; ++table) {
    const std::uint32_t shard = ShardLayout::split(1000, 16, table).shard_of_row(0);
    CHECK(!taken[shard]);
    taken[shard] = true;
  }
}

void large_tables_keep_their_rows_apart(std::mt19937_64& random) {
  for (const std::uint64_t num_rows : {(std::uint64_t{1} << 40) - 7, (std::uint64_t{1} << 33) + 11}) {
    for (const std::uint32_t num_shards : {2u, 32u, max_shards}) {
      const ShardLayout layout = ShardLayout::split(num_rows, num_shards, num_shards - 1);
      std::uint64_t all = 0;
      for (std::uint32_t shard = 0; shard < num_shards; ++shard) all += layout.rows_in(shard);
      CHECK(all == num_rows);
      for (int i = 0; i < 20000; ++i) {
        const std::uint64_t row = random() % num_rows;
        CHECK(layout.is_place(layout.place_of(row)) && layout.row_of(layout.place_of(row)) == row);
        const std::uint64_t place = random() % layout.end_place();
        if (layout.is_place(place)) {
          CHECK(layout.row_of(place) < num_rows && layout.place_of(layout.row_of(place)) == place);
        } else {
          CHECK(layout.row_of(place) >= num_rows);
        }
      }
    }
  }
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  std::mt19937_64 random(check::seed_from(argc, argv));
  holdfast::every_row_has_one_place_and_shards_are_even();
  holdfast::a_shards_places_begin_at_a_multiple_of_32768();
  holdfast::places_in_a_shard_ascend_with_rows();
  holdfast::a_whole_tables_places_are_its_rows();
  holdfast::consecutive_and_strided_rows_spread_evenly();
  holdfast::the_first_rows_of_tables_that_are_turned_do_not_meet();
  holdfast::large_tables_keep_their_rows_apart(random);
  return check::passed();
}

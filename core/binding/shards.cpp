// Places of rows and rows of places, for the module: arrays of them.
#include "rows/shards.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "binding/arrays.h"
#include "binding/module.h"
#include "keys/key_shards.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using NewIds = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

// map(number) of each of them; one that is_good is not true of is refused.
template <class IsGood, class Map>
NewIds mapped(const Ids& numbers, const IsGood& is_good, const Map& map) {
  const std::size_t count = numbers.shape(0);
  auto out = std::make_unique<std::int64_t[]>(count);
  {
    const nb::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < count; ++i) {
      const auto number = static_cast<std::uint64_t>(numbers.data()[i]);
      if (!is_good(number)) throw nb::value_error("a number outside the table");
      out[i] = static_cast<std::int64_t>(map(number));
    }
  }
  std::int64_t* const data = out.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::int64_t*>(array); });
  return NewIds(data, {count}, owner);
}

auto below(std::uint64_t end) {
  return [end](std::uint64_t number) { return number < end; };
}

ShardLayout checked_layout(std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard) {
  if (num_shards == 0 || num_shards > max_shards || (num_shards & (num_shards - 1)) != 0) {
    throw nb::value_error("num_shards must be a power of two");
  }
  if (first_shard >= num_shards) throw nb::value_error("first_shard must be one of the shards");
  return ShardLayout::split(num_rows, num_shards, first_shard);
}

}  // namespace

void bind_shards(nb::module_& m) {
  m.def(
      "places_of",
      [](std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard, const Ids& rows) {
        const ShardLayout layout = checked_layout(num_rows, num_shards, first_shard);
        return mapped(rows, below(num_rows), [&](std::uint64_t row) { return layout.place_of(row); });
      },
      "num_rows"_a, "num_shards"_a, "first_shard"_a, "rows"_a,
      "The places of rows of a table that is split over so many shards.");
  m.def(
      "rows_of_places",
      [](std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard, const Ids& places) {
        const ShardLayout layout = checked_layout(num_rows, num_shards, first_shard);
        return mapped(places, below(layout.end_place()), [&](std::uint64_t place) { return layout.row_of(place); });
      },
      "num_rows"_a, "num_shards"_a, "first_shard"_a, "places"_a,
      "The other way; a place without a row gives a number beyond the table.");
  m.def(
      "shards_of_keys",
      [](std::uint64_t pool_seed, std::uint64_t table, std::uint32_t num_shards, const Ids& keys) {
        checked_layout(0, num_shards, 0);
        const std::uint64_t seed = key_shard_seed(pool_seed, table);
        return mapped(
            keys, [](std::uint64_t) { return true; },
            [&](std::uint64_t key) { return key_shard(seed, key, num_shards); });
      },
      "pool_seed"_a, "table"_a, "num_shards"_a, "keys"_a,
      "The shards of keys of table number `table`, where it is split over so many.");
}

}  // namespace holdfast

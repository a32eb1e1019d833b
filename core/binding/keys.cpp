// What a table's rules say of keys, for the module: arrays of them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/format.h"
#include "binding/arrays.h"
#include "binding/module.h"
#include "binding/records.h"
#include "keys/key_shards.h"
#include "keys/living_keys.h"
#include "rows/row_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_keys(nb::module_& m) {
  m.def(
      "first_admissions",
      [](const TableSpec& spec, std::uint64_t pool_seed, std::uint64_t table, const Ids& keys) {
        const format::TableRecord record = record_of(spec);
        const KeyAdmission admission = key_policy_of(record, pool_seed, table).admission;
        const std::size_t count = keys.shape(0);
        auto out = std::make_unique<std::uint32_t[]>(count);
        {
          const nb::gil_scoped_release unlocked;
          for (std::size_t i = 0; i < count; ++i) {
            out[i] = admission.first_occurrence(static_cast<std::uint64_t>(keys.data()[i]));
          }
        }
        std::uint32_t* const data = out.release();
        const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::uint32_t*>(array); });
        return nb::ndarray<nb::numpy, std::uint32_t, nb::ndim<1>>(data, {count}, owner);
      },
      "spec"_a, "pool_seed"_a, "table"_a, "keys"_a,
      "Of keys of table number `table`: how many steps have to bring each before it is trained, that one among them.");
  m.def(
      "living_keys",
      [](const TableSpec& spec, std::uint64_t pool_seed, std::uint64_t table, std::uint64_t step,
         const nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& records) {
        if (records.shape(1) != sizeof(KeyRecord)) throw nb::value_error("expected records of 16 bytes");
        const format::TableRecord record = record_of(spec);
        const std::size_t count = records.shape(0);
        auto out = std::make_unique<bool[]>(count);
        {
          const nb::gil_scoped_release unlocked;
          find_living(key_policy_of(record, pool_seed, table), std::max(record.table_shards, 1u),
                      key_shard_seed(pool_seed, table), step,
                      {reinterpret_cast<const KeyRecord*>(records.data()), count}, out.get());
        }
        bool* const data = out.release();
        const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<bool*>(array); });
        return nb::ndarray<nb::numpy, bool, nb::ndim<1>>(data, {count}, owner);
      },
      "spec"_a, "pool_seed"_a, "table"_a, "step"_a, "records"_a,
      "Of all records that rows of table number `table` have, uint8 [n, 16]: which count at the end of `step`.");
}

}  // namespace holdfast

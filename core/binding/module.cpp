// The seam between Python and the core: only the files of this folder know nanobind. No logic lives here.
//
// Every call that works on rows or files lets go of the GIL. Arrays are taken as they are (no copies), so callers give
// contiguous CPU arrays and keep them alive for the call.
#include "binding/module.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <exception>
#include <string>
#include <tuple>
#include <vector>

#include "base/checksum.h"
#include "base/error.h"
#include "base/memory_nodes.h"
#include "base/parallel.h"
#include "base/text_hash.h"
#include "binding/arrays.h"
#include "commit/finite.h"
#include "kernels/kernels.h"
#include "layout/row_log_place.h"
#include "media/medium.h"
#include "step/jagged.h"
#include "step/lookup.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace holdfast;

namespace {

const char* exception_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::not_found: return "PoolNotFound";
    case ErrorKind::exists: return "PoolExists";
    case ErrorKind::busy: return "PoolBusy";
    case ErrorKind::read_only: return "PoolReadOnly";
    case ErrorKind::full: return "PoolFull";
    case ErrorKind::batch_too_large: return "BatchTooLarge";
    case ErrorKind::window_too_large: return "WindowTooLarge";
    case ErrorKind::corrupted: return "Corrupted";
    case ErrorKind::overtaken: return "Overtaken";
    case ErrorKind::format_mismatch: return "FormatMismatch";
    case ErrorKind::untrusted: return "UntrustedPool";
    case ErrorKind::failed: return "PoolFailed";
    case ErrorKind::step: return "StepError";
    case ErrorKind::non_finite: return "NonFiniteLoss";
    case ErrorKind::config: return "ConfigError";
    case ErrorKind::data: return "DataError";
  }
  return "PoolError";
}

void set_python_error(const char* type, const char* what) {
  PyErr_SetString(nb::module_::import_("holdfast.errors").attr(type).ptr(), what);
}

}  // namespace

NB_MODULE(_core, m) {
  // Pools and collections live as long as the script that made them, which may be as long as the interpreter.
  nb::set_leak_warnings(false);

  nb::register_exception_translator([](const std::exception_ptr& thrown, void*) {
    try {
      std::rethrow_exception(thrown);
    } catch (const Error& error) {
      set_python_error(exception_name(error.kind()), error.what());
    } catch (const BadId& bad) {
      set_python_error("IdError", bad.what());
    }
  });

  bind_records(m);
  bind_plans(m);
  bind_routing(m);
  bind_channels(m);
  bind_device(m);
  bind_pool(m);
  bind_reader(m);
  bind_live_copy(m);
  bind_repair(m);
  bind_dial_probe(m);

  m.def(
      "crc32c", [](std::uint32_t crc, const ConstBytes& data) { return crc32c(crc, data.data(), data.size()); },
      "crc"_a, "data"_a, Unlocked(), "The CRC-32C of the bytes that gave `crc`, followed by these; begin with 0.");
  m.def(
      "text_keys",
      [](const ConstBytes& data, const Ids& starts, const Ids& lengths, const OutIds& keys) {
        if (starts.size() != lengths.size() || starts.size() != keys.size()) {
          throw nb::value_error("starts, lengths and keys must be as many");
        }
        if (!hash_texts(data.data(), data.size(), starts.data(), lengths.data(), starts.size(), keys.data())) {
          throw nb::value_error("a text lies beyond the data");
        }
      },
      "data"_a, "starts"_a, "lengths"_a, "keys"_a, Unlocked(),
      "The keys of the texts data[starts[i] : starts[i] + lengths[i]]: XXH64 with the seed 0.");
  m.def(
      "all_finite",
      [](ConstFloatMatrix values) {
        const auto* data = reinterpret_cast<const std::byte*>(values.data());
        const FloatTensor only{data, values.size() * sizeof(float), FloatFormat::float32};
        return !first_non_finite({&only, 1});
      },
      "values"_a, Unlocked(), "Whether no element is infinite or a NaN.");
  m.def(
      "first_non_finite",
      [](const std::vector<std::tuple<std::uintptr_t, std::size_t, std::uint8_t>>& tensors) {
        std::vector<FloatTensor> list;
        for (const auto& [address, bytes, format] : tensors) {
          if (format > static_cast<std::uint8_t>(FloatFormat::float64)) throw nb::value_error("no such float format");
          list.push_back({reinterpret_cast<const std::byte*>(address), bytes, static_cast<FloatFormat>(format)});
        }
        const nb::gil_scoped_release unlocked;
        return first_non_finite(list);
      },
      "tensors"_a,
      "tensors: (address, bytes, format) of contiguous ones, format 0 for float16, 1 bfloat16, 2 float32, 3 float64. "
      "The index of the first that has an infinity or a NaN; None where all are finite.");
  m.def(
      "check_nodes",
      [](const std::vector<unsigned>& nodes, const std::string& option) { check_nodes(nodes, option.c_str()); },
      "nodes"_a, "option"_a = "scratchpad_nodes",
      "Raises ConfigError where the system has no memory on one of these NUMA nodes.");
  m.def("remove_row_log", &remove_row_log, "path"_a,
        "Removes a pool's row log: where it is a link, what it leads to as well.");
  m.def("row_log_path", &row_log_path, "directory"_a,
        "Where the row log of the pool there is, or is going to be made: a link may lead elsewhere.");
  m.def(
      "is_block_medium", [](const std::string& directory) { return !is_dax(directory) && !is_volatile(directory); },
      "directory"_a, "Whether files of the directory lie neither on DAX memory nor in volatile memory.");
  bind_shards(m);
  bind_keys(m);
  bind_unpublished(m);
  bind_row_values(m);
  m.def("set_num_threads", &set_num_threads, "num_threads"_a);
  m.def("suggest_num_threads", &suggest_num_threads, "num_threads"_a, "The same, unless that was called.");
  m.def("num_threads", &num_threads);
  m.def("instruction_set", [] { return best_kernels().name; });
  m.def("kill_at_persist_point", &Medium::kill_at_persist_point, "n"_a,
        "Kills this process with SIGKILL at its n-th persist point from now (0: never). For crash tests.");
  m.def("persist_points_left", &Medium::persist_points_left);
}

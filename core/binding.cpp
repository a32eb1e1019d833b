// The seam between Python and the core: only it and its binding_*.h and .cpp know nanobind. No logic lives here.
//
// Every call that works on rows or files lets go of the GIL. Arrays are taken as they are (no copies), so callers give
// contiguous CPU arrays and keep them alive for the call.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "binding_batch.h"
#include "binding_collection.h"
#include "binding_device.h"
#include "binding_routing.h"
#include "checksum.h"
#include "error.h"
#include "live_copy.h"
#include "parallel.h"
#include "pool.h"
#include "reader.h"
#include "repair.h"
#include "routed_plan.h"
#include "slot_directory.h"
#include "superblock.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace holdfast;

namespace {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;
using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowNumbers = nb::ndarray<std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstRowNumbers = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

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
    case ErrorKind::config: return "ConfigError";
    case ErrorKind::data: return "DataError";
  }
  return "PoolError";
}

void set_python_error(const char* type, const char* what) {
  PyErr_SetString(nb::module_::import_("holdfast.errors").attr(type).ptr(), what);
}

struct TableSpec {
  std::string name;
  std::uint64_t num_embeddings;
  std::uint32_t embedding_dim;
  std::uint32_t dtype;
  std::uint32_t optimizer;
  std::uint32_t pooling;
  float init_low;
  float init_high;
  std::uint32_t first_shard;
  std::uint32_t table_shards;
};

format::TableRecord record_of(const TableSpec& spec) {
  format::TableRecord record{};
  if (spec.name.size() >= sizeof(record.name)) {
    throw Error(ErrorKind::config,
                "table name '" + spec.name + "' is longer than " + std::to_string(sizeof(record.name) - 1) + " bytes");
  }
  record.num_embeddings = spec.num_embeddings;
  record.embedding_dim = spec.embedding_dim;
  record.dtype = spec.dtype;
  record.optimizer = spec.optimizer;
  record.state_floats = state_floats_of(static_cast<RowOptimizer>(spec.optimizer), spec.embedding_dim);
  record.pooling = spec.pooling;
  record.init_low = spec.init_low;
  record.init_high = spec.init_high;
  record.first_shard = spec.first_shard;
  record.table_shards = spec.table_shards;
  std::memcpy(record.name, spec.name.data(), spec.name.size());
  return record;
}

TableSpec spec_of(const format::TableRecord& record) {
  return {record.name,    record.num_embeddings, record.embedding_dim, record.dtype,       record.optimizer,
          record.pooling, record.init_low,       record.init_high,     record.first_shard, record.table_shards};
}

Collection make_collection(const std::vector<format::TableRecord>& records, const std::vector<std::uint32_t>& tables,
                           const std::vector<std::tuple<std::string, std::uint32_t>>& features) {
  auto spec = std::make_shared<CollectionSpec>();
  for (const std::uint32_t number : tables) {
    const format::TableRecord& record = records.at(number);
    const auto layout = shard_layout_of(record);
    // Of a split table an owner has a part of each bag: the mean is taken where the whole bag is known (router.h).
    const Pooling pooling = layout && layout->is_split() ? Pooling::sum : static_cast<Pooling>(record.pooling);
    spec->tables.push_back(
        {number, layout ? layout->end_place() : record.num_embeddings, record.embedding_dim, pooling});
  }
  spec->output_width = 0;
  for (const auto& [name, table] : features) {
    spec->features.push_back({table, spec->output_width, name});
    spec->output_width += spec->tables.at(table).dim;
  }
  auto plans = std::make_shared<PlanPool>(spec);
  return {std::move(spec), std::move(plans)};
}

std::shared_ptr<Plan> plan_of(Collection& collection, const Ids& ids, const Offsets& offsets,
                              const std::optional<ConstFloatVector>& weights,
                              const std::vector<std::uint32_t>& block_of, std::size_t num_blocks, bool parallel) {
  const BatchIds batch = batch_of(ids, offsets, weights, block_of, num_blocks, collection.spec->features.size());
  auto plan = collection.plans->take();
  const nb::gil_scoped_release unlocked;
  plan_batch(batch, parallel, *plan);
  return plan;
}

using CountMatrix = nb::ndarray<const std::int64_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::shared_ptr<Plan> routed_plan_of(Collection& collection, const CountMatrix& counts, const Words& messages,
                                     bool parallel) {
  if (counts.shape(1) != collection.spec->features.size() || counts.shape(2) != 2) {
    throw nb::value_error("expected counts [num_trainers, num_features, 2]");
  }
  auto plan = collection.plans->take();
  const nb::gil_scoped_release unlocked;
  plan_routed({reinterpret_cast<const BagCounts*>(counts.data()), counts.shape(0), {messages.data(), messages.size()}},
              parallel, *plan);
  return plan;
}

template <class Matrix>
void check_shape(const Plan& plan, const Matrix& matrix) {
  if (matrix.shape(0) != plan.num_bags || matrix.shape(1) != plan.output_width) {
    throw nb::value_error("expected [batch_size, output_width]");
  }
}

// Capture, tables, weights and state of each part.
using PartList =
    std::vector<std::tuple<std::shared_ptr<Capture>, std::vector<std::uint32_t>, ConstBytes, ConstFloatVector>>;

std::vector<RowsPart> parts_of(const PartList& list) {
  std::vector<RowsPart> parts;
  for (const auto& [capture, tables, weights, state] : list) {
    parts.push_back({capture,
                     tables,
                     {reinterpret_cast<const std::byte*>(weights.data()), weights.shape(0)},
                     {state.data(), state.shape(0)}});
  }
  return parts;
}

using GradientList = std::vector<std::tuple<std::shared_ptr<Capture>, ConstFloatMatrix>>;

std::vector<RowGradients> gradients_of(const GradientList& list) {
  std::vector<RowGradients> gradients;
  for (const auto& [capture, grad] : list) {
    check_shape(*capture->plan, grad);
    gradients.push_back({capture, grad.data()});
  }
  return gradients;
}

UpdateSpec update_spec(float learning_rate, float epsilon, float beta1, float beta2, float weight_decay,
                       float gradient_scale) {
  UpdateSpec spec{};
  spec.learning_rate = learning_rate;
  spec.epsilon = epsilon;
  spec.beta1 = beta1;
  spec.beta2 = beta2;
  spec.weight_decay = weight_decay;
  spec.gradient_scale = gradient_scale;
  return spec;
}

// A dense state as Python gives it: JSON text and (address, bytes, offset) of each tensor.
struct DenseInput {
  nb::bytes structure;
  std::vector<DenseTensor> tensors;
  std::size_t tensors_bytes;

  DenseInput(nb::bytes structure_, const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& list,
             std::size_t total)
      : structure(std::move(structure_)), tensors_bytes(total) {
    std::size_t end = 0;
    for (const auto& [address, bytes, offset] : list) {
      if (offset < end || offset > total || bytes > total - offset) throw nb::value_error("tensors must not overlap");
      end = offset + bytes;
      tensors.push_back({reinterpret_cast<const void*>(address), bytes, offset});
    }
  }
  Pool::Dense view() const {
    return {{reinterpret_cast<const std::byte*>(structure.c_str()), structure.size()}, tensors, tensors_bytes};
  }
};

using Mark = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // a StepMark
using Agree = nb::typed<nb::callable, Mark(Mark, std::vector<Mark>)>;
using Ready = nb::typed<nb::callable, void()>;

StepMark step_mark(const Mark& mark) {
  const auto& [step, cursor, row_updates] = mark;
  return {step, cursor, row_updates};
}

// The callables live as long as the call that they are arguments of.
InGroup in_group(const Agree& agree, const Ready& ready) {
  const auto mark_of = [](const StepMark& mark) { return Mark{mark.step, mark.cursor, mark.row_updates}; };
  return {[&agree, mark_of](const Survey& survey) {
            const nb::gil_scoped_acquire locked;
            std::vector<Mark> dense;
            for (const StepMark& mark : survey.dense) dense.push_back(mark_of(mark));
            return step_mark(nb::cast<Mark>(agree(mark_of(survey.rows), dense)));
          },
          [&ready] {
            const nb::gil_scoped_acquire locked;
            ready();
          }};
}

nb::bytes to_bytes(std::span<const std::byte> data) { return nb::bytes(data.data(), data.size()); }

nb::dict to_dict(const format::PoolHeader& header) {
  nb::dict out;
  out["format_version"] = header.version;
  out["level"] = header.level == 0 ? "process" : "power";
  out["uuid"] = to_bytes({reinterpret_cast<const std::byte*>(header.uuid), sizeof(header.uuid)});
  out["seed"] = header.seed;
  out["log_bytes"] = header.log_bytes;
  out["store"] = header.store == 0 ? "in place" : "log";
  out["num_tables"] = header.num_tables;
  out["num_shards"] = header.num_shards;
  out["num_writers"] = header.num_writers;
  out["row_checksums"] = header.row_checksums != 0;
  out["created_unix_ns"] = header.created_unix_ns;
  return out;
}

nb::dict to_dict(const format::CommitRecord& commit) {
  nb::dict out;
  out["epoch"] = commit.epoch;
  out["step"] = commit.step;
  out["cursor"] = commit.cursor;
  out["row_updates"] = commit.row_updates;
  out["log_head"] = commit.log_head;
  out["log_tail"] = commit.log_tail;
  return out;
}

nb::dict to_dict(const Traffic& traffic) {
  nb::dict out;
  out["rows_hit"] = traffic.rows_hit;
  out["rows_missed"] = traffic.rows_missed;
  out["demand_fetches"] = traffic.demand_fetches;
  out["window_shrunk"] = traffic.window_shrunk;
  out["stall_seconds"] = traffic.stall_seconds;
  out["log_stall_seconds"] = traffic.log_stall_seconds;
  out["rows_fetched"] = traffic.rows_fetched;
  out["rows_initial"] = traffic.rows_initial;
  out["fetched_bytes"] = traffic.fetched_bytes;
  out["fetch_reads"] = traffic.fetch_reads;
  out["updated_rows"] = traffic.updated_rows;
  out["updated_row_bytes"] = traffic.updated_row_bytes;
  out["appended_bytes"] = traffic.appended_bytes;
  out["merges"] = traffic.merges;
  out["merged_bytes"] = traffic.merged_bytes;
  out["standing_bytes"] = traffic.standing_bytes;
  out["log_bytes_read"] = traffic.log_bytes_read;
  out["home_bytes_read"] = traffic.home_bytes_read;
  out["home_bytes_written"] = traffic.home_bytes_written;
  out["merge_log_reads"] = traffic.merge_log_reads;
  out["merge_reads"] = traffic.merge_reads;
  out["merge_writes"] = traffic.merge_writes;
  out["index_entries"] = traffic.index_entries;
  out["index_bytes"] = traffic.index_bytes;
  out["scratchpad_rows"] = traffic.scratchpad_rows;
  return out;
}

// Room for rows as Python gives it: all of it is used.
struct RowBuffers {
  WorkingRows rows;
  std::size_t count;

  RowBuffers(const RowTable& table, const RowNumbers& numbers, const Bytes& weights, const Bytes& state)
      : rows{numbers.data(), reinterpret_cast<std::byte*>(weights.data()), reinterpret_cast<float*>(state.data())},
        count(numbers.shape(0)) {
    if (count == 0 || weights.shape(0) != count * table.weight_bytes() ||
        state.shape(0) != count * table.state_bytes()) {
      throw nb::value_error("arrays do not fit the rows");
    }
  }
};

// How many rows one of a live copy's streams had for these arrays, and where it goes on.
template <auto stream>
std::pair<std::size_t, std::uint64_t> next_rows(LiveCopy& copy, std::uint32_t table, std::uint64_t first,
                                                const RowNumbers& rows, const Bytes& weights, const Bytes& state) {
  const RowBuffers out(copy.tables().at(table), rows, weights, state);
  const nb::gil_scoped_release unlocked;
  const std::size_t num_rows = (copy.*stream)(table, first, out.rows, out.count);
  return {num_rows, first};
}

std::optional<Sharding> sharding_of(std::uint32_t num_shards, const std::vector<std::uint32_t>& owned,
                                    const nb::bytes& group_uuid, bool adopt) {
  if (num_shards == 0) return std::nullopt;
  Sharding sharding{num_shards, owned, {}, adopt};
  if (group_uuid.size() != sharding.group_uuid.size()) throw nb::value_error("group_uuid must have 16 bytes");
  std::memcpy(sharding.group_uuid.data(), group_uuid.c_str(), group_uuid.size());
  return sharding;
}

// The shards of one writer of several.
template <class Pool>
std::vector<std::uint32_t> owned_by(const Pool& pool) {
  std::vector<std::uint32_t> shards;
  if (!pool.shards()) return shards;
  const ShardSet owned = shards_of(*pool.shards());
  for (std::uint32_t shard = 0; shard < max_shards; ++shard) {
    if (owned[shard]) shards.push_back(shard);
  }
  return shards;
}

template <class Pool>
std::optional<nb::bytes> group_of(const Pool& pool) {
  if (!pool.shards()) return std::nullopt;
  return nb::bytes(pool.shards()->group_uuid, sizeof(pool.shards()->group_uuid));
}

using NewIds = nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>;

// map(layout, number) of each of them; one outside [0, end) is refused.
template <class Map>
NewIds mapped(const Ids& numbers, std::uint64_t end, const Map& map) {
  const std::size_t count = numbers.shape(0);
  auto out = std::make_unique<std::int64_t[]>(count);
  {
    const nb::gil_scoped_release unlocked;
    for (std::size_t i = 0; i < count; ++i) {
      const auto number = static_cast<std::uint64_t>(numbers.data()[i]);
      if (number >= end) throw nb::value_error("a number outside the table");
      out[i] = static_cast<std::int64_t>(map(number));
    }
  }
  std::int64_t* const data = out.release();
  const nb::capsule owner(data, [](void* array) noexcept { delete[] static_cast<std::int64_t*>(array); });
  return NewIds(data, {count}, owner);
}

ShardLayout checked_layout(std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard) {
  if (num_shards == 0 || num_shards > max_shards || (num_shards & (num_shards - 1)) != 0) {
    throw nb::value_error("num_shards must be a power of two");
  }
  if (first_shard >= num_shards) throw nb::value_error("first_shard must be one of the shards");
  return ShardLayout::split(num_rows, num_shards, first_shard);
}

std::vector<TableSpec> specs_of(const std::vector<format::TableRecord>& records) {
  std::vector<TableSpec> specs;
  for (const auto& record : records) specs.push_back(spec_of(record));
  return specs;
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

  nb::class_<TableSpec>(m, "TableSpec", "One table as the pool keeps it; dtype, optimizer and pooling by number.")
      .def(
          "__init__",
          [](TableSpec* self, std::string name, std::uint64_t num_embeddings, std::uint32_t embedding_dim,
             std::uint32_t dtype, std::uint32_t optimizer, std::uint32_t pooling, float init_low, float init_high,
             std::uint32_t first_shard, std::uint32_t table_shards) {
            new (self) TableSpec{std::move(name), num_embeddings, embedding_dim, dtype,       optimizer,
                                 pooling,         init_low,       init_high,     first_shard, table_shards};
          },
          nb::kw_only(), "name"_a, "num_embeddings"_a, "embedding_dim"_a, "dtype"_a, "optimizer"_a, "pooling"_a,
          "init_low"_a, "init_high"_a, "first_shard"_a = 0, "table_shards"_a = 0,
          "table_shards: 0 in a pool without shards, 1 for a whole table in first_shard, else all of the pool's.")
      .def_ro("name", &TableSpec::name)
      .def_ro("num_embeddings", &TableSpec::num_embeddings)
      .def_ro("embedding_dim", &TableSpec::embedding_dim)
      .def_ro("dtype", &TableSpec::dtype)
      .def_ro("optimizer", &TableSpec::optimizer)
      .def_ro("pooling", &TableSpec::pooling)
      .def_ro("init_low", &TableSpec::init_low)
      .def_ro("init_high", &TableSpec::init_high)
      .def_ro("first_shard", &TableSpec::first_shard)
      .def_ro("table_shards", &TableSpec::table_shards);

  nb::class_<Plan>(m, "Plan", "A batch's unique rows per table and where they occur.")
      .def_ro("num_bags", &Plan::num_bags)
      .def_prop_ro("num_unique", &Plan::num_unique)
      .def_prop_ro("num_lookups", &Plan::num_lookups)
      .def_prop_ro("output_width", [](const Plan& plan) { return plan.output_width; })
      .def(
          "rows", [](const Plan& plan, std::size_t table) { return plan.tables.at(table).rows; }, "table"_a,
          "The unique rows of one of the collection's tables, ascending.")
      .def_ro("spans", &Plan::spans, "Per feature, which of the batch's ids are its: (begin, end).")
      .def_ro("output_floats", &Plan::output_floats, "Of a routed plan: how much of the output each trainer gets.");

  nb::class_<Collection>(m, "Collection", "Which features read which tables of a pool.")
      .def_prop_ro("output_width", [](const Collection& c) { return c.spec->output_width; })
      .def("plan", &plan_of, "ids"_a, "offsets"_a, "weights"_a.none(), "block_of"_a, "num_blocks"_a, "parallel"_a,
           "Plans a batch; ids int64, offsets int32 or int64 [num_blocks * batch_size + 1]. Raises IdError.")
      .def(
          "plan_routed", &routed_plan_of, "counts"_a, "messages"_a, "parallel"_a,
          "Plans what trainers sent, their messages one after the other; counts int64 [num_trainers, num_features, 2], "
          "as their routes say for this owner. The output is [1, output_width], trainer by trainer. Raises DataError.");

  bind_routing(m);
  bind_device(m);

  nb::class_<Capture>(m, "Capture", "One forward's rows, as logged.")
      .def_ro("step", &Capture::step)
      .def_ro("bytes", &Capture::bytes)
      .def_prop_ro("plan", [](const Capture& c) { return std::const_pointer_cast<Plan>(c.plan); });

  nb::class_<SummedGradients>(m, "SummedGradients", "Row gradients summed per unique row.")
      .def_ro("sum_of_squares", &SummedGradients::sum_of_squares);

  nb::class_<RecoveryReport>(m, "RecoveryReport", "What recovery found, and what it did.")
      .def_ro("clean", &RecoveryReport::clean)
      .def_ro("epoch", &RecoveryReport::epoch)
      .def_ro("rows_step", &RecoveryReport::rows_step)
      .def_ro("dense_step", &RecoveryReport::dense_step)
      .def_ro("step", &RecoveryReport::step)
      .def_ro("cursor", &RecoveryReport::cursor)
      .def_ro("records_undone", &RecoveryReport::records_undone)
      .def_ro("rows_restored", &RecoveryReport::rows_restored)
      .def_ro("seconds", &RecoveryReport::seconds);

  nb::class_<Pool>(m, "Pool", "A pool opened for writing.")
      .def_static(
          "create",
          [](const std::string& directory, std::uint64_t seed, std::uint64_t log_bytes,
             const std::vector<TableSpec>& tables, bool log_store, bool row_checksums,
             const std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>& begin, std::uint32_t num_shards,
             const std::vector<std::uint32_t>& owned, const nb::bytes& group_uuid, bool adopt) {
            const auto sharding = sharding_of(num_shards, owned, group_uuid, adopt);
            std::vector<format::TableRecord> records;
            for (const TableSpec& table : tables) records.push_back(record_of(table));
            const nb::gil_scoped_release unlocked;
            const auto& [step, cursor, row_updates] = begin;
            Pool::create(directory,
                         {seed,
                          log_bytes,
                          log_store ? format::Store::log : format::Store::in_place,
                          row_checksums,
                          {step, cursor, row_updates},
                          sharding},
                         std::move(records));
          },
          "directory"_a, "seed"_a, "log_bytes"_a, "tables"_a, "log_store"_a = false, "row_checksums"_a = false,
          "begin"_a = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>{0, 0, 0}, "num_shards"_a = 0,
          "owned"_a = std::vector<std::uint32_t>{}, "group_uuid"_a = nb::bytes(""), "adopt"_a = false,
          "begin: step, cursor and row_updates at whose end the pool is made. num_shards: of the pool of which this is "
          "one writer's; the shards that it owns are beside it, two levels up, made here or, with adopt, there "
          "already.")
      .def(
          "__init__",
          [](Pool* self, const std::string& directory, bool relaxed, std::uint32_t dense_interval, bool grow_log,
             std::uint64_t scratchpad_bytes, bool trust_after_reboot,
             const std::optional<std::tuple<Agree, Ready>>& group) {
            OpenOptions options{relaxed ? Recovery::relaxed : Recovery::exact, dense_interval, grow_log,
                                scratchpad_bytes, trust_after_reboot};
            if (group) options.group = in_group(std::get<0>(*group), std::get<1>(*group));
            const nb::gil_scoped_release unlocked;
            new (self) Pool(directory, options);
          },
          "directory"_a, nb::kw_only(), "relaxed"_a, "dense_interval"_a, "grow_log"_a, "scratchpad_bytes"_a,
          "trust_after_reboot"_a, "group"_a = nb::none(),
          "group: of a pool that belongs to one. First asked, with the pool's newest step and the steps of its dense "
          "states, for the step that the group goes back to, each (step, cursor, row_updates); then called when that "
          "can be done, and waited for. Nothing is written before both have returned.")
      .def_prop_ro("recovery", &Pool::recovery, nb::rv_policy::copy)
      .def_prop_ro("tables", [](const Pool& pool) { return specs_of(pool.table_records()); })
      .def_prop_ro("header", [](const Pool& pool) { return to_dict(pool.header()); })
      .def_prop_ro("owned", &owned_by<Pool>, "The shards of this writer; none where the pool has no other.")
      .def_prop_ro("group_uuid", &group_of<Pool>, "Of the pool of which this is one writer's.")
      .def_prop_ro("medium", &Pool::medium_description)
      .def_prop_ro("level", [](const Pool& pool) { return pool.level() == format::Level::power ? "power" : "process"; })
      .def(
          "collection",
          [](const Pool& pool, const std::vector<std::uint32_t>& tables,
             const std::vector<std::tuple<std::string, std::uint32_t>>& features) {
            return make_collection(pool.table_records(), tables, features);
          },
          "tables"_a, "features"_a, "features: (name, index into tables), in the order of the output.")
      .def("dense_state",
           [](Pool& pool) -> std::optional<std::tuple<nb::bytes, nb::bytes>> {
             const auto state = pool.dense_state();
             if (!state) return std::nullopt;
             return std::tuple{to_bytes(state->structure), to_bytes(state->tensors)};
           })
      .def(
          "announce", [](Pool& pool, std::shared_ptr<Plan> plan) { pool.announce(std::move(plan)); }, "plan"_a,
          Unlocked(), "The plan is going to be captured, after those announced before: its rows are fetched ahead.")
      .def(
          "capture", [](Pool& pool, std::shared_ptr<Plan> plan) { return pool.capture(std::move(plan)); }, "plan"_a,
          Unlocked())
      .def(
          "capture_ahead", [](Pool& pool, std::shared_ptr<Plan> plan) { return pool.capture_ahead(std::move(plan)); },
          "plan"_a, Unlocked())
      .def(
          "lookup",
          [](const Pool& pool, const Capture& capture, const FloatMatrix& out) {
            check_shape(*capture.plan, out);
            const nb::gil_scoped_release unlocked;
            pool.lookup(capture, out.data());
          },
          "capture"_a, "out"_a)
      .def(
          "evaluate",
          [](Pool& pool, const Plan& plan, const FloatMatrix& out) {
            check_shape(plan, out);
            const nb::gil_scoped_release unlocked;
            pool.evaluate(plan, out.data());
          },
          "plan"_a, "out"_a)
      .def(
          "lookup_ahead",
          [](Pool& pool, const Plan& next, const Plan& now, const FloatMatrix& out) {
            check_shape(next, out);
            const nb::gil_scoped_release unlocked;
            pool.lookup_ahead(next, now, out.data());
          },
          "next"_a, "now"_a, "out"_a,
          "Pools the next batch from its rows that `now` does not have, the only plan of the current step; before the "
          "update. lookup_rest adds the others.")
      .def(
          "lookup_rest",
          [](const Pool& pool, const Capture& capture, const Plan& now, const FloatMatrix& out) {
            check_shape(*capture.plan, out);
            const nb::gil_scoped_release unlocked;
            pool.lookup_rest(capture, now, out.data());
          },
          "capture"_a, "now"_a, "out"_a,
          "Adds the rows that `now` has, to the out that lookup_ahead filled for the capture's plan and `now`.")
      .def(
          "read_missing",
          [](Pool& pool, const Admission& admission, const Bytes& weights, const FloatVector& state) {
            const nb::gil_scoped_release unlocked;
            pool.read_missing(admission, {reinterpret_cast<std::byte*>(weights.data()), weights.shape(0)},
                              {state.data(), state.shape(0)});
          },
          "admission"_a, "weights"_a, "state"_a,
          "The rows that the admission found missing, in order, as they are at the end of the newest committed step: "
          "weights uint8 [num_missing * row bytes], state float32 [num_missing * state_floats]. Raises ConfigError.")
      .def(
          "scale_gradients",
          [](const Pool& pool, const Capture& capture, std::size_t feature, const ConstFloatMatrix& grad,
             const FloatVector& out) {
            check_shape(*capture.plan, grad);
            if (out.shape(0) != capture.plan->num_lookups_of(feature)) {
              throw nb::value_error("expected one value per lookup of the feature");
            }
            const nb::gil_scoped_release unlocked;
            pool.scale_gradients(capture, feature, grad.data(), out.data());
          },
          "capture"_a, "feature"_a, "grad"_a, "out"_a)
      .def(
          "sum_gradients",
          [](const Pool& pool, const GradientList& gradients) {
            const auto list = gradients_of(gradients);
            const nb::gil_scoped_release unlocked;
            return pool.sum_gradients(list);
          },
          "gradients"_a)
      .def(
          "update",
          [](Pool& pool, const GradientList& gradients, float learning_rate, float epsilon, float beta1, float beta2,
             float weight_decay, float gradient_scale) {
            const auto list = gradients_of(gradients);
            const nb::gil_scoped_release unlocked;
            pool.update(list, update_spec(learning_rate, epsilon, beta1, beta2, weight_decay, gradient_scale));
          },
          "gradients"_a, nb::kw_only(), "learning_rate"_a, "epsilon"_a, "beta1"_a, "beta2"_a, "weight_decay"_a,
          "gradient_scale"_a)
      .def(
          "update_summed",
          [](Pool& pool, const SummedGradients& gradients, float learning_rate, float epsilon, float beta1, float beta2,
             float weight_decay, float gradient_scale) {
            pool.update(gradients, update_spec(learning_rate, epsilon, beta1, beta2, weight_decay, gradient_scale));
          },
          "gradients"_a, nb::kw_only(), "learning_rate"_a, "epsilon"_a, "beta1"_a, "beta2"_a, "weight_decay"_a,
          "gradient_scale"_a, Unlocked())
      .def(
          "put",
          [](Pool& pool, const PartList& parts) {
            const auto list = parts_of(parts);
            const nb::gil_scoped_release unlocked;
            pool.put(list);
          },
          "parts"_a,
          "An update whose new rows were computed elsewhere. Each part: a capture of this step, the tables of its "
          "collection (indexes, ascending) that the part has, their weights uint8 [sum of num_unique * row bytes] and "
          "state float32 [sum of num_unique * state_floats], compact in the capture's order, table after table. The "
          "parts of a capture have each of its tables once. Raises ConfigError, StepError.")
      .def(
          "mapping",
          [](const Pool& pool, std::uint32_t table)
              -> std::optional<std::tuple<std::uintptr_t, std::size_t, std::uintptr_t, std::size_t>> {
            const auto mapping = pool.mapping(table);
            if (!mapping) return std::nullopt;
            return std::tuple{reinterpret_cast<std::uintptr_t>(mapping->weights), mapping->weights_bytes,
                              reinterpret_cast<std::uintptr_t>(mapping->state), mapping->state_bytes};
          },
          "table"_a,
          "Where a table's rows are in memory for as long as this object lives: address and bytes of weights and of "
          "state. None in a log store, or where they are in several shards.")
      .def(
          "materialize", [](Pool& pool, const Plan& plan) { return pool.materialize(plan); }, "plan"_a, Unlocked(),
          "Writes the initial values of the plan's rows that are untouched to their places in the mapping, and returns "
          "how many there were. They stay untouched. Raises PoolFull, ConfigError.")
      .def_prop_ro("dense_due", &Pool::dense_due)
      .def(
          "commit",
          [](Pool& pool, std::uint64_t cursor, const std::optional<nb::bytes>& structure,
             const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& tensors,
             std::size_t tensors_bytes) {
            if (!structure) {
              const nb::gil_scoped_release unlocked;
              return pool.commit(cursor, nullptr);
            }
            const DenseInput input(*structure, tensors, tensors_bytes);
            const Pool::Dense dense = input.view();
            const nb::gil_scoped_release unlocked;
            return pool.commit(cursor, &dense);
          },
          "cursor"_a, "structure"_a.none(), "tensors"_a, "tensors_bytes"_a,
          "tensors: (address, bytes, offset) of contiguous CPU tensors, in order of offset.")
      .def(
          "commit_dense",
          [](Pool& pool, const Mark& mark, const nb::bytes& structure,
             const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& tensors,
             std::size_t tensors_bytes) {
            const DenseInput input(structure, tensors, tensors_bytes);
            const Pool::Dense dense = input.view();
            const nb::gil_scoped_release unlocked;
            pool.commit_dense(step_mark(mark), dense);
          },
          "mark"_a, "structure"_a, "tensors"_a, "tensors_bytes"_a,
          "Of a pool without tables: commits (step, cursor, row_updates) with its dense state.")
      .def("note_group_durable", &Pool::note_group_durable, "step"_a,
           "No pool of the group goes back below this step: the log gives up what led there.")
      .def("empty_log", &Pool::empty_log, Unlocked(), "After that: whatever the log still holds goes home.")
      .def_prop_ro("log_is_low", &Pool::log_is_low, "Is there room for few more steps?")
      .def(
          "write_dense",
          [](Pool& pool, const nb::bytes& structure,
             const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& tensors,
             std::size_t tensors_bytes) {
            const DenseInput input(structure, tensors, tensors_bytes);
            const Pool::Dense dense = input.view();
            const nb::gil_scoped_release unlocked;
            pool.write_dense(dense);
          },
          "structure"_a, "tensors"_a, "tensors_bytes"_a)
      .def(
          "import_rows",
          [](Pool& pool, std::size_t table, std::uint64_t first, const Bytes& weights,
             const std::optional<FloatVector>& state) {
            const nb::gil_scoped_release unlocked;
            pool.import_rows(table, first, {reinterpret_cast<const std::byte*>(weights.data()), weights.shape(0)},
                             state ? std::span<const float>(state->data(), state->shape(0)) : std::span<const float>());
          },
          "table"_a, "first"_a, "weights"_a, "state"_a.none())
      .def("keep_rows", &Pool::keep_rows, "table"_a, "rows"_a, Unlocked(),
           "These rows, ascending, stay in the scratchpad for good, where there is one: a static cache.")
      .def("flush", &Pool::flush, Unlocked())
      .def("close", &Pool::close, Unlocked())
      .def_prop_ro("step", &Pool::step)
      .def_prop_ro("cursor", &Pool::cursor)
      .def_prop_ro("row_updates", &Pool::row_updates)
      .def_prop_ro("durable_step", &Pool::durable_step)
      .def_prop_ro("rows_durable_step", &Pool::rows_durable_step)
      .def_prop_ro("epoch", &Pool::epoch)
      .def_prop_ro("log_bytes", &Pool::log_bytes)
      .def_prop_ro("log_bytes_free", &Pool::log_bytes_free)
      .def(
          "traffic",
          [](const Pool& pool) -> std::optional<nb::dict> {
            const auto traffic = pool.traffic();
            if (!traffic) return std::nullopt;
            return to_dict(*traffic);
          },
          "Rows and bytes since the pool was opened; None where rows are read and written in place.");

  m.def(
      "part_in",
      [](const std::string& directory) -> std::optional<std::pair<nb::bytes, std::vector<std::uint32_t>>> {
        const auto medium = open_pool_medium(directory);
        const Superblock superblock(*medium, false);
        if (!superblock.shards()) return std::nullopt;
        return std::pair(*group_of(superblock), owned_by(superblock));
      },
      "directory"_a,
      "Which group's pool the one in this directory is a part of, and its shards: (group_uuid, owned). Reads nothing "
      "else.");

  nb::class_<Reader>(m, "Reader", "A pool seen without a lock and without changing it.")
      .def(nb::init<const std::string&>(), "directory"_a)
      .def_prop_ro("header", [](const Reader& reader) { return to_dict(reader.header()); })
      .def_prop_ro("owned", &owned_by<Reader>, "The shards of this writer; none where the pool has no other.")
      .def_prop_ro("group_uuid", &group_of<Reader>, "Of the pool of which this is one writer's.")
      .def_prop_ro("tables", [](const Reader& reader) { return specs_of(reader.table_records()); })
      .def_prop_ro("medium", &Reader::medium_description)
      .def_prop_ro("epoch", [](const Reader& reader) { return reader.epoch().epoch; })
      .def_prop_ro("clean", [](const Reader& reader) { return reader.epoch().clean != 0; })
      .def_prop_ro("commit", [](const Reader& reader) { return to_dict(reader.commit()); })
      .def_prop_ro(
          "log_bytes_used", [](const Reader& reader) { return reader.log_use().bytes; },
          "What of the log is needed: by recovery, and in a log store by readers.")
      .def_prop_ro(
          "merged_step", [](const Reader& reader) { return reader.log_use().merged_step; },
          "Of a log store: its homes have the rows of this step at the latest.")
      .def("dense_state",
           [](const Reader& reader) -> std::optional<std::tuple<std::uint64_t, nb::bytes, nb::bytes>> {
             const auto state = reader.dense_state();
             if (!state) return std::nullopt;
             return std::tuple{state->header.step, to_bytes(state->structure), to_bytes(state->tensors)};
           })
      .def(
          "dense_marks",
          [](const Reader& reader) {
            std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>> marks;
            for (const StepMark& mark : reader.dense_marks())
              marks.emplace_back(mark.step, mark.cursor, mark.row_updates);
            return marks;
          },
          "Step, cursor and row_updates of all dense states that hold.")
      .def(
          "collection",
          [](const Reader& reader, const std::vector<std::uint32_t>& tables,
             const std::vector<std::tuple<std::string, std::uint32_t>>& features) {
            return make_collection(reader.table_records(), tables, features);
          },
          "tables"_a, "features"_a)
      .def(
          "evaluate",
          [](Reader& reader, const Plan& plan, const FloatMatrix& out) {
            check_shape(plan, out);
            const nb::gil_scoped_release unlocked;
            reader.evaluate(plan, out.data());
          },
          "plan"_a, "out"_a)
      .def(
          "touched_rows",
          [](const Reader& reader, std::size_t table, std::uint64_t first, std::size_t count) {
            return reader.touched_rows(table, first, count);
          },
          "table"_a, "first"_a, "count"_a, Unlocked())
      .def(
          "gather_rows",
          [](const Reader& reader, std::size_t table, const std::vector<std::uint64_t>& rows, const Bytes& weights,
             const Bytes& state, const Bytes& differs) {
            const auto& spec = reader.tables().at(table);
            if (weights.shape(0) != rows.size() * spec.weight_bytes() ||
                state.shape(0) != rows.size() * spec.state_bytes() || differs.shape(0) != rows.size() ||
                std::any_of(rows.begin(), rows.end(), [&](std::uint64_t row) { return row >= spec.num_rows; })) {
              throw nb::value_error("arrays do not fit the rows");
            }
            const nb::gil_scoped_release unlocked;
            reader.gather_rows(table, rows, reinterpret_cast<std::byte*>(weights.data()),
                               reinterpret_cast<float*>(state.data()), differs.data());
          },
          "table"_a, "rows"_a, "weights"_a, "state"_a, "differs"_a)
      .def(
          "read_rows",
          [](const Reader& reader, std::size_t table, std::uint64_t first, std::size_t count, const Bytes& weights,
             const Bytes& state) {
            const auto& spec = reader.tables().at(table);
            if (first > spec.num_rows || count > spec.num_rows - first ||
                weights.shape(0) != count * spec.weight_bytes() || state.shape(0) != count * spec.state_bytes()) {
              throw nb::value_error("arrays do not fit the rows");
            }
            const nb::gil_scoped_release unlocked;
            reader.read_rows(table, first, count, reinterpret_cast<std::byte*>(weights.data()),
                             reinterpret_cast<float*>(state.data()));
          },
          "table"_a, "first"_a, "count"_a, "weights"_a, "state"_a)
      .def("verify", &Reader::verify, "step"_a = nb::none(), Unlocked(),
           "step: where the pool goes back to when it is opened, where a group says that.");

  nb::class_<LiveCopy>(m, "LiveCopy", "The rows of a pool at the end of one step, while a writer goes on.")
      .def(
          "__init__",
          [](LiveCopy* self, const std::string& directory) {
            const nb::gil_scoped_release unlocked;
            new (self) LiveCopy(directory);
          },
          "directory"_a)
      .def_prop_ro("header", [](const LiveCopy& copy) { return to_dict(copy.header()); })
      .def_prop_ro("tables", [](const LiveCopy& copy) { return specs_of(copy.table_records()); })
      .def_prop_ro("fixes_first", &LiveCopy::fixes_first, "Whether fix comes before the rows, or after them.")
      .def_prop_ro("newest_dense_step", &LiveCopy::newest_dense_step)
      .def(
          "fix",
          [](LiveCopy& copy) {
            const LiveCopy::Fixed fixed = [&] {
              const nb::gil_scoped_release unlocked;
              return copy.fix();
            }();
            std::optional<std::tuple<nb::bytes, nb::bytes>> dense;
            if (fixed.dense) dense = {to_bytes(fixed.dense->structure), to_bytes(fixed.dense->tensors)};
            return std::tuple{fixed.mark.step, fixed.mark.cursor, fixed.mark.row_updates, dense};
          },
          "Decides on the step: step, cursor, row_updates, and structure and tensors of the dense state.")
      .def("copy_rows", &next_rows<&LiveCopy::copy_rows>, "table"_a, "first"_a, "rows"_a, "weights"_a, "state"_a,
           "Touched rows at or after `first`, as many as there is room for: how many, and where to go on.")
      .def(
          "initial_rows",
          [](const LiveCopy& copy, std::uint32_t table, const ConstRowNumbers& rows, const Bytes& weights) {
            if (weights.shape(0) != rows.shape(0) * copy.tables().at(table).weight_bytes()) {
              throw nb::value_error("the array does not fit the rows");
            }
            copy.initial_rows(table, rows.data(), rows.shape(0), reinterpret_cast<std::byte*>(weights.data()));
          },
          "table"_a, "rows"_a, "weights"_a, Unlocked())
      .def("settle", &LiveCopy::settle, Unlocked())
      .def("corrections", &next_rows<&LiveCopy::corrections>, "table"_a, "first"_a, "rows"_a, "weights"_a, "state"_a,
           "After settle: rows that count instead of those that were copied, likewise.");

  m.def(
      "plan_repair",
      [](const std::string& directory) {
        const RepairPlan plan = [&] {
          const nb::gil_scoped_release unlocked;
          return plan_repair(directory);
        }();
        std::vector<std::tuple<std::string, std::uint64_t, nb::bytes, std::string>> edits;
        for (const Edit& edit : plan.edits) edits.emplace_back(edit.file, edit.offset, to_bytes(edit.bytes), edit.why);
        return std::tuple{edits, plan.refusals};
      },
      "directory"_a,
      "What of a damaged pool may be put right without a guess: (file, offset, bytes, why) of each edit, and what may "
      "not.");
  m.def(
      "crc32c", [](std::uint32_t crc, const ConstBytes& data) { return crc32c(crc, data.data(), data.size()); },
      "crc"_a, "data"_a, Unlocked(), "The CRC-32C of the bytes that gave `crc`, followed by these; begin with 0.");
  m.def(
      "all_finite", [](ConstFloatMatrix values) { return all_finite(values.data(), values.size()); }, "values"_a,
      Unlocked(), "Whether no element is infinite or a NaN.");
  m.def(
      "is_block_medium", [](const std::string& directory) { return !is_dax(directory) && !is_volatile(directory); },
      "directory"_a, "Whether files of the directory lie neither on DAX memory nor in volatile memory.");
  m.def(
      "places_of",
      [](std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard, const Ids& rows) {
        const ShardLayout layout = checked_layout(num_rows, num_shards, first_shard);
        return mapped(rows, num_rows, [&](std::uint64_t row) { return layout.place_of(row); });
      },
      "num_rows"_a, "num_shards"_a, "first_shard"_a, "rows"_a,
      "The places of rows of a table that is split over so many shards.");
  m.def(
      "rows_of_places",
      [](std::uint64_t num_rows, std::uint32_t num_shards, std::uint32_t first_shard, const Ids& places) {
        const ShardLayout layout = checked_layout(num_rows, num_shards, first_shard);
        return mapped(places, layout.end_place(), [&](std::uint64_t place) { return layout.row_of(place); });
      },
      "num_rows"_a, "num_shards"_a, "first_shard"_a, "places"_a,
      "The other way; a place without a row gives a number beyond the table.");
  m.def("set_num_threads", &set_num_threads, "num_threads"_a);
  m.def("num_threads", &num_threads);
  m.def("instruction_set", [] { return best_kernels().name; });
  m.def("kill_at_persist_point", &Medium::kill_at_persist_point, "n"_a,
        "Kills this process with SIGKILL at its n-th persist point from now (0: never). For crash tests.");
  m.def("persist_points_left", &Medium::persist_points_left);
}

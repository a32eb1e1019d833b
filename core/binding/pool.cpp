// Pool, for the module, with the classes that its methods return and what tells whose part a pool is.
#include "pool/pool.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/stage_spans.h"
#include "binding/arrays.h"
#include "binding/module.h"
#include "binding/plans.h"
#include "binding/pool_arguments.h"
#include "binding/records.h"
#include "device/slot_directory.h"
#include "layout/superblock.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {

void bind_pool(nb::module_& m) {
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
             const std::vector<std::uint32_t>& owned, const nb::bytes& group_uuid, bool adopt,
             std::uint32_t format_version, const std::string& log_directory) {
            const auto sharding = sharding_of(num_shards, owned, group_uuid, adopt);
            const auto group = uuid_of(group_uuid);
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
                          sharding,
                          group,
                          format_version,
                          log_directory},
                         std::move(records));
          },
          "directory"_a, "seed"_a, "log_bytes"_a, "tables"_a, "log_store"_a = false, "row_checksums"_a = false,
          "begin"_a = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>{0, 0, 0}, "num_shards"_a = 0,
          "owned"_a = std::vector<std::uint32_t>{}, "group_uuid"_a = nb::bytes(""), "adopt"_a = false,
          "format_version"_a = format::version, "log_directory"_a = "",
          "begin: step, cursor and row_updates at whose end the pool is made. num_shards: of the pool of which this is "
          "one writer's; the shards that it owns are beside it, two levels up, made here or, with adopt, there "
          "already. group_uuid: of the group of which this is a part. format_version: an older one, for a group whose "
          "other parts are of that. log_directory: of a row log that lies on a medium of its own.")
      .def_static("take_back", &Pool::take_back, "directory"_a, Unlocked(),
                  "Lets a pool in which nothing was ever done be made anew. Raises PoolExists where something was.")
      .def(
          "__init__",
          [](Pool* self, const std::string& directory, bool relaxed, std::uint32_t dense_interval, bool grow_log,
             std::uint64_t scratchpad_bytes, bool trust_after_reboot, bool warm,
             const std::optional<std::tuple<Agree, Ready>>& group, bool synchronous,
             const std::optional<DialFigures>& dial, const std::optional<DialFigures>& log_dial,
             const std::vector<unsigned>& scratchpad_nodes, const std::optional<VictimFigures>& victims) {
            OpenOptions options{.recovery = relaxed ? Recovery::relaxed : Recovery::exact,
                                .dense_interval = dense_interval,
                                .grow_log = grow_log,
                                .scratchpad_bytes = scratchpad_bytes,
                                .scratchpad_nodes = scratchpad_nodes,
                                .warm = warm,
                                .synchronous = synchronous,
                                .trust_after_reboot = trust_after_reboot};
            if (dial) options.dial = dial_spec(*dial);
            if (log_dial) options.log_dial = dial_spec(*log_dial);
            if (victims) options.victims = victim_options(*victims);
            if (group) options.group = in_group(std::get<0>(*group), std::get<1>(*group));
            const nb::gil_scoped_release unlocked;
            new (self) Pool(directory, options);
          },
          "directory"_a, nb::kw_only(), "relaxed"_a, "dense_interval"_a, "grow_log"_a, "scratchpad_bytes"_a,
          "trust_after_reboot"_a, "warm"_a = true, "group"_a = nb::none(), "synchronous"_a = false,
          "dial"_a = nb::none(), "log_dial"_a = nb::none(), "scratchpad_nodes"_a = std::vector<unsigned>{},
          "victims"_a = nb::none(),
          "warm: fill the scratchpad of a log store beside the first steps. "
          "group: of a pool that belongs to one. First asked, with the pool's newest step and the steps of its dense "
          "states, for the step that the group goes back to, each (step, cursor, row_updates); then called when that "
          "can be done, and waited for. Nothing is written before both have returned. "
          "synchronous: nothing is made durable beside training. "
          "dial: what the medium is made as slow as, in the order of DialSpec (core/media/dial.h); log_dial: the row "
          "log's, where it is another. scratchpad_nodes: NUMA nodes on which a scratchpad's rows lie; none: on any. "
          "victims: of the memory for rows that leave it: bytes, directory (empty: the machine's memory), nodes, "
          "and what it is made as slow as.")
      .def_prop_ro(
          "dial_counts",
          [](const Pool& pool) -> nb::object {
            const auto counts = pool.dial_counts();
            return counts ? nb::object(to_dict(*counts)) : nb::none();
          },
          nb::sig("def dial_counts(self) -> dict[str, float] | None"),
          "What was asked of a dialled medium since the pool was opened; None where it is as it is.")
      .def_prop_ro("recovery", &Pool::recovery, nb::rv_policy::copy)
      .def_prop_ro("tables", [](const Pool& pool) { return specs_of(pool.table_records()); })
      .def_prop_ro("header", [](const Pool& pool) { return to_dict(pool.header(), pool.level()); })
      .def_prop_ro("owned", &owned_by<Pool>, "The shards of this writer; none where the pool has no other.")
      .def_prop_ro("group_uuid", &group_of<Pool>, "Of the pool of which this is one writer's.")
      .def_prop_ro("medium", &Pool::medium_description)
      .def_prop_ro("level", [](const Pool& pool) { return pool.level() == format::Level::power ? "power" : "process"; })
      .def(
          "collection",
          [](Pool& pool, const std::vector<std::uint32_t>& tables,
             const std::vector<std::tuple<std::string, std::uint32_t>>& features) {
            const nb::gil_scoped_release unlocked;
            return make_collection(pool.table_records(), tables, features,
                                   [&](std::uint32_t table) { return pool.keys(table); });
          },
          "tables"_a, "features"_a, "features: (name, index into tables), in the order of the output.")
      .def("take_keys", &Pool::take_keys, "former"_a,
           "Of a pool in whose place this one was made, with more tables: its collections plan for this one.")
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
          [](Pool& pool, const Capture& capture, const Plan& now, const FloatMatrix& out) {
            check_shape(*capture.plan, out);
            const nb::gil_scoped_release unlocked;
            pool.lookup_rest(capture, now, out.data());
          },
          "capture"_a, "now"_a, "out"_a,
          "Adds the rows that `now` has, to the out that lookup_ahead filled for the capture's plan and `now`.")
      .def("expect_keys", &Pool::expect_keys, "plan"_a, Unlocked(),
           "The plan's keys keep their rows for some steps, until it is captured. Raises StepError where they lost "
           "them.")
      .def("oldest_keys", &Pool::oldest_keys, "table"_a,
           "Of a table with keys: in the next step, records of steps before this do not count. Of each of its shards, "
           "where "
           "max_keys has them count for themselves; else one for all.")
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
            const Plan& plan = *capture.plan;
            if (feature >= plan.features.size() || out.shape(0) != plan.num_lookups_of(feature)) {
              throw nb::value_error("expected a feature of the plan, and one value per lookup of it");
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
              -> std::optional<
                  std::tuple<std::uintptr_t, std::uintptr_t, std::vector<std::pair<std::uintptr_t, std::size_t>>>> {
            const auto mapping = pool.mapping(table);
            if (!mapping) return std::nullopt;
            std::vector<std::pair<std::uintptr_t, std::size_t>> ranges;
            for (const auto range : mapping->ranges) {
              ranges.emplace_back(reinterpret_cast<std::uintptr_t>(range.data()), range.size());
            }
            return std::tuple{reinterpret_cast<std::uintptr_t>(mapping->weights),
                              reinterpret_cast<std::uintptr_t>(mapping->state), std::move(ranges)};
          },
          "table"_a,
          "Where a table's rows are in memory until the pool is closed: the addresses of weights and of state "
          "(0: there is none), row after row, and address and bytes of each range of them that is there. None in a log "
          "store.")
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
      .def(
          "import_rows",
          [](Pool& pool, std::size_t table, const ConstRowNumbers& rows, const Bytes& weights,
             const std::optional<FloatVector>& state) {
            const nb::gil_scoped_release unlocked;
            pool.import_rows(table, std::span<const std::uint64_t>(rows.data(), rows.shape(0)),
                             {reinterpret_cast<const std::byte*>(weights.data()), weights.shape(0)},
                             state ? std::span<const float>(state->data(), state->shape(0)) : std::span<const float>());
          },
          "table"_a, "rows"_a, "weights"_a, "state"_a.none())
      .def(
          "import_values",
          [](Pool& pool, std::size_t table, const ConstRowNumbers& rows, const ConstBytes& values) {
            const nb::gil_scoped_release unlocked;
            pool.import_values(table, std::span<const std::uint64_t>(rows.data(), rows.shape(0)),
                               {reinterpret_cast<const std::byte*>(values.data()), values.shape(0)});
          },
          "table"_a, "rows"_a, "values"_a, "Rows of a new pool; values: of each its weights, and behind them its state.")
      .def("keep_rows", &Pool::keep_rows, "table"_a, "rows"_a, Unlocked(),
           "These rows, ascending, stay in the scratchpad for good, where there is one: a static cache.")
      .def("end_steps", &Pool::end_steps, Unlocked(),
           "No further step follows the one under way: commits are not held up for the sake of later ones any more. "
           "From any thread.")
      .def(
          "go_on",
          [](Pool& pool, const std::tuple<Agree, Ready>& group) {
            const InGroup other = in_group(std::get<0>(group), std::get<1>(group));
            const nb::gil_scoped_release unlocked;
            pool.go_on(other);
          },
          "group"_a,
          "Goes on in another group, as if the pool had been opened in it, without closing it. What was not committed "
          "is taken back; collections are made anew. `recovery` says then what that took. Raises what opening raises.")
      .def("flush", &Pool::flush, Unlocked())
      .def("close", &Pool::close, Unlocked())
      .def_prop_ro(
          "is_inherited", &Pool::is_inherited,
          "Whether this process is a fork of the one that opened the pool: then verbs raise StepError and close "
          "does nothing.")
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
          "Rows and bytes since the pool was opened; None where rows are read and written in place.")
      .def(
          "key_counts",
          [](const Pool& pool) -> std::optional<nb::dict> {
            const auto counts = pool.key_counts();
            if (!counts) return std::nullopt;
            nb::dict out;
            out["admitted"] = counts->admitted;
            out["held_back"] = counts->held_back;
            out["left_behind"] = counts->left_behind;
            return out;
          },
          "What became of keys since the pool was opened; None where all of them train and stay.")
      .def(
          "take_spans",
          [](Pool& pool) {
            const auto seconds = [](StageSpans::Clock::time_point at) {
              return std::chrono::duration<double>(at.time_since_epoch()).count();
            };
            std::vector<std::tuple<std::string, std::string, double, double>> taken;
            for (const StageSpans::Span& span : pool.take_spans()) {
              taken.emplace_back(name_of(span.stage), thread_of(span.stage), seconds(span.began), seconds(span.ended));
            }
            return taken;
          },
          "(stage, thread, began, ended) of what ran beside training and ended since the last call, in seconds of "
          "time.perf_counter; the newest 4096.");

  m.def(
      "header_in",
      [](const std::string& directory) {
        const auto medium = open_pool_medium(directory);
        return to_dict(Superblock(*medium, false).header(), medium->level());
      },
      "directory"_a, "What the pool in this directory says of itself: its header. Reads nothing else.");

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
}

}  // namespace holdfast

#include "binding/pool_arguments.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <utility>

#include "binding/plans.h"

namespace nb = nanobind;

namespace holdfast {
namespace {

// None is a shared pointer, too, where it is part of a tuple.
void check_is_capture(const auto& capture) {
  if (capture == nullptr) throw nb::type_error("expected a Capture, got None");
}

}  // namespace

std::vector<RowsPart> parts_of(const PartList& list) {
  std::vector<RowsPart> parts;
  for (const auto& [capture, tables, weights, state] : list) {
    check_is_capture(capture);
    parts.push_back({capture,
                     tables,
                     {reinterpret_cast<const std::byte*>(weights.data()), weights.shape(0)},
                     {state.data(), state.shape(0)}});
  }
  return parts;
}

std::vector<RowGradients> gradients_of(const GradientList& list) {
  std::vector<RowGradients> gradients;
  for (const auto& [capture, grad] : list) {
    check_is_capture(capture);
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

DenseInput::DenseInput(nb::bytes structure_,
                       const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& list, std::size_t total)
    : structure(std::move(structure_)), tensors_bytes(total) {
  std::size_t end = 0;
  for (const auto& [address, bytes, offset] : list) {
    if (offset < end || offset > total || bytes > total - offset) throw nb::value_error("tensors must not overlap");
    end = offset + bytes;
    tensors.push_back({reinterpret_cast<const void*>(address), bytes, offset});
  }
}

StepMark step_mark(const Mark& mark) {
  const auto& [step, cursor, row_updates] = mark;
  return {step, cursor, row_updates};
}

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

DialSpec dial_spec(const DialFigures& figures) {
  const auto& [read_rate, write_rate, stream_write_rate, read_latency, write_latency, outstanding, granularity,
               sync_latency, cache_bytes, duplex] = figures;
  return {read_rate,   write_rate,  stream_write_rate, read_latency, write_latency,
          outstanding, granularity, sync_latency,      cache_bytes,  duplex};
}

VictimOptions victim_options(const VictimFigures& figures) {
  const auto& [bytes, directory, nodes, dial] = figures;
  VictimOptions options{.bytes = bytes, .directory = directory, .nodes = nodes};
  if (dial) options.dial = dial_spec(*dial);
  return options;
}

std::optional<Uuid> uuid_of(const nb::bytes& uuid) {
  Uuid found{};
  if (uuid.size() == 0) return std::nullopt;
  if (uuid.size() != found.size()) throw nb::value_error("group_uuid must have 16 bytes");
  std::memcpy(found.data(), uuid.c_str(), uuid.size());
  return found;
}

std::optional<Sharding> sharding_of(std::uint32_t num_shards, const std::vector<std::uint32_t>& owned,
                                    const nb::bytes& group_uuid, bool adopt) {
  if (num_shards == 0) return std::nullopt;
  const auto group = uuid_of(group_uuid);
  if (!group) throw nb::value_error("group_uuid must have 16 bytes");
  return Sharding{num_shards, owned, *group, adopt};
}

}  // namespace holdfast

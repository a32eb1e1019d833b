// What Pool's methods are given, in the core's words.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding/arrays.h"
#include "media/dial.h"
#include "pool/pool.h"

namespace holdfast {

// Capture, tables, weights and state of each part.
using PartList =
    std::vector<std::tuple<std::shared_ptr<Capture>, std::vector<std::uint32_t>, ConstBytes, ConstFloatVector>>;
std::vector<RowsPart> parts_of(const PartList& list);

using GradientList = std::vector<std::tuple<std::shared_ptr<Capture>, ConstFloatMatrix>>;
std::vector<RowGradients> gradients_of(const GradientList& list);

UpdateSpec update_spec(float learning_rate, float epsilon, float beta1, float beta2, float weight_decay,
                       float gradient_scale);

// A dense state as Python gives it: JSON text and (address, bytes, offset) of each tensor.
struct DenseInput {
  nanobind::bytes structure;
  std::vector<DenseTensor> tensors;
  std::size_t tensors_bytes;

  DenseInput(nanobind::bytes structure_, const std::vector<std::tuple<std::uintptr_t, std::size_t, std::size_t>>& list,
             std::size_t total);
  Pool::Dense view() const {
    return {{reinterpret_cast<const std::byte*>(structure.c_str()), structure.size()}, tensors, tensors_bytes};
  }
};

using Mark = std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>;  // a StepMark
using Agree = nanobind::typed<nanobind::callable, Mark(Mark, std::vector<Mark>)>;
using Ready = nanobind::typed<nanobind::callable, void()>;

StepMark step_mark(const Mark& mark);

// The callables live as long as the call that they are arguments of.
InGroup in_group(const Agree& agree, const Ready& ready);

// A DialSpec's figures, in its order.
using DialFigures = std::tuple<double, double, double, double, double, double, std::uint64_t, double, double, bool>;
DialSpec dial_spec(const DialFigures& figures);

// Bytes, directory, nodes and dial.
using VictimFigures = std::tuple<std::uint64_t, std::string, std::vector<unsigned>, std::optional<DialFigures>>;
VictimOptions victim_options(const VictimFigures& figures);

// 16 bytes, or none.
std::optional<Uuid> uuid_of(const nanobind::bytes& uuid);
std::optional<Sharding> sharding_of(std::uint32_t num_shards, const std::vector<std::uint32_t>& owned,
                                    const nanobind::bytes& group_uuid, bool adopt);

}  // namespace holdfast

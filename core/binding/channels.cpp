// Channels between ranks of one machine, for the module.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/tuple.h>

#include <cstddef>
#include <cstdint>
#include <tuple>

#include "binding/arrays.h"
#include "binding/module.h"
#include "routing/memory_channel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace holdfast {
namespace {

using AddressTuple = std::tuple<std::int64_t, std::int64_t, std::uint64_t>;

}  // namespace

void bind_channels(nb::module_& m) {
  nb::enum_<Reception>(m, "Reception", "What became of a message that was waited for.")
      .value("RECEIVED", Reception::received)
      .value("NOT_YET", Reception::not_yet)
      .value("GONE", Reception::gone);

  nb::class_<ChannelWriter>(m, "ChannelWriter", "Messages to a process on the same machine, through memory.")
      .def(nb::init<std::size_t>(), "capacity"_a,
           "capacity: bytes before it is outgrown. Raises RuntimeError where the system gives no memory for it.")
      .def_prop_ro(
          "address",
          [](const ChannelWriter& channel) -> AddressTuple {
            const ChannelAddress address = channel.address();
            return {address.process, address.descriptor, address.token};
          },
          "Where another process finds it, before the first message.")
      .def(
          "send", [](ChannelWriter& channel, ConstBytes data) { channel.send(data.data(), data.size()); }, "data"_a,
          Unlocked(), "Copies it, and waits for nobody. Raises RuntimeError where there is no memory.")
      .def("close", &ChannelWriter::close, "Nothing more will come.");

  nb::class_<ChannelReader>(m, "ChannelReader", "Messages of a process on the same machine.")
      .def(
          "__init__",
          [](ChannelReader* channel, const AddressTuple& address) {
            const auto& [process, descriptor, token] = address;
            new (channel) ChannelReader({process, descriptor, token});
          },
          "address"_a, "Raises RuntimeError where that process cannot be reached.")
      .def(
          "receive",
          [](ChannelReader& channel, Bytes out, double seconds) {
            return channel.receive(out.data(), out.size(), seconds);
          },
          "out"_a, "seconds"_a, Unlocked(),
          "Takes the next message into `out`, whose size it has to have: else raises RuntimeError.");
}

}  // namespace holdfast

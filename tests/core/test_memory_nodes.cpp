// A scratchpad's rows lie on the nodes that they are asked to lie on, and nothing else of it does.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/huge_array.h"
#include "base/memory_nodes.h"
#include "check.h"
#include "pool/pool.h"
#include "scripted_run.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

// The kernel's own words for the policy of a mapping: "default", "bind:0", "interleave:0" or "weighted interleave:0".
std::string policy_at(const void* address) {
  char wanted[32];
  std::snprintf(wanted, sizeof wanted, "%lx ", reinterpret_cast<unsigned long>(address));
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    if (!line.starts_with(wanted)) continue;
    const auto begin = line.find(' ') + 1;
    return line.substr(begin, line.find(" anon") - begin);
  }
  return {};
}

bool system_places_memory() {
  const HugeArray<std::byte> memory(1 << 20);
  try {
    place_on_nodes(memory.data(), memory.size(), std::array{0U}, "scratchpad_nodes");
  } catch (const Error&) {
    return false;  // a container may refuse it to all
  }
  memory.data()[0] = std::byte{1};
  return !policy_at(memory.data()).empty();
}

void memory_lies_where_it_is_asked_to() {
  check::context = "one node";
  const HugeArray<std::byte> one(8 << 20), several(8 << 20), any(8 << 20);
  place_on_nodes(one.data(), one.size(), std::array{0U}, "scratchpad_nodes");
  place_on_nodes(several.data(), several.size(), std::array{0U, 0U}, "scratchpad_nodes");
  place_on_nodes(any.data(), any.size(), {}, "scratchpad_nodes");
  for (const auto* memory : {&one, &several, &any}) memory->data()[12345] = std::byte{7};
  CHECK(policy_at(one.data()).starts_with("bind:0") || policy_at(one.data()).starts_with("bind=static:0"));
  CHECK(policy_at(several.data()).find("interleave") != std::string::npos);
  CHECK(policy_at(any.data()).starts_with("default"));
}

void a_node_that_is_not_there_is_named() {
  check::context = "no such node";
  const HugeArray<std::byte> memory(1 << 20);
  for (const unsigned node : {777U, 1024U, 4'000'000'000U}) {
    try {
      place_on_nodes(memory.data(), memory.size(), std::array{node}, "scratchpad_nodes");
      CHECK(false);
    } catch (const Error& error) {
      CHECK(error.kind() == ErrorKind::config);
      CHECK(std::string(error.what()).find(std::to_string(node)) != std::string::npos);
    }
  }
}

// Rows are the same; a pool that is asked for nodes that are not there is refused when it is opened, and opens without.
void a_pool_trains_with_its_rows_on_a_node() {
  check::context = "a pool";
  const TemporaryDirectory placed(TemporaryDirectory::Place::disk), anywhere(TemporaryDirectory::Place::disk);
  OpenOptions options;
  options.scratchpad_bytes = 1 << 20;
  for (const std::string& path : {placed.path(), anywhere.path()}) {
    make_pool(path, 1 << 20, format::Store::log);
    options.scratchpad_nodes = path == placed.path() ? std::vector<unsigned>{0} : std::vector<unsigned>{};
    Run run(path, options);
    for (int i = 0; i < 12; ++i) run.step(false);
    run.pool.close();
  }
  CHECK(rows_of(Reader(placed.path())) == rows_of(Reader(anywhere.path())));
  options.scratchpad_nodes = {0, 777};
  CHECK(kind_thrown_by([&] { const Pool pool(placed.path(), options); }) == ErrorKind::config);
  options.scratchpad_nodes = {};
  const Pool pool(placed.path(), options);
  CHECK(pool.recovery().clean);
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  a_node_that_is_not_there_is_named();
  if (!system_places_memory()) {
    std::puts("the system does not let memory be placed: skipped");
    return 0;
  }
  memory_lies_where_it_is_asked_to();
  a_pool_trains_with_its_rows_on_a_node();
  return 0;
}

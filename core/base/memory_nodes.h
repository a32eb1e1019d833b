// Memory nodes: on which of a machine's NUMA nodes memory lies. A node may have memory alone, as one that is a CXL device.
#pragma once

#include <cstddef>
#include <span>

namespace holdfast {

// Pages of [begin, begin + bytes) that are touched from now on lie on these nodes: on one alone, or on several by turns, by
// the weights of the system where its kernel has them (/sys/kernel/mm/mempolicy/weighted_interleave). `begin` lies at the
// beginning of a page. None: anywhere. Throws config where the system refuses all of them. option: that named them.
void place_on_nodes(void* begin, std::size_t bytes, std::span<const unsigned> nodes, const char* option);

// Throws config where one of them cannot be had.
void check_nodes(std::span<const unsigned> nodes, const char* option);

}  // namespace holdfast

// Device plan: what kernels on a device need to know of an admission, in one buffer that goes over in one copy.
//
// Invariants
// - Arrays begin at multiples of 128 bytes, in the order in which they stand here; nothing else is in the buffer.
// - Unique rows are those of the directory's tables, table after table, ascending in each. Their occurrences are in
//   order of occurrence. Features are those that read these tables, in the order of the collection.
// - A function of the plan and of the slots: threads only divide it among themselves.
#pragma once

#include <cstddef>
#include <optional>

#include "device/slot_directory.h"

namespace holdfast {

struct PackedArray {
  std::size_t offset;  // bytes
  std::size_t count;   // elements
};

// U unique rows, M of them missing; L lookups; F features of B bags each. In a routed plan, whose pooled output is one row, B
// is 1, and F the number of all bags: kernels know no difference.
struct DevicePlan {
  PackedArray slots;                           // int32 [U]
  PackedArray rows;    // int64 [U] the rows' numbers in their tables, whole ones where these are in shards
  std::optional<PackedArray> places;  // int64 [U] where they lie in memory, row after row, where a table is split
  PackedArray tables;                          // int32 [U] the pool's numbers of these
  std::optional<PackedArray> keys;  // int64 [U] of tables with keys: the rows'
  std::optional<PackedArray> shards;  // int32 [U] of these, where a table is split: the rows' of their table's
  PackedArray missing;                         // int32 [M] indexes of unique rows, ascending
  PackedArray row_start;  // int32 [U + 1] occurrences of row u: row_start[u] .. row_start[u + 1]
  PackedArray gradient_offset;  // int32 [L] element of [num_bags, output_width] where its bag begins
  std::optional<PackedArray> gradient_scale;  // float32 [L] where not all are 1
  PackedArray lookup_slot;  // int32 [L] in the order of the batch: feature by feature, bag by bag
  PackedArray bag_start;  // int32 [F * B + 1] indexes into lookup_slot
  std::optional<PackedArray> lookup_scale;  // float32 [L] per-sample weights, of a weighted batch
  PackedArray columns;  // int32 [F] first column of the pooled output
  std::size_t bytes;  // of all
};

// Throws config where offsets do not fit 31 bits.
DevicePlan device_plan_of(const Admission& admission);

// Fills `out`, all of it, on all threads. It has device_plan_of(admission).bytes or more and begins at a multiple of 8.
// Throws step where the admission was released.
void pack(const Admission& admission, const DevicePlan& layout, std::byte* out);

}  // namespace holdfast

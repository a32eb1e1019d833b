// Put rows: rows of a step's captures that were updated elsewhere, on an accelerator, as whoever computed them gives them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "rows/row_table.h"
#include "step/capture.h"

namespace holdfast {

// The new rows of some tables of a capture: all unique rows of each, in the capture's order, table after table.
struct RowsPart {
  std::shared_ptr<const Capture> capture;
  std::vector<std::uint32_t> tables;  // of the capture's collection, by index; ascending
  std::span<const std::byte> weights;
  std::span<const float> state;
};

// All new rows of one capture, by table of its collection.
struct ReadyCapture {
  std::shared_ptr<const Capture> capture;
  std::vector<ReadyRows> tables;
};

// The parts by capture. Throws config where a part does not fit its tables, and step where there are no parts or where
// those of a capture do not have each of its tables once.
std::vector<ReadyCapture> ready_captures(const std::vector<RowTable>& tables, const std::vector<RowsPart>& parts);

}  // namespace holdfast

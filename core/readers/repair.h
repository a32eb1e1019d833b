// Repair: what of a damaged pool may be put right without a guess.
//
// Invariants
// - It reads, and writes nothing: an edit says which bytes to write where, and why.
// - An edit replaces only bytes of a structure that does not hold, that no recovery would read if it held, or all of
//   whose content another structure says. So half an edit leaves the structure as damaged as it was.
// - Edits need no order, and each leaves a pool that a crash could have left.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace holdfast {

struct Edit {
  std::string file;
  std::uint64_t offset;
  std::vector<std::byte> bytes;
  std::string why;
};

struct RepairPlan {
  std::vector<Edit> edits;  // as far as can be seen now: after them more may be seen, or may be possible
  std::vector<std::string> refusals;  // what is damaged and stays so, each with the reason
};

// Of the pool in `directory`, which nobody has open. Throws what opening throws where too little of it holds to say
// more.
RepairPlan plan_repair(const std::string& directory);
// Of the labels of its files, and of a part of a group alone, too: before anything else, which needs the files.
RepairPlan plan_label_repair(const std::string& directory);

}  // namespace holdfast

// Superblock repair: what pool.holdfast must have been, where it is lost, from its copy and from the pool's other files.
//
// Invariants
// - It reads, and writes nothing.
// - What is written once comes from pool.copy, or from a superblock that holds, never from anywhere else.
// - Epoch and commit records come from the superblock where it still has them. Else they are such that recovery, which
//   checks all of it, comes to the newest dense state: a life that was not closed, and its newest commit is of that
//   state's step. Where log and slots leave a doubt about that, there is none.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace holdfast {

// A file that is to be replaced as a whole, and why.
struct WholeFile {
  std::string name;  // in the pool's directory
  std::vector<std::byte> bytes;
  std::string why;
};

// Of the pool in `directory`, which nobody has open: its superblock or the copy of it, whichever does not hold; nothing
// where both do, or where there never was a copy. Throws corrupted or format_mismatch where what it was cannot be told.
std::optional<WholeFile> plan_superblock_repair(const std::string& directory);

// What is wrong with the copy that lies beside a superblock which holds; nothing where there is none.
std::optional<std::string> broken_copy(const std::string& directory);

}  // namespace holdfast

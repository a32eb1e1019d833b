// Ground: what lies beneath a directory's file system, and so whether what is synced there outlives a power cut.
//
// Invariants
// - Where it cannot be told, nothing outlives it: a pool never states more than is true.
#pragma once

#include <string>

namespace holdfast {

struct Ground {
  bool is_memory;       // rows that lie there take the machine's memory
  bool outlives_power;  // what fsync returned for is there after a power cut
  std::string words;    // for people
};

// Follows overlay file systems to their upper layer, loop devices to their files, and mapped devices to what they are
// made of. Reads /proc/self/mountinfo and /sys.
Ground ground_of(const std::string& directory);
// Of the files that a directory has: where links in it lead elsewhere, the weakest of all that they lie on.
Ground ground_of_files(const std::string& directory);

}  // namespace holdfast

// The files of a pool beside its superblock and tables, as the writer and the readers open them.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/identity.h"
#include "layout/label.h"
#include "media/medium.h"

namespace holdfast {

inline constexpr const char* log_name = "log-0000";
inline constexpr const char* dense_names[2] = {"dense-0", "dense-1"};

// Opens a file that a pool cannot do without; throws corrupted where it is missing.
inline std::unique_ptr<File> open_pool_file(Medium& medium, const char* name, bool writable,
                                            const Identity& labelled = {}, const FileRole& role = {}) {
  try {
    return open_labelled(medium, name, writable, Access::sequential, labelled, role);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    throw Error(ErrorKind::corrupted, std::string(error.what()) + "; the pool has lost a file");
  }
}

inline std::array<std::unique_ptr<File>, 2> open_dense_files(Medium& medium, bool writable) {
  return {open_pool_file(medium, dense_names[0], writable), open_pool_file(medium, dense_names[1], writable)};
}

inline std::unique_ptr<File> open_log_file(Medium& medium, const Identity& identity, std::uint64_t log_bytes,
                                           bool writable) {
  auto ring = open_pool_file(medium, log_name, writable, identity, {format::FileKind::log});
  if (ring->size() < log_bytes || ring->size() == 0 || ring->size() % format::block_bytes != 0) {
    throw Error(ErrorKind::corrupted, ring->name() + ": " + std::to_string(ring->size()) +
                                          " bytes, the pool's log was made with " + std::to_string(log_bytes));
  }
  return ring;
}

}  // namespace holdfast

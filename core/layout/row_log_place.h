// Place of the row log: in the pool's directory, or on a medium of its own, to which a link in the directory leads.
//
// Invariants
// - The link is durable before the log's file is made, and the file's label names the pool: a link that leads to another
//   pool's log opens nothing.
// - Beside the log is a link back. A copy of the pool's directory has a link to the same log, and would write over what the
//   pool needs: where the way back leads to another directory that has a pool, nothing is opened. Where it leads nowhere,
//   the directory was moved.
// - What is removed at the end of a link is a regular file with the name of a row log.
#pragma once

#include <string>

#include "base/identity.h"

namespace holdfast {

inline constexpr const char* row_log_name = "row-log-0000";

// Where the row log of the pool in `directory` is, or is going to be made.
std::string row_log_path(const std::string& directory);
// Throws corrupted where it is not there, or another directory's. is_writable: where the directory was moved, the way back
// leads there from now on.
std::string existing_row_log(const std::string& directory, bool is_writable);

// A row log that is going to be made lies in `log_directory`, under a name that tells the pool. Throws config where that
// is no directory, exists where `directory` has a row log. Nothing but the links is there yet.
void place_row_log(const std::string& directory, const std::string& log_directory, const Uuid& pool);

// Removes what lies at `path` under the name of a row log: the link after what it leads to.
void remove_row_log(const std::string& path);

}  // namespace holdfast

// Unpublished pools: what lies in a directory while a pool is being made there, and who may remove it.
//
// Invariants
// - The mark is durable before the first part of a pool is made beside it. It goes only when the file that publishes the
//   pool is durable: pool.holdfast, or group.json of a pool of several writers.
// - It has gone, durably, before anything else is written to a published pool. So parts beside a mark, without the file
//   that publishes them, were never trained; parts without a mark may be the only copy of somebody's rows.
// - Only parts beside a mark are ever removed. A removal can be done again from the start until its end: the mark goes
//   last, or stays for what is made next.
// - What is no part by name is nobody's business: it is neither looked at nor removed.
#pragma once

#include <string>
#include <vector>

#include "rows/row_table.h"

namespace holdfast {

inline constexpr const char* unpublished_name = "unpublished";

bool is_unpublished(const std::string& directory);
// Durable when it returns. Throws full, read_only or failed.
void mark_unpublished(const std::string& directory);
// Takes the mark away, where there is one. Durable when it returns.
void mark_published(const std::string& directory);
// The pool, which is closed, is one that is being made again: as if its last file had not been written.
void unpublish(const std::string& directory);

// The files of pools in `directory`, by their names from there: one writer's, and those of parts of a group's pool. Files
// that publish a pool count in parts alone.
std::vector<std::string> pool_parts(const std::string& directory);
// Removes them. Throws corrupted where there are some and no mark.
void remove_unpublished_parts(const std::string& directory);

// Before a pool is made in `directory`: what an attempt left that did not end is removed, and the mark is durable.
// Throws corrupted where parts of a pool without a mark lie there, and changes nothing.
void begin_making(const std::string& directory);
// Makes durable which names a pool's files have: in its directory, in its shards, and where these lie.
void sync_names(const std::string& directory, const std::vector<RowTable>& tables);

}  // namespace holdfast

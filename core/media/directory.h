// Names that last: a file's name is durable once its directory is synced, a directory's once the one above it is.
#pragma once

#include <string>

namespace holdfast {

// Makes durable which names the directory has. Throws not_found, read_only or failed.
void sync_directory(const std::string& directory);

// The directory that has the name `path`: "." for a name without one.
std::string directory_of(const std::string& path);

}  // namespace holdfast

// Names: which there are, and that they last. A file's name is durable once its directory is synced, a directory's once
// the one above it is. Whatever the file system says, it ends in an error of the pool's.
#pragma once

#include <cstdint>
#include <string>

namespace holdfast {

// Makes durable which names the directory has. Throws not_found, read_only, full or failed.
void sync_directory(const std::string& directory);

// Whether there is something of that name. Throws read_only or failed where that cannot be told: what cannot be looked at
// is not what is missing.
bool has_name(const std::string& path);

// How long a file is. Throws likewise, and not_found.
std::uint64_t bytes_of_file_at(const std::string& path);

// Makes a directory, and those above it that are missing. Throws full, read_only or failed.
void make_directories(const std::string& path);

// The directory that has the name `path`: "." for a name without one.
std::string directory_of(const std::string& path);

}  // namespace holdfast

#include "layout/unpublished.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/system_error.h"
#include "layout/pool_files.h"
#include "layout/row_log_place.h"
#include "layout/superblock.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view mark_text =
    "A pool is being made in this directory, and is not published yet: nothing was trained in it, and the next "
    "attempt\n"
    "removes what lies here of it.\n";

bool is_number(std::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c) != 0; });
}

// `name` is `prefix` and a number.
bool is_numbered(std::string_view name, std::string_view prefix) {
  return name.starts_with(prefix) && is_number(name.substr(prefix.size()));
}

bool is_file_of_pool(const std::string& name) {
  static const std::set<std::string, std::less<>> names{
      superblock_copy_name, log_name, dense_names[0], dense_names[1], row_log_name, "home-bits-0000",
  };
  return names.contains(name);
}

bool is_file_of_table(std::string_view name) {
  static const std::set<std::string, std::less<>> columns{"weights",   "state", "touched",
                                                          "checksums", "home",  "addresses"};
  const auto dot = name.find('.');
  return dot != std::string_view::npos && is_numbered(name.substr(0, dot), "table-") &&
         columns.contains(name.substr(dot + 1));
}

// What is in a directory, with its own errors: a directory that cannot be read is no empty one.
std::vector<fs::directory_entry> entries_of(const fs::path& directory) {
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (auto entry = fs::directory_iterator(directory, error); !error && entry != fs::directory_iterator();
       entry.increment(error)) {
    entries.push_back(*entry);
  }
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(ErrorKind::failed, "reading the directory " + directory.string() + ": " + error.message());
  }
  return entries;
}

// A link's is what it leads to.
bool leads_to_directory(const fs::directory_entry& entry) {
  std::error_code error;
  const bool leads = entry.is_directory(error);
  if (error && error != std::errc::no_such_file_or_directory) {
    throw Error(ErrorKind::failed, "looking at " + entry.path().string() + ": " + error.message());
  }
  return leads;
}

// Calls found(path, is_directory) for each part, and for directories of parts after what is in them.
template <class Found>
void each_part(const fs::path& directory, bool is_whole, const Found& found) {
  for (const fs::directory_entry& entry : entries_of(directory)) {
    const std::string name = entry.path().filename().string();
    const bool is_directory = leads_to_directory(entry);
    if (!is_directory) {
      if (is_file_of_pool(name) || (!is_whole && name == superblock_name)) found(entry.path(), false);
    } else if (is_numbered(name, "shard-")) {
      for (const fs::directory_entry& file : entries_of(entry.path())) {
        if (is_file_of_table(file.path().filename().string())) found(file.path(), false);
      }
      found(entry.path(), true);
    } else if (is_whole && name == "dense") {
      each_part(entry.path(), false, found);
      found(entry.path(), true);
    } else if (is_whole && is_numbered(name, "writers-")) {
      for (const fs::directory_entry& writer : entries_of(entry.path())) {
        if (!leads_to_directory(writer) || !is_number(writer.path().filename().string())) continue;
        each_part(writer.path(), false, found);
        found(writer.path(), true);
      }
      found(entry.path(), true);
    }
  }
}

void remove_file(const fs::path& path) {
  std::error_code error;
  fs::remove(path, error);
  if (error) throw Error(ErrorKind::failed, "removing " + path.string() + ": " + error.message());
}

}  // namespace

bool is_unpublished(const std::string& directory) { return has_name(directory + "/" + unpublished_name); }

void mark_unpublished(const std::string& directory) {
  struct statfs system{};
  if (::statfs(directory.c_str(), &system) == 0 && system.f_type == HUGETLBFS_MAGIC) {
    throw Error(ErrorKind::config, directory +
                                       " lies on hugetlbfs, whose files are mapped and never written: put the pool on "
                                       "tmpfs (/dev/shm), where tables are moved into huge pages as they fill");
  }
  const std::string path = directory + "/" + unpublished_name;
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  int error = fd < 0 ? errno : 0;
  if (fd >= 0) {
    const ssize_t put = ::pwrite(fd, mark_text.data(), mark_text.size(), 0);
    if (put != static_cast<ssize_t>(mark_text.size())) error = put < 0 ? errno : ENOSPC;
    if (error == 0 && ::fsync(fd) != 0) error = errno;
    ::close(fd);
  }
  if (error != 0) throw_errno("writing " + path, error);
  sync_directory(directory);
  Medium::count_persist_point();
}

void mark_published(const std::string& directory) {
  remove_file(fs::path(directory) / unpublished_name);
  Medium::count_persist_point();
  sync_directory(directory);
}

void unpublish(const std::string& directory) {
  mark_unpublished(directory);
  remove_file(fs::path(directory) / superblock_name);
  Medium::count_persist_point();
  sync_directory(directory);
}

std::vector<std::string> pool_parts(const std::string& directory) {
  std::vector<std::string> parts;
  each_part(directory, true, [&](const fs::path& path, bool is_directory) {
    if (!is_directory) parts.push_back(path.lexically_relative(directory).string());
  });
  std::sort(parts.begin(), parts.end());
  return parts;
}

void remove_unpublished_parts(const std::string& directory) {
  if (!is_unpublished(directory)) {
    const auto parts = pool_parts(directory);
    if (parts.empty()) return;
    const std::string more = parts.size() == 1 ? "" : " and " + std::to_string(parts.size() - 1) + " more";
    throw Error(ErrorKind::corrupted,
                directory + " has no " + superblock_name + ", but files of a pool: " + parts.front() + more +
                    ". The file that makes them a pool is lost, and they may hold its rows, so nothing was changed: "
                    "`holdfast verify --repair` puts it back where " +
                    superblock_copy_name +
                    " is there; or put it back from a copy of the directory. For a new pool name another directory, or "
                    "remove these files");
  }
  each_part(directory, true, [](const fs::path& path, bool is_directory) {
    if (path.filename() == row_log_name) return remove_row_log(path.string());
    if (!is_directory) return remove_file(path);
    for (const char* name : {"lock", unpublished_name, "pool.holdfast.new"}) {
      if (path.filename().string().starts_with("shard-")) break;
      remove_file(path / name);
    }
    std::error_code not_empty;  // by somebody else's files
    if (!fs::is_symlink(path, not_empty) && !not_empty) fs::remove(path, not_empty);
  });
  sync_directory(directory);
  Medium::count_persist_point();
}

void begin_making(const std::string& directory) {
  remove_unpublished_parts(directory);
  mark_unpublished(directory);
  remove_file(directory + "/" + superblock_name + ".new");
}

void sync_names(const std::string& directory, const std::vector<RowTable>& tables) {
  std::set<std::string> directories;
  for (std::size_t i = 0; i < tables.size(); ++i) {
    for (const RowPiece& piece : tables[i].owned_pieces()) {
      const std::string shard = directory_of(directory + "/" + row_file_name(tables[i], piece.shard, i, ""));
      directories.insert(shard);
      directories.insert(shard + "/..");
    }
  }
  for (const std::string& each : directories) sync_directory(each);
  sync_directory(directory);
}

}  // namespace holdfast

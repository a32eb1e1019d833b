#include "layout/row_log_place.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view suffix = ".row-log";  // of a log that lies elsewhere

[[noreturn]] void throw_errno(const std::string& what, int error) {
  const ErrorKind kind = error == EEXIST                                       ? ErrorKind::exists
                         : error == ENOSPC || error == EDQUOT                  ? ErrorKind::full
                         : error == EACCES || error == EPERM || error == EROFS ? ErrorKind::read_only
                                                                               : ErrorKind::failed;
  throw Error(kind, what + ": " + std::strerror(error));
}

// Where a link leads, by its own words; empty where there is none.
fs::path lead_of(const fs::path& path) {
  std::error_code none;
  const fs::path lead = fs::read_symlink(path, none);
  if (none || lead.empty()) return {};
  return lead.is_absolute() ? lead : path.parent_path() / lead;
}

std::string hex_of(const Uuid& uuid) {
  constexpr std::string_view digits = "0123456789abcdef";
  std::string hex;
  for (const std::uint8_t byte : uuid) {
    hex += digits[byte >> 4U];
    hex += digits[byte & 15U];
  }
  return hex;
}

}  // namespace

std::string row_log_path(const std::string& directory) {
  const std::string path = directory + "/" + row_log_name;
  const fs::path lead = lead_of(path);
  return lead.empty() ? path : lead.string();
}

std::string existing_row_log(const std::string& directory) {
  const std::string path = row_log_path(directory);
  if (has_name(path)) return path;
  const std::string name = directory + "/" + row_log_name;
  if (path == name) throw Error(ErrorKind::corrupted, path + " is missing; the store has lost a file");
  throw Error(ErrorKind::corrupted, name + " leads to " + path +
                                        ", which is not there: mount the medium that has the pool's log, or put the "
                                        "link right if the log has moved. Without it the pool lacks its newest rows");
}

void place_row_log(const std::string& directory, const std::string& log_directory, const Uuid& pool) {
  std::error_code failed;
  const fs::path whole = fs::canonical(log_directory, failed);
  if (failed || !fs::is_directory(whole, failed)) {
    throw Error(ErrorKind::config, "log_directory = " + log_directory +
                                       ": no such directory; make it on the medium that is to have the pool's log");
  }
  const fs::path of_pool = fs::weakly_canonical(directory, failed).filename();
  const std::string log = (whole / (of_pool.string() + "-" + hex_of(pool) + std::string(suffix))).string();
  const std::string path = directory + "/" + row_log_name;
  if (::symlink(log.c_str(), path.c_str()) != 0) throw_errno("linking " + path + " to " + log, errno);
  sync_directory(directory);
  Medium::count_persist_point();
}

void remove_row_log(const std::string& path) {
  const auto remove = [](const fs::path& file) {
    std::error_code error;
    fs::remove(file, error);
    if (error) throw Error(ErrorKind::failed, "removing " + file.string() + ": " + error.message());
  };
  if (const fs::path lead = lead_of(path); !lead.empty()) {
    std::error_code missing;
    const bool is_log = lead.filename().string().ends_with(suffix) && fs::is_regular_file(lead, missing) &&
                        !fs::is_symlink(lead, missing);
    if (is_log) {
      remove(lead);
      sync_directory(directory_of(lead.string()));
    }
  }
  remove(path);
}

}  // namespace holdfast

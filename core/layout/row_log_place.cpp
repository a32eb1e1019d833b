#include "layout/row_log_place.h"

#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/error.h"
#include "base/system_error.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view suffix = ".row-log";  // of a log that lies elsewhere
constexpr std::string_view back_suffix = ".pool";  // behind that: of the link to the pool

// Where a link leads, by its own words; empty where there is none.
fs::path lead_of(const fs::path& path) {
  std::error_code none;
  const fs::path lead = fs::read_symlink(path, none);
  if (none || lead.empty()) return {};
  return lead.is_absolute() ? lead : path.parent_path() / lead;
}

void link(const std::string& target, const std::string& path) {
  if (::symlink(target.c_str(), path.c_str()) != 0) throw_errno("linking " + path + " to " + target, errno);
  sync_directory(directory_of(path));
  Medium::count_persist_point();
}

void remove_file(const fs::path& file) {
  std::error_code error;
  fs::remove(file, error);
  if (error) throw Error(ErrorKind::failed, "removing " + file.string() + ": " + error.message());
}

std::string whole(const std::string& directory) {
  std::error_code unknown;
  const std::string path = fs::canonical(directory, unknown).string();
  return unknown ? directory : path;
}

// log: of the pool in `directory`, elsewhere.
void check_way_back(const std::string& directory, const std::string& log, bool is_writable) {
  const std::string back = log + std::string(back_suffix);
  const fs::path lead = lead_of(back);
  std::error_code unknown;
  if (!lead.empty() && fs::equivalent(lead, directory, unknown)) return;
  if (!lead.empty() && has_name((lead / "pool.holdfast").string())) {
    throw Error(ErrorKind::corrupted, directory + "/" + row_log_name + " leads to " + log +
                                          ", the log of the pool in " + lead.string() +
                                          ". If this is a copy of that pool, both would write to one log: use the one "
                                          "there, or copy the log as well and put it in the place of the link");
  }
  if (!is_writable) return;
  if (!lead.empty()) remove_file(back);
  link(whole(directory), back);
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

std::string existing_row_log(const std::string& directory, bool is_writable) {
  const std::string path = row_log_path(directory);
  const std::string name = directory + "/" + row_log_name;
  if (has_name(path)) {
    if (path != name) check_way_back(directory, path, is_writable);
    return path;
  }
  if (path == name) throw Error(ErrorKind::corrupted, path + " is missing; the store has lost a file");
  throw Error(ErrorKind::corrupted, name + " leads to " + path +
                                        ", which is not there: mount the medium that has the pool's log, or put the "
                                        "link right if the log has moved. Without it the pool lacks its newest rows");
}

void place_row_log(const std::string& directory, const std::string& log_directory, const Uuid& pool) {
  std::error_code failed;
  const fs::path place = fs::canonical(log_directory, failed);
  if (failed || !fs::is_directory(place, failed)) {
    throw Error(ErrorKind::config, "log_directory = " + log_directory +
                                       ": no such directory; make it on the medium that is to have the pool's log");
  }
  const std::string of_pool = whole(directory);
  const std::string name = fs::path(of_pool).filename().string() + "-" + hex_of(pool) + std::string(suffix);
  const std::string log = (place / name).string();
  link(log, directory + "/" + row_log_name);
  link(of_pool, log + std::string(back_suffix));
}

void remove_row_log(const std::string& path) {
  if (const fs::path lead = lead_of(path); !lead.empty()) {
    std::error_code missing;
    const bool is_named = lead.filename().string().ends_with(suffix);
    if (is_named && fs::is_regular_file(lead, missing) && !fs::is_symlink(lead, missing)) remove_file(lead);
    const fs::path back = lead.string() + std::string(back_suffix);
    if (is_named && fs::is_symlink(back, missing)) {
      remove_file(back);
      sync_directory(directory_of(lead.string()));
    }
  }
  remove_file(path);
}

}  // namespace holdfast

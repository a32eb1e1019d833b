#include "media/ground.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace holdfast {
namespace {

namespace fs = std::filesystem;

constexpr int most_layers = 16;  // of file systems and devices on each other

// A line of /proc/self/mountinfo.
struct Mount {
  std::string point;
  std::string type;
  std::string source;
  std::string device;  // major:minor; 0:n where the file system made it up
  std::vector<std::string> options;  // of the mount and of the file system

  bool has(const std::string& option) const { return std::ranges::find(options, option) != options.end(); }
  std::optional<std::string> value_of(const std::string& name) const {
    for (const std::string& option : options) {
      if (option.starts_with(name + "=")) return option.substr(name.size() + 1);
    }
    return std::nullopt;
  }
};

// Spaces and the like are written as \040 there, and commas in options as \, or \054.
std::string unescaped(const std::string& text) {
  const auto is_octal = [&](std::size_t at) { return at < text.size() && text[at] >= '0' && text[at] <= '7'; };
  std::string plain;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && is_octal(i + 1) && is_octal(i + 2) && is_octal(i + 3)) {
      plain += static_cast<char>((text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0'));
      i += 3;
    } else {
      plain += text[i];
    }
  }
  return plain;
}

void add_options(const std::string& list, std::vector<std::string>& options) {
  std::string option;
  for (std::size_t i = 0; i < list.size(); ++i) {
    if (list[i] == '\\' && i + 1 < list.size() && list[i + 1] == ',') {
      option += list[++i];
    } else if (list[i] == ',') {
      options.push_back(unescaped(std::exchange(option, {})));
    } else {
      option += list[i];
    }
  }
  options.push_back(unescaped(option));
}

Mount parse(const std::string& line) {
  std::istringstream words(line);
  std::string id, parent, device, root, point, options, word, type, source, more;
  words >> id >> parent >> device >> root >> point >> options;
  while (words >> word && word != "-") {
  }
  words >> type >> source >> more;
  Mount mount{unescaped(point), type, unescaped(source), device, {}};
  add_options(options, mount.options);
  add_options(more, mount.options);
  return mount;
}

// The mount that a path lies on: by its number, where the kernel says it, else by the longest name.
std::optional<Mount> mount_of(const std::string& path) {
  std::ifstream file("/proc/self/mountinfo");
  std::string number;
#ifdef STATX_MNT_ID
  struct statx found{};
  if (::statx(AT_FDCWD, path.c_str(), 0, STATX_MNT_ID, &found) == 0 && (found.stx_mask & STATX_MNT_ID) != 0) {
    number = std::to_string(found.stx_mnt_id) + " ";
  }
#endif
  std::error_code unknown;
  const std::string whole = fs::canonical(path, unknown).string();
  if (unknown) return std::nullopt;
  const auto holds = [&](const std::string& point) {
    return point == "/" || whole == point || whole.starts_with(point + "/");
  };
  std::optional<Mount> best;
  for (std::string line; std::getline(file, line);) {
    Mount mount = parse(line);
    if (!number.empty()) {
      if (line.starts_with(number)) return mount;
    } else if (holds(mount.point) && (!best || mount.point.size() >= best->point.size())) {
      best = std::move(mount);
    }
  }
  return best;
}

Ground in_memory(const std::string& words) { return {true, false, words}; }
Ground in_doubt(const std::string& words) { return {false, false, words}; }

Ground ground_at(const std::string& path, int layer);

// A block device by its folder in /sys.
Ground ground_of_device(fs::path device, int layer) {
  std::error_code unknown;
  device = fs::canonical(device, unknown);
  if (unknown || layer > most_layers) return in_doubt("a device that cannot be told");
  if (fs::exists(device / "partition", unknown)) device = device.parent_path();
  const std::string name = device.filename().string();
  if (name.starts_with("ram") || name.starts_with("zram") || name.starts_with("nullb")) return in_memory(name);
  if (name.starts_with("loop")) {
    std::string file;
    std::ifstream backing(device / "loop" / "backing_file");
    if (!std::getline(backing, file) || !fs::exists(file, unknown)) return in_doubt(name);
    Ground beneath = ground_at(file, layer + 1);
    beneath.words = name + " on " + beneath.words;
    return beneath;
  }
  if (name.starts_with("nbd")) return in_doubt(name);
  Ground all{false, true, name};
  for (const auto& part : fs::directory_iterator(device / "slaves", unknown)) {
    const Ground beneath = ground_of_device(part.path(), layer + 1);
    all.is_memory = all.is_memory || beneath.is_memory;
    all.outlives_power = all.outlives_power && beneath.outlives_power;
    all.words = name + " on " + beneath.words;
  }
  return all;
}

Ground ground_of_disk(const Mount& mount, int layer) {
  if (mount.has("nobarrier") || mount.value_of("barrier") == "0" || mount.has("barrier=none")) {
    return in_doubt(mount.type + " without barriers");
  }
  std::string device = mount.device;
  if (device.starts_with("0:")) {  // btrfs has several devices, and names one
    struct stat source{};
    if (::stat(mount.source.c_str(), &source) != 0 || !S_ISBLK(source.st_mode)) {
      return in_doubt(mount.type + " on a device that cannot be told");
    }
    device = std::to_string(major(source.st_rdev)) + ":" + std::to_string(minor(source.st_rdev));
  }
  Ground beneath = ground_of_device("/sys/dev/block/" + device, layer + 1);
  beneath.words = mount.type + " on " + beneath.words;
  return beneath;
}

Ground ground_of_overlay(const Mount& mount, int layer) {
  const auto upper = mount.value_of("upperdir");
  std::error_code unknown;
  if (!upper || !fs::is_directory(*upper, unknown)) return in_doubt("overlay on what cannot be told");
  Ground beneath = ground_at(*upper, layer + 1);
  beneath.words = "overlay on " + beneath.words;
  if (mount.has("volatile") || mount.value_of("fsync") == "volatile") {
    beneath.outlives_power = false;
    beneath.words = "volatile " + beneath.words;
  }
  return beneath;
}

// Those whose fsync reaches a device of this machine. What another machine, a hypervisor or a program does with an fsync
// (NFS, 9p, virtiofs, FUSE) cannot be told from here, nor whether ZFS was told to ignore it.
constexpr std::array<std::string_view, 13> on_disks{"ext2", "ext3",     "ext4", "xfs",   "btrfs", "f2fs",  "bcachefs",
                                                    "jfs",  "reiserfs", "vfat", "exfat", "ntfs3", "nilfs2"};

Ground ground_at(const std::string& path, int layer) {
  constexpr long tmpfs_magic = 0x01021994;
  constexpr long ramfs_magic = 0x858458f6;
  constexpr long hugetlbfs_magic = 0x958458f6;
  struct statfs status{};
  if (layer > most_layers || ::statfs(path.c_str(), &status) != 0) return in_doubt("what cannot be told");
  if (status.f_type == tmpfs_magic) return in_memory("tmpfs");
  if (status.f_type == ramfs_magic) return in_memory("ramfs");
  if (status.f_type == hugetlbfs_magic) return in_memory("hugetlbfs");
  const auto mount = mount_of(path);
  if (!mount) return in_doubt("a file system that cannot be told");
  if (mount->type == "overlay") return ground_of_overlay(*mount, layer);
  if (std::ranges::find(on_disks, mount->type) != on_disks.end()) return ground_of_disk(*mount, layer);
  return in_doubt(mount->type);
}

}  // namespace

Ground ground_of(const std::string& directory) { return ground_at(directory, 0); }

Ground ground_of_files(const std::string& directory) {
  Ground weakest = ground_of(directory);
  // Not the standard library's iterator, which ends the process where memory runs out.
  const std::unique_ptr<DIR, int (*)(DIR*)> entries(::opendir(directory.c_str()), &::closedir);
  if (!entries) return in_doubt("a directory that cannot be read");
  while (const dirent* const entry = ::readdir(entries.get())) {
    const std::string path = directory + "/" + entry->d_name;
    struct stat found{};
    const bool may_lead = entry->d_type == DT_LNK || entry->d_type == DT_UNKNOWN;
    if (!may_lead || ::lstat(path.c_str(), &found) != 0 || !S_ISLNK(found.st_mode)) continue;
    const Ground beneath = ground_of(path);
    if (beneath.outlives_power || !weakest.outlives_power) continue;
    weakest.outlives_power = false;
    weakest.words = beneath.words + " (" + entry->d_name + ")";
  }
  return weakest;
}

}  // namespace holdfast

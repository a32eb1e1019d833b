// What lies beneath a directory, told from a made /proc/self/mountinfo and a made /sys: every kind of file system and
// device, one on the other, and everything that cannot be told, which is never taken for what outlives a power cut.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "media/ground.h"
#include "temporary_directory.h"

namespace {

namespace fs = std::filesystem;

std::string made_root;  // that has what programs find under /proc/self, /sys and /dev; empty: they find the machine's
std::map<std::string, long> magic_of;  // statfs of paths; all others are on a disk's file system
std::map<std::string, std::uint64_t> mount_id_of;  // statx of paths; of all others it does not say the mount

std::string redirected(const char* path) {
  const std::string text = path;
  const bool is_made = text == "/proc/self/mountinfo" || text.starts_with("/sys/") || text.starts_with("/dev/made-");
  return made_root.empty() || !is_made ? text : made_root + text;
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// What the linker takes instead of the C library's own; visible, so that the C++ library takes it, too.
#pragma GCC visibility push(default)
extern "C" {

std::FILE* fopen(const char* path, const char* mode) {
  static const auto real = next<std::FILE* (*)(const char*, const char*)>("fopen");
  return real(redirected(path).c_str(), mode);
}
std::FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

char* realpath(const char* path, char* to) noexcept {
  static const auto real = next<char* (*)(const char*, char*)>("realpath");
  return real(redirected(path).c_str(), to);
}

int stat(const char* path, struct stat* found) noexcept {
  static const auto real = next<int (*)(const char*, struct stat*)>("stat");
  const std::string where = redirected(path);
  const int result = real(where.c_str(), found);
  if (result == 0 && where != path && where.find("/dev/made-disk") != std::string::npos) {
    found->st_mode = S_IFBLK;
    found->st_rdev = makedev(8, 1);
  }
  return result;
}

int statfs(const char* path, struct statfs* found) noexcept {
  constexpr long ext_magic = 0xef53;
  const auto made = magic_of.find(path);
  if (made != magic_of.end() && made->second == 0) {
    errno = EIO;
    return -1;
  }
  *found = {};
  found->f_type = made == magic_of.end() ? ext_magic : made->second;
  return 0;
}

int statx(int, const char* path, int, unsigned, struct statx* found) noexcept {
  const auto made = mount_id_of.find(path);
  *found = {};
  if (made == mount_id_of.end()) return 0;  // an older kernel: its mask says nothing of a mount
  found->stx_mask = STATX_MNT_ID;
  found->stx_mnt_id = made->second;
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop

namespace holdfast {
namespace {

class MadeMachine {
 public:
  MadeMachine() { made_root = root_.path(); }
  ~MadeMachine() {
    made_root.clear();
    magic_of.clear();
    mount_id_of.clear();
  }

  std::string directory(const std::string& name) {
    const fs::path path = fs::canonical(root_.path()) / name;
    fs::create_directories(path);
    return path.string();
  }
  void file(const std::string& name, const std::string& text = {}) {
    fs::create_directories((fs::path(root_.path()) / name).parent_path());
    std::ofstream(fs::path(root_.path()) / name) << text;
  }
  // A directory that such a file system is mounted on, and what the mount table says of it.
  std::string mounted(const std::string& name, const std::string& type, const std::string& device,
                      const std::string& source = "/dev/none", const std::string& options = "rw",
                      const std::string& more = "rw") {
    const std::string path = directory(name);
    add_mount(device, path, options, type, source, more);
    return path;
  }
  void add_mount(const std::string& device, const std::string& point, const std::string& options,
                 const std::string& type, const std::string& source, const std::string& more) {
    mounts_ += std::to_string(++mount_id_) + " 1 " + device + " / " + point + " " + options + " shared:1 master:2 - " +
               type + " " + source + " " + more + "\n";
    file("proc/self/mountinfo", mounts_);
  }
  std::uint64_t newest_mount() const { return mount_id_; }
  // A block device, beneath others (slaves) where it says so.
  void device(const std::string& number, const std::string& name, const std::vector<std::string>& on = {}) {
    const fs::path root = fs::canonical(root_.path());
    fs::create_directories(root / "sys/dev/block");
    fs::create_directories(root / "sys/devices" / name / "slaves");
    fs::create_directory_symlink(root / "sys/devices" / name, root / "sys/dev/block" / number);
    for (const std::string& slave : on) {
      fs::create_directory_symlink(root / "sys/devices" / slave, root / "sys/devices" / name / "slaves" / slave);
    }
  }
  void partition(const std::string& number, const std::string& of, const std::string& name) {
    const fs::path root = fs::canonical(root_.path());
    fs::create_directories(root / "sys/dev/block");
    file("sys/devices/" + of + "/" + name + "/partition", "1\n");
    fs::create_directory_symlink(root / "sys/devices" / of / name, root / "sys/dev/block" / number);
  }

 private:
  TemporaryDirectory root_;
  std::string mounts_;
  std::uint64_t mount_id_ = 20;
};

void check_ground(const std::string& directory, const std::string& words, bool outlives_power, bool is_memory) {
  const Ground ground = ground_of(directory);
  check::context = words + ": it says '" + ground.words + "'";
  CHECK(ground.words == words);
  CHECK(ground.outlives_power == outlives_power);
  CHECK(ground.is_memory == is_memory);
}
void check_lasts(const std::string& directory, const std::string& words) {
  check_ground(directory, words, true, false);
}
void check_doubted(const std::string& directory, const std::string& words) {
  check_ground(directory, words, false, false);
}
void check_in_memory(const std::string& directory, const std::string& words) {
  check_ground(directory, words, false, true);
}

void file_systems_in_memory_are_told_by_their_magic() {
  MadeMachine machine;
  for (const auto& [name, magic] :
       std::map<std::string, long>{{"tmpfs", 0x01021994}, {"ramfs", 0x858458f6}, {"hugetlbfs", 0x958458f6}}) {
    const std::string path = machine.directory(name);
    magic_of[path] = magic;
    check_in_memory(path, name);
  }
  const std::string silent = machine.directory("silent");
  magic_of[silent] = 0;
  check_doubted(silent, "what cannot be told");
}

void a_disk_lasts_whatever_partitions_and_volumes_it_has() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  machine.device("8:16", "sdb");
  machine.partition("8:1", "sda", "sda1");
  machine.device("253:0", "dm-0", {"sda", "sdb"});
  check_lasts(machine.mounted("whole", "xfs", "8:0"), "xfs on sda");
  check_lasts(machine.mounted("part", "ext4", "8:1"), "ext4 on sda");
  const Ground volume = ground_of(machine.mounted("volume", "ext4", "253:0"));
  CHECK(volume.outlives_power && !volume.is_memory && volume.words.starts_with("ext4 on dm-0 on sd"));
  check_doubted(machine.mounted("gone", "ext4", "8:99"), "ext4 on a device that cannot be told");
}

void devices_in_memory_and_over_networks_do_not_last() {
  MadeMachine machine;
  machine.device("1:0", "ram0");
  machine.device("252:0", "zram0");
  machine.device("250:0", "nullb0");
  machine.device("43:0", "nbd0");
  machine.device("8:0", "sda");
  machine.device("253:0", "dm-0", {"sda", "ram0"});
  check_in_memory(machine.mounted("a", "ext4", "1:0"), "ext4 on ram0");
  check_in_memory(machine.mounted("b", "ext4", "252:0"), "ext4 on zram0");
  check_in_memory(machine.mounted("c", "ext4", "250:0"), "ext4 on nullb0");
  check_doubted(machine.mounted("d", "ext4", "43:0"), "ext4 on nbd0");
  const Ground mixed = ground_of(machine.mounted("e", "ext4", "253:0"));
  CHECK(mixed.is_memory && !mixed.outlives_power);
}

void loop_devices_are_as_good_as_the_file_beneath() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  const std::string disk = machine.mounted("disk", "ext4", "8:0");
  const std::string memory = machine.directory("memory");
  machine.file("disk/image");
  machine.file("memory/image");
  magic_of[memory + "/image"] = 0x01021994;
  for (int number = 0; number < 4; ++number) {
    machine.device("7:" + std::to_string(number), "loop" + std::to_string(number));
  }
  machine.file("sys/devices/loop0/loop/backing_file", disk + "/image\n");
  machine.file("sys/devices/loop1/loop/backing_file", memory + "/image\n");
  machine.file("sys/devices/loop2/loop/backing_file", disk + "/removed\n");
  check_lasts(machine.mounted("a", "ext4", "7:0"), "ext4 on loop0 on ext4 on sda");
  check_in_memory(machine.mounted("b", "ext4", "7:1"), "ext4 on loop1 on tmpfs");
  check_doubted(machine.mounted("c", "ext4", "7:2"), "ext4 on loop2");
  check_doubted(machine.mounted("d", "ext4", "7:3"), "ext4 on loop3");
}

// A loop device over a file that lies on itself: no machine has that, and none is to hang over it.
void what_lies_on_itself_is_given_up() {
  MadeMachine machine;
  machine.device("7:0", "loop0");
  const std::string disk = machine.mounted("disk", "ext4", "7:0");
  machine.file("disk/image");
  machine.file("sys/devices/loop0/loop/backing_file", disk + "/image\n");
  const Ground ground = ground_of(disk);
  CHECK(!ground.outlives_power && !ground.is_memory);
}

void mounts_without_barriers_do_not_last() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  check_doubted(machine.mounted("a", "ext4", "8:0", "/dev/sda", "rw,nobarrier"), "ext4 without barriers");
  check_doubted(machine.mounted("b", "ext4", "8:0", "/dev/sda", "rw", "rw,barrier=0"), "ext4 without barriers");
  check_doubted(machine.mounted("c", "ext3", "8:0", "/dev/sda", "rw", "barrier=none"), "ext3 without barriers");
  check_lasts(machine.mounted("d", "ext4", "8:0", "/dev/sda", "rw", "rw,barrier=1"), "ext4 on sda");
}

void file_systems_that_make_up_their_device_are_told_by_their_source() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  machine.partition("8:1", "sda", "sda1");
  machine.file("dev/made-disk");
  machine.file("dev/made-file");
  check_lasts(machine.mounted("a", "btrfs", "0:30", "/dev/made-disk"), "btrfs on sda");
  check_doubted(machine.mounted("b", "btrfs", "0:31", "/dev/made-file"), "btrfs on a device that cannot be told");
  check_doubted(machine.mounted("c", "btrfs", "0:32", "/dev/made-nothing"), "btrfs on a device that cannot be told");
  check_doubted(machine.mounted("d", "nfs4", "0:33", "server:/share"), "nfs4");
}

void an_overlay_is_as_good_as_its_upper_directory() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  const std::string disk = machine.mounted("a disk, really", "none", "0:1");  // the mount table has its name escaped
  machine.add_mount("8:0", disk.substr(0, disk.find("a disk")) + "a\\040disk\\054\\040really", "rw", "ext4", "/dev/sda",
                    "rw");
  const std::string upper = machine.directory("a disk, really/upper");
  const std::string escaped = upper.substr(0, upper.find("a disk")) + "a\\040disk\\,\\040really/upper";
  const auto overlay = [&](const std::string& name, const std::string& more) {
    return machine.mounted(name, "overlay", "0:40", "overlay", "rw", more);
  };
  check_lasts(overlay("a", "rw,lowerdir=/,upperdir=" + escaped), "overlay on ext4 on sda");
  check_doubted(overlay("b", "rw,upperdir=" + escaped + ",volatile"), "volatile overlay on ext4 on sda");
  check_doubted(overlay("c", "rw,upperdir=" + escaped + ",fsync=volatile"), "volatile overlay on ext4 on sda");
  check_doubted(overlay("d", "rw,lowerdir=/"), "overlay on what cannot be told");
  check_doubted(overlay("e", "rw,upperdir=/there/is/none"), "overlay on what cannot be told");
  check_lasts(overlay("f", "rw,upperdir=" + escaped + ",back\\slash,half\\04"), "overlay on ext4 on sda");
}

void a_mount_is_told_by_its_number_where_the_kernel_says_it() {
  MadeMachine machine;
  machine.device("8:0", "sda");
  machine.device("1:0", "ram0");
  const std::string disk = machine.mounted("disk", "ext4", "8:0");
  mount_id_of[disk] = machine.newest_mount();
  machine.add_mount("1:0", disk, "rw", "ext4", "/dev/ram0", "rw");  // over it, where this path does not lie
  check_lasts(disk, "ext4 on sda");
  mount_id_of[disk] = 9999;
  check_doubted(disk, "a file system that cannot be told");
  mount_id_of.clear();
  check_in_memory(disk, "ext4 on ram0");
  check_doubted(machine.directory("nowhere"), "a file system that cannot be told");
  check_doubted(disk + "/removed", "a file system that cannot be told");
}

}  // namespace
}  // namespace holdfast

int main() {
  using namespace holdfast;
  file_systems_in_memory_are_told_by_their_magic();
  a_disk_lasts_whatever_partitions_and_volumes_it_has();
  devices_in_memory_and_over_networks_do_not_last();
  loop_devices_are_as_good_as_the_file_beneath();
  what_lies_on_itself_is_given_up();
  mounts_without_barriers_do_not_last();
  file_systems_that_make_up_their_device_are_told_by_their_source();
  an_overlay_is_as_good_as_its_upper_directory();
  a_mount_is_told_by_its_number_where_the_kernel_says_it();
  return check::passed();
}

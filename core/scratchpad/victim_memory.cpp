#include "scratchpad/victim_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>

#include "base/error.h"
#include "base/memory_nodes.h"
#include "media/medium.h"

namespace holdfast {
namespace {

[[noreturn]] void refuse(const std::string& directory, const std::string& why) {
  throw Error(ErrorKind::config, "victims.directory = " + directory + ": " + why);
}

class NamelessFile {
 public:
  explicit NamelessFile(const std::string& directory) : directory_(directory) {
    fd_ = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd_ < 0 && (errno == EOPNOTSUPP || errno == EISDIR)) {
      std::string name = directory + "/holdfast-victims-XXXXXX";
      fd_ = ::mkostemp(name.data(), O_CLOEXEC);
      if (fd_ >= 0) ::unlink(name.c_str());
    }
    if (fd_ < 0) refuse(directory, std::string(std::strerror(errno)) + "; name a directory where files can be made");
  }
  ~NamelessFile() { ::close(fd_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;

  void reserve(std::uint64_t bytes) const {
    int failed;
    do {
      failed = ::posix_fallocate(fd_, 0, static_cast<off_t>(bytes));
    } while (failed == EINTR);
    if (failed == 0) return;
    throw Error(ErrorKind::full, "victims.bytes = " + std::to_string(bytes) + " in " + directory_ + ": " +
                                     std::strerror(failed) + "; free space there, or make it smaller");
  }
  // Whether loads of the file go to the medium itself.
  bool is_memory() const {
    struct statfs found;
    if (::fstatfs(fd_, &found) == 0 && (found.f_type == TMPFS_MAGIC || found.f_type == HUGETLBFS_MAGIC)) return true;
    return takes_map_sync(fd_, PROT_READ | PROT_WRITE);
  }
  std::byte* map(std::uint64_t bytes) const {
    void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
    if (mapped == MAP_FAILED)
      throw Error(ErrorKind::failed, "mapping a file in " + directory_ + ": " + std::strerror(errno));
    ::madvise(mapped, bytes, MADV_HUGEPAGE);
    ::madvise(mapped, bytes, MADV_DONTFORK);
    return static_cast<std::byte*>(mapped);
  }

 private:
  const std::string& directory_;
  int fd_;
};

}  // namespace

VictimMemory::VictimMemory(const VictimOptions& options) : bytes_(options.bytes) {
  if (bytes_ == 0) throw Error(ErrorKind::config, "victims.bytes = 0; say how much memory there is for rows");
  if (options.dial) dial_ = std::make_unique<Dial>(*options.dial);
  if (options.directory.empty()) {
    check_nodes(options.nodes, "victims.nodes");
    try {
      memory_ = HugeArray<std::byte>(bytes_);
    } catch (const std::bad_alloc&) {
      throw Error(ErrorKind::full,
                  "victims.bytes = " + std::to_string(bytes_) + ": the system has not as much memory; make it smaller");
    }
    place_on_nodes(memory_.data(), memory_.size(), options.nodes, "victims.nodes");
    memory_.keep_from_children();
    return;
  }
  if (!options.nodes.empty())
    refuse(options.directory, "victims.nodes says where else the rows are to lie; give one of the two");
  const NamelessFile file(options.directory);
  if (!file.is_memory()) {
    refuse(
        options.directory,
        "files there are read through the page cache, and not as memory; name a directory of a DAX file system or of "
        "tmpfs, or victims.nodes");
  }
  file.reserve(bytes_);
  mapped_ = file.map(bytes_);
}

VictimMemory::~VictimMemory() {
  if (mapped_ != nullptr) ::munmap(mapped_, bytes_);
}

}  // namespace holdfast

#include "pool/pool_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "base/error.h"
#include "base/system_error.h"
#include "media/directory.h"

namespace holdfast {
namespace {

// Whether the file has another descriptor in this process. Its number would say less: containers have numbers of their own.
bool is_open_here(int fd) {
  struct stat wanted{};
  if (::fstat(fd, &wanted) != 0) return false;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    const int other = std::atoi(entry.path().filename().c_str());
    struct stat found{};
    if (other != fd && ::fstat(other, &found) == 0 && found.st_dev == wanted.st_dev && found.st_ino == wanted.st_ino) {
      return true;
    }
  }
  return false;
}

}  // namespace

PoolLock::PoolLock(const std::string& directory) : path_(directory + "/lock") {
  if (!has_name(directory)) throw Error(ErrorKind::not_found, "no directory " + directory);
  const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);  // it is truncated
  if (fd < 0) throw_errno("locking " + path_, errno);
  file_.emplace(fd);
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw_errno("locking " + path_, errno);
    // Those that share it left no number: what the file has is that of a process that is over.
    if (::flock(fd, LOCK_SH | LOCK_NB) == 0) {
      throw Error(ErrorKind::busy, directory +
                                       " is being read (by holdfast verify, or for a moment by inspect); "
                                       "wait until that is through");
    }
    if (is_open_here(fd)) {
      throw Error(ErrorKind::busy, directory + " is open for writing in this process already; close that pool first");
    }
    char holder[32] = {};
    const ssize_t got = ::pread(fd, holder, sizeof(holder) - 1, 0);
    throw Error(ErrorKind::busy, directory + " is open for writing in process " +
                                     (got > 0 ? std::string(holder) : std::string("(unknown)")) +
                                     "; wait for it, or stop it");
  }
  const std::string self = std::to_string(::getpid());
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, self.data(), self.size(), 0) < 0) {
    // Only the message of whoever finds the pool busy suffers.
  }
}

// Files whose names are gone are written as before, and never found again. So it is where the pool was removed, and
// where its lock was: whoever opens it next finds it unlocked. A pool that was only moved keeps its lock.
void PoolLock::check() const {
  struct stat status{};
  if (::fstat(file_->get(), &status) != 0) throw_errno("looking at " + path_, errno);
  if (status.st_nlink != 0) return;
  throw Error(ErrorKind::failed, path_ +
                                     " was removed while the pool was open: if its other files are gone, too, "
                                     "restore a copy; if not, nothing of it is lost");
}

}  // namespace holdfast

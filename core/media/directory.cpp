#include "directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "../error.h"

namespace holdfast {

void sync_directory(const std::string& directory) {
  const auto fail = [&](int error) {
    const bool denied = error == EACCES || error == EPERM || error == EROFS;
    const ErrorKind kind = error == ENOENT ? ErrorKind::not_found : denied ? ErrorKind::read_only : ErrorKind::failed;
    throw Error(kind, "syncing the directory " + directory + ": " + std::strerror(error));
  };
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(errno);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  if (result != 0) fail(error);
}

std::string directory_of(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  return directory.empty() ? "." : directory;
}

}  // namespace holdfast

#include "media/directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/system_error.h"

namespace holdfast {
namespace {}  // namespace

void sync_directory(const std::string& directory) {
  const auto fail = [&](int error) { throw_errno("syncing the directory " + directory, error); };
  const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail(errno);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  if (result != 0) fail(error);
}

bool has_name(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) == 0) return true;
  if (errno != ENOENT && errno != ENOTDIR) throw_errno("looking for " + path, errno);
  return false;
}

std::uint64_t bytes_of_file_at(const std::string& path) {
  struct stat found{};
  if (::stat(path.c_str(), &found) != 0) throw_errno("looking at " + path, errno);
  return static_cast<std::uint64_t>(found.st_size);
}

void make_directories(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw_errno("creating " + path, error.value());
}

std::string directory_of(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  return directory.empty() ? "." : directory;
}

}  // namespace holdfast

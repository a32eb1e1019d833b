// Records what a process asks of the file system below one directory, so that a test can build what a power cut at any
// moment could have left. LD_PRELOAD it, then holdfast_record(root, log), and holdfast_record("", "") at the end.
//
// Invariants
// - Events are in the order in which they took effect: a call and its entry in the log are made under one lock.
// - Stores to a mapping make no call. A sync of a file that is mapped for writing first records all bytes of the file.
// - io_uring is refused: its writes would go past the C library's wrappers.
//
// An entry: kind (1 byte), offset, length, then the sizes of two paths and of the data (8 bytes each), then these.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace {

std::recursive_mutex mutex;
std::string root;  // with a slash at its end; empty: nothing is recorded
std::FILE* file = nullptr;

struct Mapping {
  std::size_t bytes;
  off_t offset;
  int fd;  // its own: says the file's path as long as it is mapped
};
std::map<std::uintptr_t, Mapping> mappings;  // shared and writable, by their addresses

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

std::string path_of(int fd) {
  char link[64];
  char path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(link, path, sizeof(path));
  return length < 0 ? std::string() : std::string(path, static_cast<std::size_t>(length));
}

std::string absolute(int directory, const char* path) {
  if (path[0] == '/') return path;
  if (directory != AT_FDCWD) return path_of(directory) + "/" + path;
  char here[4096];
  return std::string(::getcwd(here, sizeof(here))) + "/" + path;
}

bool is_recorded(const std::string& path) {
  return !root.empty() && (path + "/").starts_with(root) && !path.ends_with(" (deleted)");
}

void put(std::uint64_t value) { std::fwrite(&value, sizeof(value), 1, file); }

void record(char kind, const std::string& path, std::int64_t offset = 0, std::int64_t length = 0,
            const std::string& other = "", const void* data = nullptr, std::size_t bytes = 0) {
  std::fputc(kind, file);
  for (const std::int64_t value : {offset, length}) put(static_cast<std::uint64_t>(value));
  for (const std::size_t value : {path.size(), other.size(), bytes}) put(value);
  std::fwrite(path.data(), 1, path.size(), file);
  std::fwrite(other.data(), 1, other.size(), file);
  if (bytes != 0) std::fwrite(data, 1, bytes, file);
}

// What is stored in a file that is mapped.
void record_content(const std::string& path) {
  static const auto real_pread = next<decltype(&pread)>("pread");
  for (const auto& [address, mapping] : mappings) {
    struct stat status{};
    if (path_of(mapping.fd) != path || ::fstat(mapping.fd, &status) != 0) continue;
    std::vector<char> data(static_cast<std::size_t>(status.st_size));
    const ssize_t got = real_pread(mapping.fd, data.data(), data.size(), 0);
    if (got > 0) record('C', path, 0, 0, "", data.data(), static_cast<std::size_t>(got));
    return;
  }
}

// The mapping that has this address, or the end.
auto mapping_of(const void* address) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  auto mapping = mappings.upper_bound(at);
  if (mapping == mappings.begin()) return mappings.end();
  --mapping;
  return at < mapping->first + mapping->second.bytes ? mapping : mappings.end();
}

void record_sync(int fd) {
  const std::string path = path_of(fd);
  if (!is_recorded(path)) return;
  record_content(path);
  record('S', path, 0, -1);
}

}  // namespace

extern "C" {

void holdfast_record(const char* directory, const char* log) {
  const std::lock_guard lock(mutex);
  if (file != nullptr) std::fclose(file);
  file = *log != '\0' ? std::fopen(log, "wbe") : nullptr;
  root = *directory != '\0' ? std::string(directory) + "/" : "";
}

ssize_t pwrite(int fd, const void* from, std::size_t bytes, off_t offset) {
  static const auto real = next<decltype(&pwrite)>("pwrite");
  const std::lock_guard lock(mutex);
  const ssize_t put_bytes = real(fd, from, bytes, offset);
  const int error = errno;
  const std::string path = put_bytes > 0 ? path_of(fd) : "";
  if (is_recorded(path)) record('W', path, offset, put_bytes, "", from, static_cast<std::size_t>(put_bytes));
  errno = error;
  return put_bytes;
}
ssize_t pwrite64(int fd, const void* from, std::size_t bytes, off_t offset) { return pwrite(fd, from, bytes, offset); }

ssize_t write(int fd, const void* from, std::size_t bytes) {
  static const auto real = next<decltype(&write)>("write");
  if (root.empty()) return real(fd, from, bytes);
  const std::lock_guard lock(mutex);
  const ssize_t put_bytes = real(fd, from, bytes);
  const int error = errno;
  const std::string path = put_bytes > 0 ? path_of(fd) : "";
  if (is_recorded(path)) {
    const off_t end = ::lseek(fd, 0, SEEK_CUR);
    record('W', path, end - put_bytes, put_bytes, "", from, static_cast<std::size_t>(put_bytes));
  }
  errno = error;
  return put_bytes;
}

int fsync(int fd) {
  static const auto real = next<decltype(&fsync)>("fsync");
  const std::lock_guard lock(mutex);
  if (!root.empty()) record_sync(fd);
  return real(fd);
}
int fdatasync(int fd) {
  static const auto real = next<decltype(&fdatasync)>("fdatasync");
  const std::lock_guard lock(mutex);
  if (!root.empty()) record_sync(fd);
  return real(fd);
}

int msync(void* address, std::size_t bytes, int flags) {
  static const auto real = next<decltype(&msync)>("msync");
  const std::lock_guard lock(mutex);
  const auto mapping = mapping_of(address);
  if (mapping != mappings.end() && (flags & MS_SYNC) != 0) {
    const std::string path = path_of(mapping->second.fd);
    if (is_recorded(path)) {
      record_content(path);
      const auto into = static_cast<off_t>(reinterpret_cast<std::uintptr_t>(address) - mapping->first);
      record('S', path, mapping->second.offset + into, static_cast<std::int64_t>(bytes));
    }
  }
  return real(address, bytes, flags);
}

void* mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  static const auto real = next<decltype(&mmap)>("mmap");
  const std::lock_guard lock(mutex);
  void* made = real(address, bytes, protection, flags, fd, offset);
  if (made != MAP_FAILED && fd >= 0 && (flags & MAP_SHARED) != 0 && (protection & PROT_WRITE) != 0) {
    mappings[reinterpret_cast<std::uintptr_t>(made)] = {bytes, offset, ::fcntl(fd, F_DUPFD_CLOEXEC, 3)};
  }
  return made;
}
void* mmap64(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(address, bytes, protection, flags, fd, offset);
}
int munmap(void* address, std::size_t bytes) {
  static const auto real = next<decltype(&munmap)>("munmap");
  const std::lock_guard lock(mutex);
  if (const auto mapping = mappings.find(reinterpret_cast<std::uintptr_t>(address)); mapping != mappings.end()) {
    // What was stored and never synced may come to the medium at any time.
    if (const std::string path = path_of(mapping->second.fd); is_recorded(path)) record_content(path);
    ::close(mapping->second.fd);
    mappings.erase(mapping);
  }
  return real(address, bytes);
}

int ftruncate(int fd, off_t bytes) {
  static const auto real = next<decltype(&ftruncate)>("ftruncate");
  const std::lock_guard lock(mutex);
  const int result = real(fd, bytes);
  const std::string path = result == 0 ? path_of(fd) : "";
  if (is_recorded(path)) record('T', path, 0, bytes);
  return result;
}
int ftruncate64(int fd, off_t bytes) { return ftruncate(fd, bytes); }
int truncate(const char* path, off_t bytes) {
  static const auto real = next<decltype(&truncate)>("truncate");
  const std::lock_guard lock(mutex);
  const int result = real(path, bytes);
  const std::string full = absolute(AT_FDCWD, path);
  if (result == 0 && is_recorded(full)) record('T', full, 0, bytes);
  return result;
}
int truncate64(const char* path, off_t bytes) { return truncate(path, bytes); }

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static const auto real = next<decltype(&fallocate)>("fallocate");
  const std::lock_guard lock(mutex);
  const int result = real(fd, mode, offset, bytes);
  const int error = errno;
  const std::string path = result == 0 && mode == 0 ? path_of(fd) : "";
  if (is_recorded(path)) record('G', path, 0, offset + bytes);
  errno = error;
  return result;
}
int fallocate64(int fd, int mode, off_t offset, off_t bytes) { return fallocate(fd, mode, offset, bytes); }

int openat(int directory, const char* path, int flags, ...) {
  static const auto real = next<int (*)(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (root.empty() || (flags & (O_CREAT | O_TRUNC)) == 0) return real(directory, path, flags, mode);
  const std::lock_guard lock(mutex);
  struct stat status{};
  const bool was_there = ::fstatat(directory, path, &status, 0) == 0;
  const int fd = real(directory, path, flags, mode);
  const int error = errno;
  const std::string full = fd >= 0 ? absolute(directory, path) : "";
  if (is_recorded(full)) {
    if (!was_there) record('F', full);
    if (was_there && (flags & O_TRUNC) != 0) record('T', full);
  }
  errno = error;
  return fd;
}
int openat64(int directory, const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(directory, path, flags, mode);
}
int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(AT_FDCWD, path, flags, mode);
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return openat(AT_FDCWD, path, flags, mode);
}

int mkdir(const char* path, mode_t mode) {
  static const auto real = next<decltype(&mkdir)>("mkdir");
  const std::lock_guard lock(mutex);
  const int result = real(path, mode);
  const int error = errno;
  const std::string full = result == 0 ? absolute(AT_FDCWD, path) : "";
  if (is_recorded(full)) record('D', full);
  errno = error;
  return result;
}

int unlinkat(int directory, const char* path, int flags) {
  static const auto real = next<decltype(&unlinkat)>("unlinkat");
  const std::lock_guard lock(mutex);
  const std::string full = absolute(directory, path);
  const int result = real(directory, path, flags);
  const int error = errno;
  if (result == 0 && is_recorded(full)) record('U', full);
  errno = error;
  return result;
}
int unlink(const char* path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char* path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char* path) {
  const int result = unlinkat(AT_FDCWD, path, 0);
  return result != 0 && errno == EISDIR ? unlinkat(AT_FDCWD, path, AT_REMOVEDIR) : result;
}

int rename(const char* from, const char* to) {
  static const auto real = next<decltype(&rename)>("rename");
  const std::lock_guard lock(mutex);
  const int result = real(from, to);
  const int error = errno;
  const std::string full = absolute(AT_FDCWD, to);
  if (result == 0 && is_recorded(full)) record('R', absolute(AT_FDCWD, from), 0, 0, full);
  errno = error;
  return result;
}

long syscall(long number, ...) {
  static const auto real = next<long (*)(long, ...)>("syscall");
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_io_uring_setup) {
    errno = EPERM;
    return -1;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"

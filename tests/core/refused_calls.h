// One system call fails: the n-th of those that the core makes of the file system, whichever that is. Include it once in
// a test's executable: what it defines the linker takes instead of the C library's own.
//
// - A read or write on an io_uring makes no call. There the request that is submitted last is given to the kernel with a
//   descriptor of nothing, or, every other time, the call that submits is interrupted, which must not be noticed.
// - What is never refused: calls that give back (close, munmap), whose result means nothing to the core, and memory
//   without a file, which test_heap_exhaustion.cpp refuses.
#pragma once

#include <dlfcn.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

namespace refused {

// Calls of all threads are counted in one row; the one that brings this to 0 is refused.
inline std::atomic<std::int64_t> calls_left{0};
inline std::atomic<const char*> call{nullptr};  // that was refused
inline std::atomic<int> error{EIO};  // that it ends in
inline std::atomic<bool> has_rings{true};

// Where a debugger stops to see whose call it is.
[[gnu::noinline]] inline void refuse(const char* name) { call = name; }

inline bool is(const char* name) {
  if (calls_left.load(std::memory_order_relaxed) <= 0) return false;
  if (calls_left.fetch_sub(1) != 1) return false;
  refuse(name);
  return true;
}

inline bool fails(const char* name) {
  if (!is(name)) return false;
  errno = error;
  return true;
}

inline void begin(std::uint64_t number, int with) {
  call = nullptr;
  error = with;
  calls_left = static_cast<std::int64_t>(number);
}
inline void end() { calls_left = 0; }

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

// The rings of this process, as far as it takes to spoil a request.
struct Ring {
  io_uring_params params{};
  std::byte* submissions = nullptr;
  std::byte* entries = nullptr;

  void spoil_newest() const {
    std::uint32_t tail;
    __atomic_load(reinterpret_cast<std::uint32_t*>(submissions + params.sq_off.tail), &tail, __ATOMIC_ACQUIRE);
    auto* const all = reinterpret_cast<io_uring_sqe*>(entries);
    all[(tail - 1) & (params.sq_entries - 1)].fd = -1;
  }
};

class Rings {
 public:
  void made(int fd, const io_uring_params& params) {
    const std::lock_guard lock(mutex_);
    rings_[fd] = {.params = params};
  }
  void mapped(int fd, off_t offset, void* at) {
    const std::lock_guard lock(mutex_);
    const auto ring = rings_.find(fd);
    if (ring == rings_.end()) return;
    if (offset == static_cast<off_t>(IORING_OFF_SQ_RING)) ring->second.submissions = static_cast<std::byte*>(at);
    if (offset == static_cast<off_t>(IORING_OFF_SQES)) ring->second.entries = static_cast<std::byte*>(at);
  }
  void spoil_newest(int fd) {
    const std::lock_guard lock(mutex_);
    rings_.at(fd).spoil_newest();
  }

 private:
  std::mutex mutex_;
  std::map<int, Ring> rings_;
};

inline Rings& rings() {
  static auto* const all = new Rings;
  return *all;
}

}  // namespace refused

#pragma GCC visibility push(default)  // so that the C++ library, whose files the core uses, too, takes them
extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = refused::next<int (*)(const char*, int, ...)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return refused::fails("open") ? -1 : real(path, flags, mode);
}

int openat(int directory, const char* path, int flags, ...) {
  static const auto real = refused::next<int (*)(int, const char*, int, ...)>("openat");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return refused::fails("openat") ? -1 : real(directory, path, flags, mode);
}

std::FILE* fopen(const char* path, const char* mode) {
  static const auto real = refused::next<std::FILE* (*)(const char*, const char*)>("fopen");
  return refused::fails("fopen") ? nullptr : real(path, mode);
}
std::FILE* fopen64(const char* path, const char* mode) { return fopen(path, mode); }

ssize_t read(int fd, void* to, std::size_t bytes) {
  static const auto real = refused::next<ssize_t (*)(int, void*, std::size_t)>("read");
  return refused::fails("read") ? -1 : real(fd, to, bytes);
}

ssize_t pread(int fd, void* to, std::size_t bytes, off_t offset) {
  static const auto real = refused::next<ssize_t (*)(int, void*, std::size_t, off_t)>("pread");
  return refused::fails("pread") ? -1 : real(fd, to, bytes, offset);
}

ssize_t pwrite(int fd, const void* from, std::size_t bytes, off_t offset) {
  static const auto real = refused::next<ssize_t (*)(int, const void*, std::size_t, off_t)>("pwrite");
  return refused::fails("pwrite") ? -1 : real(fd, from, bytes, offset);
}

int fsync(int fd) {
  static const auto real = refused::next<int (*)(int)>("fsync");
  return refused::fails("fsync") ? -1 : real(fd);
}

int fdatasync(int fd) {
  static const auto real = refused::next<int (*)(int)>("fdatasync");
  return refused::fails("fdatasync") ? -1 : real(fd);
}

int msync(void* at, std::size_t bytes, int flags) {
  static const auto real = refused::next<int (*)(void*, std::size_t, int)>("msync");
  return refused::fails("msync") ? -1 : real(at, bytes, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static const auto real = refused::next<int (*)(int, int, off_t, off_t)>("fallocate");
  return refused::fails("fallocate") ? -1 : real(fd, mode, offset, bytes);
}

int ftruncate(int fd, off_t bytes) noexcept {
  static const auto real = refused::next<int (*)(int, off_t)>("ftruncate");
  return refused::fails("ftruncate") ? -1 : real(fd, bytes);
}

off_t lseek(int fd, off_t offset, int whence) noexcept {
  static const auto real = refused::next<off_t (*)(int, off_t, int)>("lseek");
  return refused::fails("lseek") ? -1 : real(fd, offset, whence);
}

int flock(int fd, int operation) noexcept {
  static const auto real = refused::next<int (*)(int, int)>("flock");
  return refused::fails("flock") ? -1 : real(fd, operation);
}

int stat(const char* path, struct stat* found) noexcept {
  static const auto real = refused::next<int (*)(const char*, struct stat*)>("stat");
  return refused::fails("stat") ? -1 : real(path, found);
}

int fstat(int fd, struct stat* found) noexcept {
  static const auto real = refused::next<int (*)(int, struct stat*)>("fstat");
  return refused::fails("fstat") ? -1 : real(fd, found);
}

int statx(int fd, const char* path, int flags, unsigned mask, struct statx* found) noexcept {
  static const auto real = refused::next<int (*)(int, const char*, int, unsigned, struct statx*)>("statx");
  return refused::fails("statx") ? -1 : real(fd, path, flags, mask, found);
}

int statfs(const char* path, struct statfs* found) noexcept {
  static const auto real = refused::next<int (*)(const char*, struct statfs*)>("statfs");
  return refused::fails("statfs") ? -1 : real(path, found);
}

int access(const char* path, int mode) noexcept {
  static const auto real = refused::next<int (*)(const char*, int)>("access");
  return refused::fails("access") ? -1 : real(path, mode);
}

int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = refused::next<int (*)(const char*, mode_t)>("mkdir");
  return refused::fails("mkdir") ? -1 : real(path, mode);
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = refused::next<int (*)(const char*, const char*)>("rename");
  return refused::fails("rename") ? -1 : real(from, to);
}

int remove(const char* path) noexcept {
  static const auto real = refused::next<int (*)(const char*)>("remove");
  return refused::fails("remove") ? -1 : real(path);
}

int unlink(const char* path) noexcept {
  static const auto real = refused::next<int (*)(const char*)>("unlink");
  return refused::fails("unlink") ? -1 : real(path);
}

// Sanitizers have their own of this.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* mmap(void* at, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  static const auto real = refused::next<void* (*)(void*, std::size_t, int, int, int, off_t)>("mmap");
  if (fd >= 0 && refused::fails("mmap")) return MAP_FAILED;
  void* const got = real(at, bytes, protection, flags, fd, offset);
  if (fd >= 0 && got != MAP_FAILED) refused::rings().mapped(fd, offset, got);
  return got;
}
#endif

long syscall(long number, ...) noexcept {
  static const auto real = refused::next<long (*)(long, ...)>("syscall");
  va_list arguments;
  va_start(arguments, number);
  std::array<long, 6> a;
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  const int fd = static_cast<int>(a[0]);
  if (number == SYS_io_uring_setup) {
    if (!refused::has_rings || refused::is("io_uring_setup")) {
      errno = ENOMEM;
      return -1;
    }
    const long made = real(number, a[0], a[1]);
    if (made >= 0) refused::rings().made(static_cast<int>(made), *reinterpret_cast<io_uring_params*>(a[1]));
    return made;
  }
  if (number == SYS_io_uring_enter && a[1] != 0 && refused::is("io_uring_enter")) {
    if (refused::error == EINTR) {
      errno = EINTR;
      return -1;
    }
    refused::rings().spoil_newest(fd);
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"
#pragma GCC visibility pop

// Makes a chosen system call on a chosen file fail, or do a part only. LD_PRELOAD it and arm it with holdfast_fault. Or,
// with HOLDFAST_RECORD in the environment, takes down in that file what the process makes, sizes, syncs and renames.
//
// What it covers is what the C library's wrappers cover: an io_uring goes past them, so where one is to be faulty the
// kernel has to refuse io_uring (the call `io_uring_setup`), as it does in many containers. Stores to a mapping make no
// call at all.
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace {

struct Fault {
  std::string call;
  std::string file;  // a part of its path; with a $: its end
  long nth;  // of the calls that fit: the first that is faulty
  long times;  // so many from there on
  int error;  // errno; 0: the call does less than it was asked for, or takes longer
  long most_bytes;  // where it does less
  long delay_ms;  // where it takes longer, and does all of it: more than 0
  long below;  // only at offsets below; -1: at any
};

std::mutex mutex;
Fault fault;
std::atomic<bool> armed{false};
std::atomic<long> rings_left{LONG_MAX};
std::atomic<long> rings_refused{0};
std::atomic<long> struck{0};

// Of any call on a file with this in its path.
std::string watched;
std::atomic<long> calls_to_live{-1};  // it dies at the last of them; negative: it does not
std::atomic<long> sync_delay_us{0};

std::string lied_about;  // a part of a file's path
std::atomic<long> lie_at{0};  // the write that is not made; 0: all are

std::string path_of(int fd) {
  char link[64];
  char path[4096];
  std::snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = ::readlink(link, path, sizeof(path));
  return length < 0 ? std::string() : std::string(path, static_cast<std::size_t>(length));
}

std::string path_at(const void* address) {
  std::FILE* maps = std::fopen("/proc/self/maps", "re");
  char line[4352];
  std::string found;
  while (maps != nullptr && std::fgets(line, sizeof(line), maps) != nullptr) {
    std::uintptr_t begin;
    std::uintptr_t end;
    int path = 0;
    if (std::sscanf(line, "%lx-%lx %*s %*s %*s %*s %n", &begin, &end, &path) < 2) continue;
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    if (at >= begin && at < end) found = line + path;
  }
  if (maps != nullptr) std::fclose(maps);
  return found;
}

bool names(const std::string& part, const std::string& path) {
  if (!part.ends_with('$')) return path.find(part) != std::string::npos;
  return path.ends_with(part.substr(0, part.size() - 1));
}

template <class Path>
void meet_watched(const char* call, const Path& path) {
  const int before = errno;
  if (path().find(watched) != std::string::npos) {
    const bool syncs = std::strstr(call, "sync") != nullptr;
    if (syncs && sync_delay_us.load() > 0) ::usleep(static_cast<useconds_t>(sync_delay_us.load()));
    if (calls_to_live.load() > 0 && --calls_to_live == 0) ::kill(::getpid(), SIGKILL);
  }
  errno = before;
}

// Is this call faulty? Then `fault` says how. One that only takes longer has taken it here, and is not.
template <class Path>
bool strikes(const char* call, const Path& path, long offset = 0) {
  if (calls_to_live.load() > 0 || sync_delay_us.load() > 0) meet_watched(call, path);
  if (!armed.load()) return false;
  const int before = errno;
  std::unique_lock lock(mutex);
  const bool fits = fault.call == call && (fault.below < 0 || offset < fault.below) && names(fault.file, path());
  errno = before;
  if (!fits || --fault.nth > 0 || fault.times <= 0) return false;
  --fault.times;
  ++struck;
  if (const long delay_ms = fault.delay_ms; delay_ms > 0) {
    lock.unlock();
    ::usleep(static_cast<useconds_t>(1000 * delay_ms));
    errno = before;
    return false;
  }
  errno = fault.error;
  return true;
}

bool strikes(const char* call, int fd, long offset = 0) {
  return strikes(call, [fd] { return path_of(fd); }, offset);
}

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

void record(const char* what, const std::string& path, const std::string& to = {}) {
  static const char* const file = std::getenv("HOLDFAST_RECORD");
  if (file == nullptr) return;
  const int before = errno;
  static const long fd = ::syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  const std::string line = std::string(what) + "\t" + path + "\t" + to + "\n";
  (void)::syscall(SYS_write, fd, line.data(), line.size());
  errno = before;
}
// Takes down what was done to a file that is open.
int recorded(const char* what, int fd, int result) {
  if (result == 0) record(what, path_of(fd));
  return result;
}

std::size_t less(std::size_t bytes) {
  const std::lock_guard lock(mutex);
  return std::min(bytes, static_cast<std::size_t>(fault.most_bytes));
}

}  // namespace

extern "C" {

void holdfast_fault(const char* call, const char* file, long nth, long times, int error, long most_bytes, long delay_ms,
                    long below) {
  const std::lock_guard lock(mutex);
  fault = {call, file, nth, times, error, most_bytes, delay_ms, below};
  armed = true;
}
// From now on the kernel has so many io_urings, and then no more.
void holdfast_limit_rings(long count) { rings_left = count; }
long holdfast_rings_refused() { return rings_refused; }
// Kills the process at the nth call from now on, of any kind, on a file with `file` in its path.
void holdfast_kill_at_call(const char* file, long nth) {
  watched = file;
  calls_to_live = nth;
}
// Every sync of such a file takes so much longer.
void holdfast_slow(const char* file, long microseconds) {
  watched = file;
  sync_delay_us = microseconds;
}
// From now on the nth write to such a file is not made, and reported as if it were.
void holdfast_lie(const char* file, long nth) {
  lied_about = file;
  lie_at = nth;
}
long holdfast_faults_struck() { return struck; }

ssize_t pwrite(int fd, const void* from, std::size_t bytes, off_t offset) {
  static const auto real = next<decltype(&pwrite)>("pwrite");
  if (lie_at.load() > 0 && names(lied_about, path_of(fd)) && --lie_at == 0) return static_cast<ssize_t>(bytes);
  if (!strikes("pwrite", fd, offset)) return real(fd, from, bytes, offset);
  return errno != 0 ? -1 : real(fd, from, less(bytes), offset);
}
ssize_t pwrite64(int fd, const void* from, std::size_t bytes, off_t offset) { return pwrite(fd, from, bytes, offset); }

ssize_t pread(int fd, void* to, std::size_t bytes, off_t offset) {
  static const auto real = next<decltype(&pread)>("pread");
  if (!strikes("pread", fd, offset)) return real(fd, to, bytes, offset);
  return errno != 0 ? -1 : real(fd, to, less(bytes), offset);
}
ssize_t pread64(int fd, void* to, std::size_t bytes, off_t offset) { return pread(fd, to, bytes, offset); }

ssize_t write(int fd, const void* from, std::size_t bytes) {
  static const auto real = next<decltype(&write)>("write");
  if (!strikes("write", fd)) return real(fd, from, bytes);
  return errno != 0 ? -1 : real(fd, from, less(bytes));
}

int fsync(int fd) {
  static const auto real = next<decltype(&fsync)>("fsync");
  return strikes("fsync", fd) ? -1 : recorded("sync", fd, real(fd));
}

int fdatasync(int fd) {
  static const auto real = next<decltype(&fdatasync)>("fdatasync");
  return strikes("fdatasync", fd) ? -1 : recorded("sync", fd, real(fd));
}

int msync(void* address, std::size_t bytes, int flags) {
  static const auto real = next<decltype(&msync)>("msync");
  return strikes("msync", [address] { return path_at(address); }) ? -1 : real(address, bytes, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static const auto real = next<decltype(&fallocate)>("fallocate");
  return strikes("fallocate", fd, offset) ? -1 : recorded("size", fd, real(fd, mode, offset, bytes));
}
int fallocate64(int fd, int mode, off_t offset, off_t bytes) { return fallocate(fd, mode, offset, bytes); }

int ftruncate(int fd, off_t bytes) {
  static const auto real = next<decltype(&ftruncate)>("ftruncate");
  return strikes("ftruncate", fd) ? -1 : recorded("size", fd, real(fd, bytes));
}
int ftruncate64(int fd, off_t bytes) { return ftruncate(fd, bytes); }

void* mmap(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  static const auto real = next<decltype(&mmap)>("mmap");
  return fd >= 0 && strikes("mmap", fd) ? MAP_FAILED : real(address, bytes, protection, flags, fd, offset);
}
void* mmap64(void* address, std::size_t bytes, int protection, int flags, int fd, off_t offset) {
  return mmap(address, bytes, protection, flags, fd, offset);
}

int open(const char* path, int flags, ...) {
  static const auto real = next<decltype(&open)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  if (strikes("open", [path] { return std::string(path); })) return -1;
  const int fd = real(path, flags, mode);
  if (fd >= 0 && (flags & O_CREAT) != 0) record("make", path_of(fd));
  return fd;
}
int open64(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return open(path, flags, mode);
}

int rename(const char* from, const char* to) {
  static const auto real = next<decltype(&rename)>("rename");
  if (strikes("rename", [to] { return std::string(to); })) return -1;
  const int result = real(from, to);
  if (result == 0) record("rename", from, to);
  return result;
}

int symlink(const char* target, const char* path) {
  static const auto real = next<decltype(&symlink)>("symlink");
  const int result = real(target, path);
  if (result == 0) record("make", path);
  return result;
}

int mkdir(const char* path, mode_t mode) {
  static const auto real = next<decltype(&mkdir)>("mkdir");
  const int result = real(path, mode);
  if (result == 0) record("make", path);
  return result;
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*run)(void*), void* argument) {
  static const auto real = next<decltype(&pthread_create)>("pthread_create");
  return strikes("pthread_create", [] { return std::string(); }) ? errno : real(thread, attributes, run, argument);
}

long syscall(long number, ...) {
  static const auto real = next<long (*)(long, ...)>("syscall");
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_io_uring_setup && rings_left-- <= 0) {
    ++rings_refused;
    errno = ENOMEM;
    return -1;
  }
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"

#include "media/block_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/system_error.h"
#include "media/directory.h"
#include "media/medium.h"

namespace holdfast {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// Bytes to which the file wants direct I/O aligned; 0 where it does none. Nothing where the file system does not say:
// btrfs takes any piece, and moves what suits it not through the page cache.
std::optional<std::uint32_t> direct_alignment(int fd) {
#ifdef STATX_DIOALIGN
  struct statx found{};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &found) == 0 && (found.stx_mask & STATX_DIOALIGN) != 0) {
    return found.stx_dio_mem_align == 0 ? 0 : std::max(found.stx_dio_offset_align, found.stx_dio_mem_align);
  }
#endif
  return std::nullopt;
}

struct Opened {
  int fd;
  std::size_t unit_bytes;
  bool reads_device;
};

std::optional<Opened> open_direct(const std::string& path, int flags) {
  Descriptor fd(::open(path.c_str(), flags | O_DIRECT));
  if (fd.get() < 0) {
    if (errno == EINVAL) return std::nullopt;
    throw_errno("opening " + path, errno);
  }
  const auto said = direct_alignment(fd.get());
  const std::size_t alignment = said.value_or(format::block_bytes);
  if (!std::has_single_bit(alignment) || alignment > format::block_bytes) return std::nullopt;
  return Opened{fd.release(), std::max(alignment, format::sector_bytes), said.has_value()};
}

Opened open_for_io(const std::string& path, Caching caching, Opening opening) {
  const int flags = (opening == Opening::read_only ? O_RDONLY : O_RDWR | O_NOFOLLOW) | O_CLOEXEC;
  if (caching == Caching::direct) {
    if (const auto opened = open_direct(path, flags)) return *opened;
  }
  const int fd = ::open(path.c_str(), flags);
  if (fd < 0) throw_errno("opening " + path, errno);
  return {fd, caching == Caching::buffered_blocks ? format::block_bytes : format::sector_bytes, false};
}

}  // namespace

void BlockFile::create(const std::string& path, std::uint64_t bytes, std::span<const std::byte> tail) {
  const Descriptor fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644));
  if (fd.get() < 0 || ::ftruncate(fd.get(), static_cast<off_t>(bytes + tail.size())) != 0) {
    throw_errno("creating " + path, errno);
  }
  for (std::size_t done = 0; done < tail.size();) {
    const ssize_t put = ::pwrite(fd.get(), tail.data() + done, tail.size() - done, static_cast<off_t>(bytes + done));
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) throw_errno("creating " + path, put < 0 ? errno : ENOSPC);
    done += static_cast<std::size_t>(put);
  }
  if (::fsync(fd.get()) != 0) throw_errno("creating " + path, errno);
  sync_directory(directory_of(path));
  Medium::count_persist_point();
}

BlockFile::BlockFile(std::string path, Caching caching, BlockWatcher* watcher, Opening opening)
    : path_(std::move(path)), watcher_(watcher) {
  const Opened opened = open_for_io(path_, caching, opening);
  Descriptor fd(opened.fd);
  unit_bytes_ = opened.unit_bytes;
  reads_device_ = opened.reads_device;
  struct stat found{};
  if (::fstat(fd.get(), &found) != 0) throw_errno("looking at " + path_, errno);
  bytes_ = static_cast<std::uint64_t>(found.st_size);
  fd_ = fd.release();
}

BlockFile::~BlockFile() { ::close(fd_); }

void BlockFile::check(std::uint64_t offset, std::size_t bytes, const std::byte* memory) const {
  if (failed_) throw Error(ErrorKind::failed, path_ + ": an earlier sync failed; open it again");
  const std::uint64_t mask = unit_bytes_ - 1;
  if ((offset & mask) != 0 || (bytes & mask) != 0 || (reinterpret_cast<std::uintptr_t>(memory) & mask) != 0) {
    throw Error(ErrorKind::config, place(offset) + ": " + std::to_string(bytes) + " bytes are no whole units of " +
                                       std::to_string(unit_bytes_));
  }
}

void BlockFile::check_read(std::uint64_t offset, std::size_t bytes, const std::byte* dst) const {
  check(offset, bytes, dst);
  if (watcher_ != nullptr) watcher_->before_read(*this);
}

void BlockFile::check_write(std::uint64_t offset, std::size_t bytes, const std::byte* src) const {
  check(offset, bytes, src);
  if (watcher_ != nullptr) watcher_->before_write(*this, offset, {src, bytes});
  Medium::count_persist_point();
}

void BlockFile::write(std::uint64_t offset, std::size_t bytes, const std::byte* src) {
  check_write(offset, bytes, src);
  DialService service(dial_, {.stream_written_bytes = bytes});
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd_, src + done, bytes - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw_errno("writing " + place(offset + done), errno);
    if (n < static_cast<ssize_t>(unit_bytes_)) throw_errno("writing " + place(offset + done), EIO);
    const auto moved = static_cast<std::size_t>(n);
    done += done + moved == bytes ? moved : moved / unit_bytes_ * unit_bytes_;  // a short one ends at a whole unit
  }
  service.finish();
}

void BlockFile::sync() {
  check(0, 0, nullptr);
  if (watcher_ != nullptr) watcher_->before_sync(*this);
  Medium::count_persist_point();
  DialService service(dial_, {.syncs = 1});
  if (::fdatasync(fd_) != 0) {
    const int error = errno;
    failed_ = true;
    throw_errno("syncing " + path_, error);
  }
  service.finish();
  if (watcher_ != nullptr) watcher_->after_sync(*this);
}

std::uint64_t BlockFile::next_data(std::uint64_t offset) const {
  const off_t data = ::lseek(fd_, static_cast<off_t>(offset), SEEK_DATA);
  if (data >= 0) return static_cast<std::uint64_t>(data);
  if (errno == ENXIO) return bytes_;
  if (errno == EINVAL) return offset;  // a file system that does not know its holes
  throw_errno("looking for data in " + place(offset), errno);
}

void BlockFile::allocate(std::uint64_t offset, std::uint64_t bytes) {
  while (::fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
    if (errno == EOPNOTSUPP) return;  // space is then found, or not, by the writes
    if (errno != EINTR) throw_errno("allocating " + std::to_string(bytes) + " bytes of " + path_, errno);
  }
}

}  // namespace holdfast

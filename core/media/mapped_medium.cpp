#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/system_error.h"
#include "media/directory.h"
#include "media/ground.h"
#include "media/medium.h"

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

namespace holdfast {

std::atomic<std::int64_t> Medium::kill_at_{0};

void Medium::strike_persist_point() {
  if (kill_at_.fetch_sub(1) == 1) ::kill(::getpid(), SIGKILL);
}

namespace {

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The cache-line write-back that this CPU has: clwb keeps the line, the others drop it.
enum class WriteBack { clwb, clflushopt, clflush, none };

#if defined(__x86_64__)
WriteBack detect_write_back() {
  std::uint32_t eax = 7;
  std::uint32_t ebx = 0;
  std::uint32_t ecx = 0;
  std::uint32_t edx = 0;
  __asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
  if ((ebx >> 24 & 1) != 0) return WriteBack::clwb;
  if ((ebx >> 23 & 1) != 0) return WriteBack::clflushopt;
  return WriteBack::clflush;
}
void write_back_lines(WriteBack how, const void* data, std::size_t bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(data) & ~std::uintptr_t{63};
  const auto last = reinterpret_cast<std::uintptr_t>(data) + bytes;
  for (std::uintptr_t line = first; line < last; line += 64) {
    auto* byte = reinterpret_cast<volatile char*>(line);
    if (how == WriteBack::clwb) {
      __asm__ volatile(".byte 0x66; xsaveopt %0" : "+m"(*byte));  // clwb, spelled for every assembler
    } else if (how == WriteBack::clflushopt) {
      __asm__ volatile(".byte 0x66; clflush %0" : "+m"(*byte));
    } else {
      __asm__ volatile("clflush %0" : "+m"(*byte));
    }
  }
}
void store_fence() { __asm__ volatile("sfence" ::: "memory"); }
#else
WriteBack detect_write_back() { return WriteBack::none; }
void write_back_lines(WriteBack, const void*, std::size_t) {}
void store_fence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
#endif

const char* name_of(WriteBack how) {
  switch (how) {
    case WriteBack::clwb: return "clwb";
    case WriteBack::clflushopt: return "clflushopt";
    case WriteBack::clflush: return "clflush";
    case WriteBack::none: return "none";
  }
  return "none";
}

// Where a file system copies what is overwritten, blocks that a file has are no room for a store to its mapping, which
// ends the process where the disk is full. fd: an empty file. What cannot be had is done without.
void overwrite_in_place(int fd) {
  struct statfs system{};
  int flags = 0;
  if (::fstatfs(fd, &system) != 0 || system.f_type != BTRFS_SUPER_MAGIC) return;
  if (::ioctl(fd, FS_IOC_GETFLAGS, &flags) != 0) return;
  flags |= FS_NOCOW_FL;
  static_cast<void>(::ioctl(fd, FS_IOC_SETFLAGS, &flags));
}

class MappedFile final : public File {
 public:
  // at: where it is mapped, in memory that the caller gives back; null: wherever there is room.
  MappedFile(std::string path, int fd, std::size_t bytes, bool writable, bool dax, bool synced, Access access,
             std::byte* at = nullptr)
      : File(std::move(path)), fd_(fd), writable_(writable), dax_(dax), synced_(synced), access_(access) {
    struct statfs system{};
    in_memory_ = ::fstatfs(fd_, &system) == 0 && system.f_type == TMPFS_MAGIC;
    is_own_ = at == nullptr;
    if (synced_ && writable_) direct_fd_ = ::open(name_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);  // or not
    void* address = mapped(bytes, at);
    if (address == MAP_FAILED) {
      const int error = errno;
      ::close(fd_);
      if (direct_fd_ >= 0) ::close(direct_fd_);
      throw_errno("mapping " + name_, error);
    }
    data_ = static_cast<std::byte*>(address);
    size_ = bytes;
  }
  ~MappedFile() override {
    if (data_ != nullptr && is_own_) ::munmap(data_, std::max<std::size_t>(size_, 1));
    if (direct_fd_ >= 0) ::close(direct_fd_);
    ::close(fd_);
  }

  void allocate(std::size_t offset, std::size_t bytes) override {
    if (bytes == 0) return;
    if (may_lie_in_huge_pages()) take_huge_pages(offset, bytes);
    int error = has_room_for(offset, bytes) ? 0 : errno;
    if (error == ENOSPC && has_blocks_for(bytes) && has_room_in_parts(offset, bytes)) error = 0;
    if (error == EOPNOTSUPP) {
      rewrite_in_place(offset, bytes);
    } else if (error != 0) {
      throw_errno("allocating " + std::to_string(bytes) + " bytes of " + name_, error);
    }
  }

  std::size_t next_data(std::size_t offset) const override {
    const off_t found = ::lseek(fd_, static_cast<off_t>(offset), SEEK_DATA);
    if (found < 0) return errno == ENXIO ? size_ : offset;  // not every file system knows its holes
    return std::min(static_cast<std::size_t>(found), size_);
  }

  std::size_t next_hole(std::size_t offset) const override {
    const off_t found = ::lseek(fd_, static_cast<off_t>(offset), SEEK_HOLE);
    return found < 0 ? offset : std::min(static_cast<std::size_t>(found), size_);
  }

  bool may_lie_in_huge_pages() const override {
    return in_memory_ && writable_ && reinterpret_cast<std::uintptr_t>(data_) % huge_page_bytes == 0;
  }

  Moved move_to_huge_page(std::size_t offset) override {
    if (::madvise(data_ + offset, huge_page_bytes, MADV_COLLAPSE) == 0) return Moved::yes;
    // Memory is short or scattered; somebody has a page at hand. Kernels that know no such thing say EINVAL.
    const bool is_passing = errno == ENOMEM || errno == EAGAIN || errno == EBUSY || errno == EINTR || errno == ENOSPC;
    return is_passing ? Moved::not_now : Moved::no;
  }

  void resize(std::size_t bytes) override {
    if (::ftruncate(fd_, static_cast<off_t>(bytes)) != 0) throw_errno("resizing " + name_, errno);
    // Not mremap, which ThreadSanitizer does not see: it takes the addresses' last users for this one's.
    void* address = mapped(bytes, nullptr);
    if (address == MAP_FAILED) {
      const int error = errno;
      const bool undone = ::ftruncate(fd_, static_cast<off_t>(size_)) == 0;
      const std::string what = "mapping " + std::to_string(bytes) + " bytes of " + name_;
      throw_errno(undone ? what : what + ", which stays as long as that", error);
    }
    ::munmap(data_, std::max<std::size_t>(size_, 1));
    data_ = static_cast<std::byte*>(address);
    size_ = bytes;
  }

  void write(std::size_t offset, const void* from, std::size_t bytes) override {
    if (!synced_) {
      if (bytes != 0) std::memcpy(data_ + offset, from, bytes);
      return;
    }
    const auto* left = static_cast<const std::byte*>(from);
    // Whole sectors go past the page cache, where the file system takes them so; fsync waits for them all the same.
    const bool in_sectors = (reinterpret_cast<std::uintptr_t>(left) | offset | bytes) % format::sector_bytes == 0;
    int fd = in_sectors && direct_fd_ >= 0 ? direct_fd_ : fd_;
    while (bytes != 0) {
      const ssize_t put = ::pwrite(fd, left, bytes, static_cast<off_t>(offset));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0 && errno == EINVAL && fd == direct_fd_) {
        fd = fd_;
        continue;
      }
      if (put <= 0) throw_errno("writing " + name_, put < 0 ? errno : ENOSPC);
      left += put;
      offset += static_cast<std::size_t>(put);
      bytes -= static_cast<std::size_t>(put);
    }
  }

  void sync() override {
    if (!writable_) return;
    if (size_ > 0 && ::msync(data_, size_, MS_SYNC) != 0) throw_errno("syncing " + name_, errno);
    if (::fsync(fd_) != 0) throw_errno("syncing " + name_, errno);
  }

 private:
  // Where the file's first bytes are mapped, or MAP_FAILED. at: where to, or null.
  void* mapped(std::size_t bytes, std::byte* at) const {
    const int protection = PROT_READ | (writable_ ? PROT_WRITE : 0);
    std::byte* const reserved =
        at == nullptr && in_memory_ && bytes >= huge_page_bytes ? map_for_huge_pages(bytes, PROT_NONE) : nullptr;
    if (reserved != nullptr) at = reserved;
    const int flags = (dax_ ? MAP_SHARED_VALIDATE | MAP_SYNC : MAP_SHARED) | (at != nullptr ? MAP_FIXED : 0);
    void* address = ::mmap(at, std::max<std::size_t>(bytes, 1), protection, flags, fd_, 0);
    if (address == MAP_FAILED) {
      const int error = errno;
      if (reserved != nullptr) ::munmap(reserved, bytes);
      errno = error;
      return address;
    }
    // Read-ahead around a random row costs up to a millisecond a fault. Huge pages only where all of a file is used: on
    // a sparse one every touched row would take 2 MiB.
    ::madvise(address, bytes, access_ == Access::random ? MADV_RANDOM : MADV_HUGEPAGE);
    ::madvise(address, bytes, MADV_DONTFORK);
    return address;
  }

  // Sets errno.
  bool has_room_for(std::size_t offset, std::size_t bytes) const {
    while (::fallocate(fd_, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) != 0) {
      if (errno != EINTR) return false;
    }
    return true;
  }

  // Of a range that holds nothing: huge pages, which take less time than as many small ones. Where the kernel gives none,
  // or the file system has no room for all of the range, it is allocated as ever.
  void take_huge_pages(std::size_t offset, std::size_t bytes) {
    const std::size_t end = (offset + bytes) / huge_page_bytes * huge_page_bytes;
    std::size_t begin = format::align_up(offset, huge_page_bytes);
    struct statfs system{};
    if (begin >= end || ::fstatfs(fd_, &system) != 0) return;
    const bool is_limited = system.f_blocks != 0;
    if (is_limited && system.f_bavail * static_cast<std::size_t>(system.f_bsize) < bytes) return;
    for (; begin < end; begin += huge_page_bytes) {
      if (next_data(begin) < begin + huge_page_bytes) continue;
      if (!has_room_for(begin, format::block_bytes)) return;
      volatile std::byte* const first = data_ + begin;
      *first = *first;  // the kernel moves no page that is not mapped
      if (move_to_huge_page(begin) != Moved::yes) return;
    }
  }

  // XFS wants as much free space as a range is long, also where the file has all of its blocks already.
  bool has_room_in_parts(std::size_t offset, std::size_t bytes) const {
    if (has_room_for(offset, bytes)) return true;
    if (errno != ENOSPC || bytes <= format::block_bytes) return false;
    const std::size_t half = (bytes / 2 + format::block_bytes - 1) / format::block_bytes * format::block_bytes;
    return has_room_in_parts(offset, half) && has_room_in_parts(offset + half, bytes - half);
  }

  bool has_blocks_for(std::size_t bytes) const {
    struct stat status{};
    return ::fstat(fd_, &status) == 0 && static_cast<std::size_t>(status.st_blocks) * 512 >= bytes;
  }

  // For file systems without fallocate: writing the same bytes again makes the file system find space for them.
  void rewrite_in_place(std::size_t offset, std::size_t bytes) {
    std::vector<char> buffer(std::min<std::size_t>(bytes, 1 << 20));
    for (std::size_t done = 0; done < bytes;) {
      const std::size_t part = std::min(buffer.size(), bytes - done);
      const auto at = static_cast<off_t>(offset + done);
      const ssize_t got = ::pread(fd_, buffer.data(), part, at);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) throw_errno("reading " + name_, errno);
      std::fill(buffer.begin() + got, buffer.begin() + static_cast<std::ptrdiff_t>(part), '\0');
      const ssize_t put = ::pwrite(fd_, buffer.data(), part, at);
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) throw_errno("allocating " + std::to_string(bytes) + " bytes of " + name_, put < 0 ? errno : ENOSPC);
      done += static_cast<std::size_t>(put);
    }
  }

  int fd_;
  int direct_fd_ = -1;
  bool in_memory_ = false;  // on tmpfs
  bool is_own_ = true;      // not at addresses of the caller's
  bool writable_;
  bool dax_;
  bool synced_;
  Access access_;
};

// The pieces at their places in one range of addresses; whoever goes beside them gets a fault, not another file's
// bytes.
class JoinedFile final : public File {
 public:
  JoinedFile(std::string name, std::size_t bytes) : File(std::move(name)) {
    size_ = bytes;
    if (bytes == 0) return;
    data_ = map_for_huge_pages(bytes, PROT_NONE);
    if (data_ == nullptr) throw_errno("finding addresses for " + std::to_string(bytes) + " bytes of " + name_, errno);
  }
  ~JoinedFile() override {
    if (data_ != nullptr) ::munmap(data_, size_);
  }

  void add(std::size_t offset, std::unique_ptr<MappedFile> file) { pieces_.push_back({offset, std::move(file)}); }

  std::string place(std::size_t offset) const override {
    const Piece& piece = piece_of(offset);
    return piece.file->place(offset - piece.offset);
  }
  void allocate(std::size_t offset, std::size_t bytes) override {
    if (bytes == 0) return;
    const std::size_t end = offset + bytes;
    // What is asked for is whole pages, of which a piece's last one may lack an end.
    for (const Piece* piece = &piece_of(offset); piece != nullptr && offset < end; piece = piece_at(offset)) {
      const std::size_t from = offset - piece->offset;
      const std::size_t part = std::min(end - offset, piece->file->size() - from);
      piece->file->allocate(from, part);
      offset += part;
    }
  }
  std::size_t next_data(std::size_t offset) const override {
    auto piece = piece_before(offset);
    if (piece == pieces_.end()) piece = pieces_.begin();
    for (; piece != pieces_.end(); ++piece) {
      const std::size_t from = std::max(offset, piece->offset) - piece->offset;
      if (from >= piece->file->size()) continue;
      if (const std::size_t found = piece->file->next_data(from); found < piece->file->size()) {
        return piece->offset + found;
      }
    }
    return size_;
  }
  std::size_t next_hole(std::size_t offset) const override {
    const Piece& piece = piece_of(offset);
    return piece.offset + piece.file->next_hole(offset - piece.offset);
  }
  bool may_lie_in_huge_pages() const override {
    return std::ranges::any_of(pieces_, [](const Piece& piece) { return piece.file->may_lie_in_huge_pages(); });
  }
  Moved move_to_huge_page(std::size_t offset) override {
    const Piece* piece = piece_at(offset);
    const bool is_of_one = piece != nullptr && offset + huge_page_bytes <= piece->offset + piece->file->size();
    if (!is_of_one || !piece->file->may_lie_in_huge_pages()) return Moved::no;
    return piece->file->move_to_huge_page(offset - piece->offset);
  }
  void resize(std::size_t) override {
    throw Error(ErrorKind::config, name_ + ": files that are joined keep their size");
  }
  void write(std::size_t offset, const void* from, std::size_t bytes) override {
    const Piece& piece = piece_of(offset);
    piece.file->write(offset - piece.offset, from, bytes);
  }
  void sync() override {
    for (const Piece& piece : pieces_) piece.file->sync();
  }

 private:
  struct Piece {
    std::size_t offset;
    std::unique_ptr<MappedFile> file;
  };

  std::vector<Piece>::const_iterator piece_before(std::size_t offset) const {
    const auto after = std::ranges::upper_bound(pieces_, offset, {}, &Piece::offset);
    return after == pieces_.begin() ? pieces_.end() : after - 1;
  }
  // Null where nothing is mapped.
  const Piece* piece_at(std::size_t offset) const {
    const auto piece = piece_before(offset);
    return piece == pieces_.end() || offset - piece->offset >= piece->file->size() ? nullptr : &*piece;
  }
  const Piece& piece_of(std::size_t offset) const {
    const Piece* piece = piece_at(offset);
    if (piece == nullptr) {
      throw Error(ErrorKind::config, name_ + ": nothing is mapped at offset " + std::to_string(offset));
    }
    return *piece;
  }

  std::vector<Piece> pieces_;
};

class MappedMedium final : public Medium {
 public:
  MappedMedium(std::string directory, Flushing flushing) : directory_(std::move(directory)) {
    struct stat status{};
    if (::stat(directory_.c_str(), &status) != 0) throw_errno("opening " + directory_, errno);
    synced_ = flushing == Flushing::synced;
    ground_ = ground_of_files(directory_);
    dax_ = !synced_ && write_back_ != WriteBack::none && is_dax(directory_);
  }

  format::Level level() const override {
    const bool survives = dax_ || (synced_ && ground_.outlives_power);
    return survives ? format::Level::power : format::Level::process;
  }

  std::string description() const override {
    if (dax_) return std::string("DAX (MAP_SYNC, ") + name_of(write_back_) + "), power";
    if (ground_.is_memory || (synced_ && !ground_.outlives_power)) return ground_.words + ", process";
    return synced_ ? "block device (direct I/O, fdatasync), power" : "file, process";
  }

  bool exists(const std::string& name) const override { return has_name(path(name)); }

  std::unique_ptr<File> create(const std::string& name, std::size_t bytes, Access access) override {
    const std::string full = path(name);
    if (const auto slash = name.rfind('/'); slash != std::string::npos) {
      const std::string folder = path(name.substr(0, slash));
      if (::mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) throw_errno("creating " + folder, errno);
    }
    // Whatever has the name, a link to somebody's file among it, is left as it is.
    const int fd = ::open(full.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) throw_errno("creating " + full, errno);
    count_persist_point();
    if (!synced_) overwrite_in_place(fd);
    if (::ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      const int error = errno;
      ::close(fd);
      throw_errno("creating " + full + " of " + std::to_string(bytes) + " bytes", error);
    }
    return std::make_unique<MappedFile>(full, fd, bytes, true, dax_, synced_, access);
  }

  std::unique_ptr<File> open(const std::string& name, bool writable, Access access) override {
    return open_at(name, writable, access, nullptr, std::nullopt);
  }

  std::unique_ptr<File> open_joined(const std::vector<JoinedPiece>& pieces, std::size_t bytes, bool writable,
                                    Access access) override {
    auto joined = std::make_unique<JoinedFile>(pieces.empty() ? directory_ : path(pieces.front().name), bytes);
    for (const JoinedPiece& piece : pieces) {
      joined->add(piece.offset, open_at(piece.name, writable, access, joined->data() + piece.offset, piece));
    }
    return joined;
  }

  Tail read_tail(const std::string& name, std::size_t bytes, std::size_t from_end) const override {
    const std::string full = path(name);
    const int fd = ::open(full.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) throw_errno("opening " + full, errno);
    const off_t size = ::lseek(fd, 0, SEEK_END);
    const off_t offset = std::max<off_t>(0, size - static_cast<off_t>(from_end));
    Tail tail{std::vector<std::byte>(bytes), full + " at offset " + std::to_string(offset)};
    const ssize_t got = ::pread(fd, tail.bytes.data(), bytes, offset);
    const int error = errno;
    ::close(fd);
    if (got < 0) throw_errno("reading " + full, error);
    return tail;
  }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(path(from).c_str(), path(to).c_str()) != 0) throw_errno("renaming " + path(from), errno);
    count_persist_point();
    sync_directory(directory_);
  }

  void flush(const void* data, std::size_t bytes) override {
    if (dax_) write_back_lines(write_back_, data, bytes);
    if (synced_) write_back_pages(data, bytes);
  }
  void fence() override {
    if (dax_) {
      store_fence();
    } else {
      std::atomic_signal_fence(std::memory_order_seq_cst);
    }
  }

 private:
  std::string path(const std::string& name) const { return directory_ + "/" + name; }

  // at, piece: where a piece is mapped, and what it is.
  std::unique_ptr<MappedFile> open_at(const std::string& name, bool writable, Access access, std::byte* at,
                                      const std::optional<JoinedPiece>& piece) const {
    const std::string full = path(name);
    const int fd = ::open(full.c_str(), (writable ? O_RDWR | O_NOFOLLOW : O_RDONLY) | O_CLOEXEC);
    if (fd < 0 && errno == ELOOP)
      throw Error(ErrorKind::failed, "opening " + full + ": " + std::strerror(errno) +
                                         "; a pool writes to no file through a symbolic link: move the file here");
    if (fd < 0) throw_errno("opening " + full, errno);
    struct stat status{};
    if (::fstat(fd, &status) != 0) {
      const int error = errno;
      ::close(fd);
      throw_errno("opening " + full, error);
    }
    const auto bytes = static_cast<std::size_t>(status.st_size);
    if (piece && bytes != piece->file_bytes) {
      ::close(fd);
      throw Error(ErrorKind::corrupted,
                  full + ": " + std::to_string(bytes) + " bytes, it needs " + std::to_string(piece->file_bytes));
    }
    return std::make_unique<MappedFile>(full, fd, piece ? piece->bytes : bytes, writable, dax_ && writable, synced_,
                                        access, at);
  }

  void write_back_pages(const void* data, std::size_t bytes) const {
    if (bytes == 0) return;
    const auto first = reinterpret_cast<std::uintptr_t>(data) & ~std::uintptr_t{format::block_bytes - 1};
    const auto end = reinterpret_cast<std::uintptr_t>(data) + bytes;
    if (::msync(reinterpret_cast<void*>(first), end - first, MS_SYNC) != 0) throw_errno("syncing " + directory_, errno);
  }

  std::string directory_;
  WriteBack write_back_ = detect_write_back();
  // As they were when it was opened: a directory may be moved.
  bool synced_ = false;
  Ground ground_;
  bool dax_ = false;
};

}  // namespace

std::unique_ptr<Medium> open_mapped_medium(const std::string& directory, Flushing flushing) {
  return std::make_unique<MappedMedium>(directory, flushing);
}

bool takes_map_sync(int fd, int protection) {
  void* address = ::mmap(nullptr, format::block_bytes, protection, MAP_SHARED_VALIDATE | MAP_SYNC, fd, 0);
  if (address == MAP_FAILED) return false;
  ::munmap(address, format::block_bytes);
  return true;
}

// Asks the kernel rather than the mount table: only a DAX file system accepts MAP_SYNC. A pool's own file is asked where
// there is one: whoever only reads writes nothing. Else a file without a name.
bool is_dax(const std::string& directory) {
  const Descriptor there(::open((directory + "/pool.holdfast").c_str(), O_RDONLY | O_CLOEXEC));
  if (there.get() >= 0) return takes_map_sync(there.get(), PROT_READ);
  const Descriptor probe(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  return probe.get() >= 0 && ::ftruncate(probe.get(), format::block_bytes) == 0 &&
         takes_map_sync(probe.get(), PROT_READ | PROT_WRITE);
}

bool is_volatile(const std::string& directory) { return ground_of(directory).is_memory; }

void allow_many_files() {
  struct rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max) return;
  limit.rlim_cur = limit.rlim_max;
  (void)::setrlimit(RLIMIT_NOFILE, &limit);  // where it is refused, opening a file says that there are too many
}

}  // namespace holdfast

// What single files do where the system refuses them something, one named call at a time: the error has its kind and
// names the file, nothing is lost or left open, and what can be done another way is. test_refused_calls.cpp has whole
// lives of pools, in which some call fails.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "layout/unpublished.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "media/directory.h"
#include "media/medium.h"
#include "pool/pool_lock.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace refused {

// What a call ends in. error 0: it goes through, with at most so many bytes.
struct Answer {
  int error = 0;
  std::size_t most_bytes = SIZE_MAX;
};

// By the names of calls, those of the next ones; who has none goes through.
inline std::map<std::string, std::deque<Answer>>& answers() {
  static auto* const all = new std::map<std::string, std::deque<Answer>>;
  return *all;
}
inline bool is_on = false;

inline Answer next(const char* name) {
  if (!is_on) return {};
  std::deque<Answer>& left = answers()[name];
  if (left.empty()) return {};
  const Answer answer = left.front();
  left.pop_front();
  if (answer.error != 0) errno = answer.error;
  return answer;
}

template <class Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(::dlsym(RTLD_NEXT, name));
}

}  // namespace refused

#pragma GCC visibility push(default)
extern "C" {

int open(const char* path, int flags, ...) {
  static const auto real = refused::real<int (*)(const char*, int, ...)>("open");
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  return refused::next("open").error != 0 ? -1 : real(path, flags, mode);
}

int flock(int fd, int operation) noexcept {
  static const auto real = refused::real<int (*)(int, int)>("flock");
  return refused::next("flock").error != 0 ? -1 : real(fd, operation);
}

ssize_t pread(int fd, void* to, std::size_t bytes, off_t offset) {
  static const auto real = refused::real<ssize_t (*)(int, void*, std::size_t, off_t)>("pread");
  const auto answer = refused::next("pread");
  return answer.error != 0 ? -1 : real(fd, to, std::min(bytes, answer.most_bytes), offset);
}

ssize_t pwrite(int fd, const void* from, std::size_t bytes, off_t offset) {
  static const auto real = refused::real<ssize_t (*)(int, const void*, std::size_t, off_t)>("pwrite");
  const auto answer = refused::next("pwrite");
  if (answer.error != 0) return -1;
  return answer.most_bytes == 0 ? 0 : real(fd, from, std::min(bytes, answer.most_bytes), offset);
}

int fsync(int fd) {
  static const auto real = refused::real<int (*)(int)>("fsync");
  return refused::next("fsync").error != 0 ? -1 : real(fd);
}

int msync(void* at, std::size_t bytes, int flags) {
  static const auto real = refused::real<int (*)(void*, std::size_t, int)>("msync");
  return refused::next("msync").error != 0 ? -1 : real(at, bytes, flags);
}

int fallocate(int fd, int mode, off_t offset, off_t bytes) {
  static const auto real = refused::real<int (*)(int, int, off_t, off_t)>("fallocate");
  return refused::next("fallocate").error != 0 ? -1 : real(fd, mode, offset, bytes);
}

int ftruncate(int fd, off_t bytes) noexcept {
  static const auto real = refused::real<int (*)(int, off_t)>("ftruncate");
  return refused::next("ftruncate").error != 0 ? -1 : real(fd, bytes);
}

off_t lseek(int fd, off_t offset, int whence) noexcept {
  static const auto real = refused::real<off_t (*)(int, off_t, int)>("lseek");
  return refused::next("lseek").error != 0 ? -1 : real(fd, offset, whence);
}

int fstat(int fd, struct stat* found) noexcept {
  static const auto real = refused::real<int (*)(int, struct stat*)>("fstat");
  return refused::next("fstat").error != 0 ? -1 : real(fd, found);
}

int mkdir(const char* path, mode_t mode) noexcept {
  static const auto real = refused::real<int (*)(const char*, mode_t)>("mkdir");
  return refused::next("mkdir").error != 0 ? -1 : real(path, mode);
}

int getrlimit(__rlimit_resource_t what, struct rlimit* limit) noexcept {
  static const auto real = refused::real<int (*)(__rlimit_resource_t, struct rlimit*)>("getrlimit");
  return refused::next("getrlimit").error != 0 ? -1 : real(what, limit);
}

void* mmap(void* at, std::size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
  static const auto real = refused::real<void* (*)(void*, std::size_t, int, int, int, off_t)>("mmap");
  return refused::next("mmap").error != 0 ? MAP_FAILED : real(at, bytes, protection, flags, fd, offset);
}

long syscall(long number, ...) noexcept {
  static const auto real = refused::real<long (*)(long, ...)>("syscall");
  va_list arguments;
  va_start(arguments, number);
  long a[6];
  for (long& argument : a) argument = va_arg(arguments, long);
  va_end(arguments);
  if (number == SYS_io_uring_setup && refused::next("io_uring_setup").error != 0) return -1;
  if (number == SYS_io_uring_enter && refused::next("io_uring_enter").error != 0) return -1;
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

}  // extern "C"
#pragma GCC visibility pop

namespace holdfast {
namespace {

using refused::Answer;
using Answers = std::map<std::string, std::deque<Answer>>;

constexpr std::size_t sector = format::sector_bytes;
constexpr std::size_t block = format::block_bytes;

// Runs `work` while calls end as said. All of them were made, and no file stays open that was not before.
template <class Work>
void where(Answers answers, const Work& work) {
  const auto num_open = [] {
    const std::filesystem::directory_iterator open("/proc/self/fd");
    return std::distance(begin(open), end(open));
  };
  const auto before = num_open();
  refused::answers() = std::move(answers);
  refused::is_on = true;
  work();
  refused::is_on = false;
  for (const auto& [name, left] : refused::answers()) {
    check::context += ", " + name;
    CHECK(left.empty());
    check::context.resize(check::context.size() - name.size() - 2);
  }
  CHECK(num_open() == before);
}

// What `work` says where calls end as said: an error of this kind, which names the file.
template <class Work>
std::string said_where(Answers answers, ErrorKind kind, const std::string& file, const Work& work) {
  std::string said;
  where(std::move(answers), [&] {
    try {
      work();
    } catch (const Error& error) {
      refused::is_on = false;
      said = error.what();
      CHECK(error.kind() == kind);
    }
  });
  check::context += ", which said '" + said + "'";
  CHECK(said.find(file) != std::string::npos);
  return said;
}

std::uint64_t bytes_on_disk(const std::string& path) {
  struct stat found{};
  CHECK(::stat(path.c_str(), &found) == 0);
  return static_cast<std::uint64_t>(found.st_blocks) * 512;
}

void errors_have_the_kinds_of_what_is_to_be_done(const std::string& directory) {
  const auto medium = open_mapped_medium(directory);
  const auto mapped = medium->create("kinds", 4 * block, Access::random);
  BlockFile::create(directory + "/block-kinds", 4 * block);
  BlockFile blocks(directory + "/block-kinds", Caching::buffered);
  BlockQueue queue(BlockQueue::Way::threads);
  const SectorBuffer buffer(block);
  const BlockWrite write{&blocks, 0, block, buffer.data()};
  for (const auto& [error, kind] : {std::pair{ENOSPC, ErrorKind::full},
                                    {EDQUOT, ErrorKind::full},
                                    {EROFS, ErrorKind::read_only},
                                    {EACCES, ErrorKind::read_only},
                                    {EPERM, ErrorKind::read_only},
                                    {EFBIG, ErrorKind::failed},
                                    {EMFILE, ErrorKind::failed},
                                    {EIO, ErrorKind::failed}}) {
    check::context = std::strerror(error);
    const std::string text = check::context;
    CHECK(said_where({{"fallocate", {{error}}}}, kind, "kinds", [&] { mapped->allocate(0, block); }).find(text) !=
          std::string::npos);
    said_where({{"fallocate", {{error}}}}, kind, "block-kinds", [&] { blocks.allocate(0, block); });
    said_where({{"pwrite", {{error}}}}, kind, "block-kinds", [&] { blocks.write(0, block, buffer.data()); });
    said_where({{"fsync", {{error}}}}, kind, directory, [&] { sync_directory(directory); });
    said_where({{"pwrite", {{error}}}}, kind, "block-kinds", [&] { queue.write_many({&write, 1}); });
  }
  check::context = "names";
  CHECK(kind_thrown_by([&] { medium->create("kinds", block, Access::random); }) == ErrorKind::exists);
  CHECK(kind_thrown_by([&] { medium->open("none", false, Access::random); }) == ErrorKind::not_found);
  CHECK(kind_thrown_by([&] { medium->rename("none", "other"); }) == ErrorKind::not_found);
  CHECK(kind_thrown_by([&] { medium->read_tail("none", 8, 8); }) == ErrorKind::not_found);
  CHECK(kind_thrown_by([&] { open_mapped_medium(directory + "/none"); }) == ErrorKind::not_found);
}

// Its target may be anybody's.
void nothing_is_written_through_a_symbolic_link(const std::string& directory) {
  check::context = "a symbolic link";
  const auto medium = open_mapped_medium(directory);
  medium->create("target", block, Access::random);
  std::filesystem::create_symlink("target", directory + "/link");
  const std::string said =
      said_where({}, ErrorKind::failed, "link", [&] { medium->open("link", true, Access::random); });
  CHECK(said.find("symbolic link") != std::string::npos);
  CHECK(medium->open("link", false, Access::random)->size() == block);
  CHECK(kind_thrown_by([&] { BlockFile(directory + "/link", Caching::buffered); }) == ErrorKind::failed);
}

void what_was_interrupted_or_done_in_part_is_carried_on(const std::string& directory) {
  check::context = "interrupted";
  const Answer interrupted{EINTR};
  const auto bytes = [](char value, std::size_t count) { return std::string(count, value); };
  const SectorBuffer buffer(4 * sector);
  std::memset(buffer.data(), 'b', buffer.size());

  const auto medium = open_mapped_medium(directory, Flushing::synced);
  const auto mapped = medium->create("carried", 2 * block, Access::random);
  where({{"fallocate", {interrupted, interrupted}}}, [&] { mapped->allocate(0, 2 * block); });
  CHECK(bytes_on_disk(directory + "/carried") >= 2 * block);
  const std::string text = bytes('m', 1000);
  where({{"pwrite", {interrupted, {0, 300}, interrupted}}}, [&] { mapped->write(7, text.data(), text.size()); });
  CHECK(std::memcmp(mapped->data() + 7, text.data(), text.size()) == 0);

  const std::string path = directory + "/block-carried";
  where({{"pwrite", {interrupted, {0, 5}}}}, [&] { BlockFile::create(path, 8 * sector, {buffer.data(), sector}); });
  BlockFile blocks(path, Caching::buffered);
  CHECK(blocks.size() == 9 * sector);
  where({{"fallocate", {interrupted}}}, [&] { blocks.allocate(0, 8 * sector); });
  where({{"pwrite", {interrupted, {0, 700}}}}, [&] { blocks.write(0, 4 * sector, buffer.data()); });

  const SectorBuffer found(4 * sector);
  for (const auto way : {BlockQueue::Way::threads, BlockQueue::Way::io_uring}) {
    BlockQueue queue(way);
    std::memset(found.data(), 0, found.size());
    const BlockRead read{&blocks, 0, 4 * sector, found.data()};
    Answers answers;
    if (queue.way() == BlockQueue::Way::io_uring) {
      answers["io_uring_enter"] = {interrupted, {EBUSY}, {EAGAIN}};
    } else {
      answers["pread"] = {interrupted, {0, 700}, {EAGAIN}};
    }
    where(answers, [&] { queue.read_many({&read, 1}); });
    CHECK(std::memcmp(found.data(), buffer.data(), 4 * sector) == 0);
  }
  BlockQueue queue(BlockQueue::Way::threads);
  const BlockRead tail{&blocks, 8 * sector, sector, found.data()};
  queue.read_many({&tail, 1});
  CHECK(std::memcmp(found.data(), buffer.data(), sector) == 0);
}

// Less than a sector is nothing that could be carried on.
void a_write_that_does_not_get_on_is_an_error(const std::string& directory) {
  check::context = "a write that does not get on";
  const SectorBuffer buffer(2 * sector);
  const std::string path = directory + "/stuck";
  said_where({{"pwrite", {{0, 0}}}}, ErrorKind::full, path,
             [&] { BlockFile::create(path, 8 * sector, {buffer.data(), sector}); });
  BlockFile blocks(path, Caching::buffered);
  said_where({{"pwrite", {{0, 100}}}}, ErrorKind::failed, path, [&] { blocks.write(0, sector, buffer.data()); });
  BlockQueue queue(BlockQueue::Way::threads);
  const BlockWrite write{&blocks, sector, sector, buffer.data()};
  const std::string said =
      said_where({{"pwrite", {{0, 100}}}}, ErrorKind::failed, path, [&] { queue.write_many({&write, 1}); });
  CHECK(said.find("offset 512") != std::string::npos);
  const auto medium = open_mapped_medium(directory, Flushing::synced);
  const auto mapped = medium->create("mapped-stuck", block, Access::random);
  said_where({{"pwrite", {{0, 0}}}}, ErrorKind::full, "mapped-stuck", [&] { mapped->write(0, "x", 1); });
  said_where({{"pwrite", {{EIO}}}}, ErrorKind::failed, "mapped-stuck", [&] { mapped->write(0, "x", 1); });
}

// A hole under a mapping would be a SIGBUS on a full disk.
void space_is_found_on_file_systems_without_fallocate(const std::string& directory) {
  check::context = "without fallocate";
  const auto medium = open_mapped_medium(directory);
  const std::string path = directory + "/found";
  const std::size_t bytes = (std::size_t{3} << 20) + 5;
  const auto file = medium->create("found", bytes, Access::random);
  std::memcpy(file->data() + 100, "kept", 4);
  const Answer unsupported{EOPNOTSUPP};
  where({{"fallocate", {unsupported}}, {"pread", {{EINTR}}}, {"pwrite", {{EINTR}, {0, 10}}}},
        [&] { file->allocate(0, bytes); });
  CHECK(bytes_on_disk(path) >= bytes);
  CHECK(std::memcmp(file->data() + 100, "kept", 4) == 0 && file->size() == bytes);
  said_where({{"fallocate", {unsupported}}, {"pread", {{EIO}}}}, ErrorKind::failed, path,
             [&] { file->allocate(0, bytes); });
  said_where({{"fallocate", {unsupported}}, {"pwrite", {{ENOSPC}}}}, ErrorKind::full, path,
             [&] { file->allocate(0, bytes); });
  said_where({{"fallocate", {unsupported}}, {"pwrite", {{0, 0}}}}, ErrorKind::full, path,
             [&] { file->allocate(0, bytes); });
  CHECK(std::memcmp(file->data() + 100, "kept", 4) == 0);
  where({}, [&] { file->allocate(0, 0); });
  BlockFile::create(directory + "/block-found", block);
  BlockFile blocks(directory + "/block-found", Caching::buffered);
  where({{"fallocate", {unsupported}}}, [&] { blocks.allocate(0, block); });
}

void where_holes_are_not_known_everything_is_data(const std::string& directory) {
  check::context = "holes";
  const auto medium = open_mapped_medium(directory);
  const auto file = medium->create("holes", 8 * block, Access::random);
  CHECK(file->next_data(0) == file->size());
  where({{"lseek", {{EINVAL}}}}, [&] { CHECK(file->next_data(block) == block); });
  BlockFile::create(directory + "/block-holes", 8 * block);
  const BlockFile blocks(directory + "/block-holes", Caching::buffered);
  CHECK(blocks.next_data(0) == blocks.size());
  where({{"lseek", {{EINVAL}}}}, [&] { CHECK(blocks.next_data(block) == block); });
  said_where({{"lseek", {{EIO}}}}, ErrorKind::failed, "block-holes at offset 4096",
             [&] { (void)blocks.next_data(block); });
}

void a_file_that_cannot_be_resized_is_as_it_was(const std::string& directory) {
  check::context = "resizing";
  const auto medium = open_mapped_medium(directory);
  const std::string path = directory + "/resized";
  const auto file = medium->create("resized", block, Access::random);
  std::memcpy(file->data(), "kept", 4);
  const auto is_as_it_was = [&] { return file->size() == block && std::memcmp(file->data(), "kept", 4) == 0; };
  said_where({{"ftruncate", {{ENOSPC}}}}, ErrorKind::full, path, [&] { file->resize(4 * block); });
  CHECK(is_as_it_was() && std::filesystem::file_size(path) == block);
  said_where({{"mmap", {{ENOMEM}}}}, ErrorKind::failed, path, [&] { file->resize(4 * block); });
  CHECK(is_as_it_was() && std::filesystem::file_size(path) == block);
  const std::string said = said_where({{"mmap", {{ENOMEM}}}, {"ftruncate", {{}, {EIO}}}}, ErrorKind::failed, path,
                                      [&] { file->resize(4 * block); });
  CHECK(said.find("stays as long") != std::string::npos);
  CHECK(is_as_it_was());
  file->resize(2 * block);
  CHECK(file->size() == 2 * block && std::memcmp(file->data(), "kept", 4) == 0);
}

void what_cannot_be_opened_stays_closed(const std::string& directory) {
  check::context = "opening";
  for (const auto flushing : {Flushing::mapped, Flushing::synced}) {
    const auto medium = open_mapped_medium(directory, flushing);
    const std::string name = flushing == Flushing::mapped ? "opened" : "opened-synced";
    const std::string path = directory + "/" + name;
    medium->create(name, block, Access::random);
    const auto open = [&] { medium->open(name, true, Access::random); };
    said_where({{"mmap", {{ENOMEM}}}}, ErrorKind::failed, path, open);
    said_where({{"fstat", {{EIO}}}}, ErrorKind::failed, path, open);
    said_where({{"ftruncate", {{EDQUOT}}}}, ErrorKind::full, path + "-new",
               [&] { medium->create(name + "-new", block, Access::random); });
    said_where({{"mkdir", {{EACCES}}}}, ErrorKind::read_only, directory + "/folder",
               [&] { medium->create("folder/" + name, block, Access::random); });
    said_where({{"pread", {{EIO}}}}, ErrorKind::failed, path, [&] { medium->read_tail(name, 8, 8); });
    said_where({{"mmap", {{ENOMEM}}}}, ErrorKind::failed, "addresses",
               [&] { medium->open_joined({{name, 0, block, block}}, block, true, Access::random); });
  }
  BlockFile::create(directory + "/block-opened", block);
  said_where({{"fstat", {{EIO}}}}, ErrorKind::failed, "block-opened",
             [&] { BlockFile(directory + "/block-opened", Caching::buffered); });
}

void a_sync_that_fails_says_so(const std::string& directory) {
  check::context = "syncing";
  const auto medium = open_mapped_medium(directory, Flushing::synced);
  const auto file = medium->create("synced", block, Access::random);
  said_where({{"msync", {{EIO}}}}, ErrorKind::failed, "synced", [&] { file->sync(); });
  said_where({{"fsync", {{EIO}}}}, ErrorKind::failed, "synced", [&] { file->sync(); });
  said_where({{"msync", {{EIO}}}}, ErrorKind::failed, directory, [&] { medium->flush(file->data() + 8, 8); });
  where({}, [&] { medium->flush(file->data(), 0); });
  const auto reading = medium->open("synced", false, Access::random);
  refused::answers() = {{"fsync", {{EIO}}}};
  refused::is_on = true;
  reading->sync();  // of a file that nobody writes here: no call
  refused::is_on = false;
  CHECK(refused::answers()["fsync"].size() == 1);
}

void what_direct_io_refuses_goes_through_the_cache(const std::string& directory) {
  check::context = "direct writes";
  const auto medium = open_mapped_medium(directory, Flushing::synced);
  const auto file = medium->create("direct", 4 * block, Access::random);
  file->sync();
  const SectorBuffer buffer(2 * block);
  std::memset(buffer.data(), 'd', buffer.size());
  const int direct = ::open((directory + "/direct").c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC);
  const bool has_direct = direct >= 0;
  if (has_direct) ::close(direct);
  if (has_direct) where({{"pwrite", {{EINVAL}}}}, [&] { file->write(block, buffer.data(), 2 * block); });
  CHECK(!has_direct || std::memcmp(file->data() + block, buffer.data(), 2 * block) == 0);
  said_where({{"pwrite", {{EINVAL}}}}, ErrorKind::failed, "direct", [&] { file->write(1, buffer.data(), 3); });
}

void joined_files_are_one_and_keep_their_sizes(const std::string& directory) {
  check::context = "joined files";
  const auto medium = open_mapped_medium(directory);
  medium->create("first", block, Access::random);
  std::memcpy(medium->create("second", 2 * block, Access::random)->data() + block, "data", 4);
  const std::vector<JoinedPiece> pieces{{"first", block, block, block}, {"second", 4 * block, 2 * block, 2 * block}};
  const auto joined = medium->open_joined(pieces, 8 * block, true, Access::random);
  CHECK(joined->next_data(0) == 5 * block && joined->next_data(5 * block + 1) == 5 * block + 1);
  CHECK(joined->next_data(6 * block) == joined->size());
  CHECK(joined->place(4 * block + 9) == directory + "/second at offset 9");
  joined->write(4 * block, "more", 4);
  joined->allocate(4 * block, 0);
  joined->allocate(4 * block, 3 * block);  // as far as the piece goes
  joined->sync();
  CHECK(bytes_on_disk(directory + "/second") >= 2 * block && bytes_on_disk(directory + "/first") == 0);
  CHECK(std::memcmp(medium->open("second", false, Access::random)->data(), "more", 4) == 0);
  for (const std::size_t offset : {std::size_t{0}, 2 * block, 6 * block, 100 * block}) {
    CHECK(kind_thrown_by([&] { joined->allocate(offset, 1); }) == ErrorKind::config);
  }
  CHECK(kind_thrown_by([&] { joined->resize(block); }) == ErrorKind::config);
  const std::vector<JoinedPiece> grown{{"first", 0, block, 2 * block}};
  said_where({}, ErrorKind::corrupted, "first: 4096 bytes, it needs 8192",
             [&] { medium->open_joined(grown, block, true, Access::random); });
  CHECK(medium->open_joined({}, 0, true, Access::random)->size() == 0);
}

void a_lock_that_cannot_be_had_says_why(const std::string& directory) {
  check::context = "locks";
  const std::string path = directory + "/locked";
  CHECK(kind_thrown_by([&] { PoolLock{path}; }) == ErrorKind::not_found);
  std::filesystem::create_directory(path);
  const auto lock = [&] { PoolLock{path}; };
  for (const auto& [error, kind] : {std::pair{EROFS, ErrorKind::read_only},
                                    {EACCES, ErrorKind::read_only},
                                    {EPERM, ErrorKind::read_only},
                                    {EMFILE, ErrorKind::failed}}) {
    said_where({{"open", {{error}}}}, kind, path + "/lock", lock);
  }
  said_where({{"open", {{EROFS}}}}, ErrorKind::read_only, "the pool needs write access", lock);
  said_where({{"flock", {{ENOLCK}}}}, ErrorKind::failed, path + "/lock", lock);
  where({{"ftruncate", {{EIO}}}}, lock);  // nothing but a message rests on what it says
  where({{"pwrite", {{EIO}}}}, lock);
  auto held = std::make_unique<PoolLock>(path);
  held->check();
  said_where({{"fstat", {{EIO}}}}, ErrorKind::failed, "lock: Input/output error; the device failed",
             [&] { held->check(); });  // which is no removal
  said_where({}, ErrorKind::busy, "in this process already", lock);
  // Another process finds it busy, too, and is told whose it is where that can be read.
  const auto as_child = [&](const Answers& answers, const std::string& words) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      held.reset();  // what is inherited of it
      try {
        refused::answers() = answers;
        refused::is_on = true;
        const PoolLock mine(path);
      } catch (const Error& error) {
        const bool is_right =
            error.kind() == ErrorKind::busy && std::string(error.what()).find(words) != std::string::npos;
        ::_exit(is_right ? 0 : 1);
      }
      ::_exit(2);
    }
    int status = -1;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
  };
  as_child({}, "in process " + std::to_string(::getpid()));
  as_child({{"pread", {{EIO}}}}, "in process (unknown)");
  held.reset();
  const int shared = ::open((path + "/lock").c_str(), O_RDONLY | O_CLOEXEC);
  CHECK(shared >= 0 && ::flock(shared, LOCK_SH) == 0);
  as_child({}, "is being read");  // the number in the file is that of a writer that is gone
  ::close(shared);
  held = std::make_unique<PoolLock>(path);
  std::filesystem::remove(path + "/lock");
  said_where({}, ErrorKind::failed, "was removed while the pool was open", [&] { held->check(); });
  PoolLock{path};
}

// A mark that is not durable would let trained rows pass for unpublished ones, or the other way round.
void a_mark_that_is_not_durable_is_an_error(const std::string& directory) {
  check::context = "marks";
  const std::string path = directory + "/marked";
  std::filesystem::create_directory(path);
  const auto mark = [&] { mark_unpublished(path); };
  for (const auto& [error, kind] : {std::pair{ENOSPC, ErrorKind::full},
                                    {EDQUOT, ErrorKind::full},
                                    {EROFS, ErrorKind::read_only},
                                    {EACCES, ErrorKind::read_only},
                                    {EPERM, ErrorKind::read_only},
                                    {EIO, ErrorKind::failed}}) {
    said_where({{"open", {{error}}}}, kind, path + "/unpublished", mark);
    said_where({{"pwrite", {{error}}}}, kind, path + "/unpublished", mark);
    said_where({{"fsync", {{error}}}}, kind, path + "/unpublished", mark);
    said_where({{"fsync", {{}, {error}}}}, kind, path, mark);  // of the directory
  }
  said_where({{"pwrite", {{0, 10}}}}, ErrorKind::full, path + "/unpublished", mark);
  mark();
  said_where({{"fsync", {{EIO}}}}, ErrorKind::failed, path, [&] { mark_published(path); });
  CHECK(!is_unpublished(path));
}

void a_queue_has_threads_where_the_kernel_gives_no_ring(const std::string& directory) {
  check::context = "rings";
  BlockFile::create(directory + "/ringed", block);
  const BlockFile file(directory + "/ringed", Caching::buffered);
  const SectorBuffer buffer(block);
  const BlockRead read{&file, 0, block, buffer.data()};
  const auto way_where = [&](const Answers& answers) {
    auto way = BlockQueue::Way::io_uring;
    where(answers, [&] {
      BlockQueue queue;
      way = queue.way();
      queue.read_many({&read, 1});
    });
    return way;
  };
  if (BlockQueue().way() == BlockQueue::Way::io_uring) {
    CHECK(way_where({{"io_uring_setup", {{EINVAL}}}}) == BlockQueue::Way::io_uring);  // an older kernel
    for (std::size_t passed = 0; passed < 3; ++passed) {
      std::deque<Answer> maps(passed);
      maps.push_back({ENOMEM});
      CHECK(way_where({{"mmap", maps}}) == BlockQueue::Way::threads);
    }
  }
  CHECK(way_where({{"io_uring_setup", {{EPERM}}}}) == BlockQueue::Way::threads);
  CHECK(way_where({{"io_uring_setup", {{EINVAL}, {EINVAL}}}}) == BlockQueue::Way::threads);
}

void as_many_files_as_the_system_lets_may_be_open() {
  check::context = "limits";
  struct rlimit before{};
  CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
  const struct rlimit few{before.rlim_max / 2, before.rlim_max};
  CHECK(::setrlimit(RLIMIT_NOFILE, &few) == 0);
  struct rlimit now{};
  where({{"getrlimit", {{EPERM}}}}, [] { allow_many_files(); });
  CHECK(::getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == few.rlim_cur);
  for (int time = 0; time < 2; ++time) {
    allow_many_files();
    CHECK(::getrlimit(RLIMIT_NOFILE, &now) == 0 && now.rlim_cur == before.rlim_max);
  }
  CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  check::seed_from(argc, argv);
  const TemporaryDirectory memory;
  const TemporaryDirectory disk(TemporaryDirectory::Place::disk);
  for (const TemporaryDirectory* directory : {&memory, &disk}) {
    const std::string& path = directory->path();
    errors_have_the_kinds_of_what_is_to_be_done(path);
    nothing_is_written_through_a_symbolic_link(path);
    what_was_interrupted_or_done_in_part_is_carried_on(path);
    a_write_that_does_not_get_on_is_an_error(path);
    space_is_found_on_file_systems_without_fallocate(path);
    where_holes_are_not_known_everything_is_data(path);
    a_file_that_cannot_be_resized_is_as_it_was(path);
    what_cannot_be_opened_stays_closed(path);
    a_sync_that_fails_says_so(path);
    what_direct_io_refuses_goes_through_the_cache(path);
    joined_files_are_one_and_keep_their_sizes(path);
    a_queue_has_threads_where_the_kernel_gives_no_ring(path);
    a_lock_that_cannot_be_had_says_why(path);
    a_mark_that_is_not_durable_is_an_error(path);
  }
  as_many_files_as_the_system_lets_may_be_open();
  return check::passed();
}

// Block files and the queue: what is read is what was written, by io_uring and by threads, past the page cache and
// through it; and what must not be done is refused.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "media/block_file.h"
#include "media/block_queue.h"
#include "temporary_directory.h"
#include "thrown.h"

namespace holdfast {
namespace {

constexpr std::size_t sector = format::sector_bytes;
constexpr std::size_t file_sectors = 4096;

// The file, and what it should hold.
struct Subject {
  std::unique_ptr<BlockFile> file;
  std::vector<std::byte> expected;
};

Subject make_subject(const std::string& path, Caching caching, std::mt19937_64& random) {
  BlockFile::create(path, file_sectors * sector);
  Subject subject{std::make_unique<BlockFile>(path, caching), std::vector<std::byte>(file_sectors * sector)};
  const SectorBuffer buffer(file_sectors / 2 * sector);
  for (std::size_t i = 0; i < buffer.size(); ++i) buffer.data()[i] = static_cast<std::byte>(random());
  std::memcpy(subject.expected.data(), buffer.data(), buffer.size());  // the second half stays a hole
  subject.file->write(0, buffer.size(), buffer.data());
  return subject;
}

void random_reads_see_what_was_written(const Subject& subject, BlockQueue& queue, std::mt19937_64& random) {
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{7}, std::size_t{3000}}) {
    std::vector<BlockRead> reads;
    const SectorBuffer buffer(count * 8 * sector);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t sectors = 1 + random() % 8;
      const std::size_t first = random() % (file_sectors - sectors);
      reads.push_back({subject.file.get(), first * sector, sectors * sector, buffer.data() + i * 8 * sector});
    }
    queue.read_many(reads);
    for (const BlockRead& read : reads) {
      CHECK(std::memcmp(read.dst, subject.expected.data() + read.offset, read.bytes) == 0);
    }
  }
}

void random_writes_are_read_back(Subject& subject, BlockQueue& queue, std::mt19937_64& random) {
  const SectorBuffer buffer(file_sectors * sector);
  std::vector<BlockWrite> writes;
  for (std::size_t first = random() % 8; first + 8 < file_sectors; first += 8 + random() % 16) {
    const std::size_t bytes = (1 + random() % 8) * sector;
    std::byte* data = buffer.data() + first * sector;
    for (std::size_t i = 0; i < bytes; ++i) data[i] = static_cast<std::byte>(random());
    std::memcpy(subject.expected.data() + first * sector, data, bytes);
    writes.push_back({subject.file.get(), first * sector, bytes, data});
  }
  queue.write_many(writes);
  subject.file->sync();
  const SectorBuffer all(file_sectors * sector);
  const BlockRead read{subject.file.get(), 0, all.size(), all.data()};
  queue.read_many({&read, 1});
  CHECK(std::memcmp(all.data(), subject.expected.data(), all.size()) == 0);
}

void what_is_no_whole_sectors_is_refused(const Subject& subject, BlockQueue& queue) {
  const SectorBuffer buffer(4 * sector);
  for (const BlockRead& read : {BlockRead{subject.file.get(), 1, sector, buffer.data()},
                                BlockRead{subject.file.get(), 0, sector - 1, buffer.data()},
                                BlockRead{subject.file.get(), 0, sector, buffer.data() + 8}}) {
    CHECK(kind_thrown_by([&] { queue.read_many({&read, 1}); }) == ErrorKind::config);
    CHECK(kind_thrown_by([&] { subject.file->write(read.offset, read.bytes, read.dst); }) == ErrorKind::config);
  }
}

void a_file_that_ends_early_is_corrupted_and_named(const Subject& subject, BlockQueue& queue) {
  const SectorBuffer buffer(4 * sector);
  for (const std::uint64_t first : {file_sectors - 2, file_sectors, 2 * file_sectors}) {
    const BlockRead reads[2] = {{subject.file.get(), 0, sector, buffer.data()},
                                {subject.file.get(), first * sector, 3 * sector, buffer.data() + sector}};
    CHECK(kind_thrown_by([&] { queue.read_many(reads); }) == ErrorKind::corrupted);
    try {
      queue.read_many(reads);
    } catch (const Error& error) {
      const std::uint64_t end = std::max<std::uint64_t>(first, file_sectors) * sector;
      CHECK(std::string(error.what()).find(subject.file->place(end)) != std::string::npos);
    }
  }
}

void threads_read_at_once(const Subject& subject, BlockQueue& queue, std::uint64_t seed) {
  std::vector<std::thread> threads;
  for (std::uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(seed + t);
      random_reads_see_what_was_written(subject, queue, random);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void reads_are_whole_beside_forks(const Subject& subject, BlockQueue& queue, std::mt19937_64& random) {
  std::atomic<bool> is_over{false};
  std::thread forks([&] {
    while (!is_over) {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(0);
      CHECK(child > 0 && ::waitpid(child, nullptr, 0) == child);
    }
  });
  for (int i = 0; i < 3; ++i) random_reads_see_what_was_written(subject, queue, random);
  is_over = true;
  forks.join();
}

void everything(const std::string& directory, Caching caching, BlockQueue::Way way, std::mt19937_64& random) {
  BlockQueue queue(way);
  if (way == BlockQueue::Way::threads) CHECK(queue.way() == BlockQueue::Way::threads);
  const std::string path = directory + "/file";
  Subject subject = make_subject(path, caching, random);
  random_reads_see_what_was_written(subject, queue, random);
  random_writes_are_read_back(subject, queue, random);
  threads_read_at_once(subject, queue, random());
  reads_are_whole_beside_forks(subject, queue, random);
  what_is_no_whole_sectors_is_refused(subject, queue);
  a_file_that_ends_early_is_corrupted_and_named(subject, queue);
  random_reads_see_what_was_written(subject, queue, random);  // errors leave the queue in order
  subject.file.reset();
  std::filesystem::remove(path);
}

bool is_mapped(const void* address) {
  unsigned char resident;
  return ::mincore(const_cast<void*>(address), format::block_bytes, &resident) == 0 || errno != ENOMEM;
}

// Else a page might be shared with the child while the device writes to it, and the parent be left with a copy.
void the_child_of_a_fork_does_not_have_the_buffers() {
  const std::array buffers{SectorBuffer(sector), SectorBuffer(std::size_t{1} << 20),
                           SectorBuffer(std::size_t{5} << 20)};
  for (const SectorBuffer& buffer : buffers) std::memset(buffer.data(), 1, buffer.size());
  const pid_t child = ::fork();
  CHECK(child >= 0);
  if (child == 0) {
    ::_exit(std::ranges::any_of(buffers, [](const SectorBuffer& buffer) { return is_mapped(buffer.data()); }) ? 1 : 0);
  }
  int status = -1;
  CHECK(::waitpid(child, &status, 0) == child && status == 0);
  for (const SectorBuffer& buffer : buffers) CHECK(is_mapped(buffer.data()));
}

// Fails when it is told to.
class Failing final : public BlockWatcher {
 public:
  void before_read(const BlockFile&) override {}
  void before_write(const BlockFile&, std::uint64_t, std::span<const std::byte>) override {
    if (writes_fail) throw Error(ErrorKind::full, "no space");
  }
  void before_sync(const BlockFile&) override { ++num_syncs; }
  void after_sync(const BlockFile&) override {}
  bool writes_fail = false;
  int num_syncs = 0;
};

void files_open_and_fail_as_they_should(const std::string& directory) {
  const std::string path = directory + "/other";
  CHECK(kind_thrown_by([&] { BlockFile(path, Caching::buffered); }) == ErrorKind::not_found);
  BlockFile::create(path, 8 * sector);
  CHECK(kind_thrown_by([&] { BlockFile::create(path, 8 * sector); }) == ErrorKind::exists);
  Failing failing;
  BlockFile file(path, Caching::buffered, &failing);
  CHECK(file.size() == 8 * sector && file.name() == path);
  file.allocate(0, 8 * sector);
  const SectorBuffer buffer(sector);
  std::memset(buffer.data(), 1, buffer.size());
  BlockQueue queue;
  const BlockWrite write{&file, 0, sector, buffer.data()};
  failing.writes_fail = true;
  CHECK(kind_thrown_by([&] { file.write(0, sector, buffer.data()); }) == ErrorKind::full);
  CHECK(kind_thrown_by([&] { queue.write_many({&write, 1}); }) == ErrorKind::full);
  failing.writes_fail = false;
  queue.write_many({&write, 1});
  file.sync();
  CHECK(failing.num_syncs == 1);
}

// A pipe cannot be synced: the simplest sync that fails.
void after_a_failed_sync_everything_is_refused(const std::string& directory) {
  const std::string path = directory + "/pipe";
  CHECK(::mkfifo(path.c_str(), 0600) == 0);
  BlockFile file(path, Caching::buffered);
  CHECK(kind_thrown_by([&] { file.sync(); }) == ErrorKind::failed);
  const SectorBuffer buffer(sector);
  CHECK(kind_thrown_by([&] { file.sync(); }) == ErrorKind::failed);
  CHECK(kind_thrown_by([&] { file.write(0, sector, buffer.data()); }) == ErrorKind::failed);
  BlockQueue queue;
  const BlockRead read{&file, 0, sector, buffer.data()};
  CHECK(kind_thrown_by([&] { queue.read_many({&read, 1}); }) == ErrorKind::failed);
}

bool takes_direct_io(const std::string& directory) {
  const std::string path = directory + "/probe";
  BlockFile::create(path, 8 * sector);
  const BlockFile file(path, Caching::direct);
  return file.reads_device() && file.unit_bytes() == sector;
}

void a_file_of_blocks_takes_whole_blocks(const std::string& directory) {
  const std::string path = directory + "/blocks";
  BlockFile::create(path, 4 * format::block_bytes);
  BlockFile file(path, Caching::buffered_blocks);
  CHECK(file.unit_bytes() == format::block_bytes);
  const SectorBuffer buffer(2 * format::block_bytes);
  std::memset(buffer.data(), 1, buffer.size());
  const auto refuses = [&](std::size_t offset, std::size_t bytes) {
    return kind_thrown_by([&] { file.write(offset, bytes, buffer.data()); }) == ErrorKind::config;
  };
  CHECK(refuses(sector, format::block_bytes));
  CHECK(refuses(0, sector));
  CHECK(kind_thrown_by([&] { file.write(0, format::block_bytes, buffer.data() + sector); }) == ErrorKind::config);
  file.write(format::block_bytes, format::block_bytes, buffer.data());
}

void threads_that_ended_keep_no_descriptor(const std::string& directory) {
  const std::string path = directory + "/read by many";
  BlockFile::create(path, format::block_bytes);
  const BlockFile file(path, Caching::buffered);
  BlockQueue queue(BlockQueue::Way::io_uring);
  const auto descriptors = [] {
    return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), std::filesystem::directory_iterator());
  };
  const auto read = [&] {
    const SectorBuffer buffer(format::block_bytes);
    queue.read_range(file, 0, buffer.size(), buffer.data());
  };
  std::thread(read).join();
  const auto had = descriptors();
  for (int i = 0; i < 20; ++i) std::thread(read).join();
  CHECK(descriptors() <= had);
  std::atomic<int> waiting = 0;
  std::vector<std::thread> together;
  for (int i = 0; i < 3; ++i) {
    together.emplace_back([&] {
      read();
      for (++waiting; waiting < 3;) std::this_thread::yield();
      read();  // each with its own still
    });
  }
  for (std::thread& thread : together) thread.join();
  std::thread(read).join();
  CHECK(descriptors() <= had);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  std::mt19937_64 random(check::seed_from(argc, argv));
  const TemporaryDirectory memory;
  const TemporaryDirectory disk(TemporaryDirectory::Place::disk);
  for (const auto way : {BlockQueue::Way::io_uring, BlockQueue::Way::threads}) {
    check::context = way == BlockQueue::Way::threads ? "buffered, threads" : "buffered, io_uring";
    everything(memory.path(), Caching::buffered, way, random);
    check::context = way == BlockQueue::Way::threads ? "direct, threads" : "direct, io_uring";
    if (takes_direct_io(disk.path())) everything(disk.path(), Caching::direct, way, random);
    std::filesystem::remove(disk.path() + "/probe");
  }
  check::context = "memory";
  the_child_of_a_fork_does_not_have_the_buffers();
  check::context = "one file";
  files_open_and_fail_as_they_should(memory.path());
  a_file_of_blocks_takes_whole_blocks(memory.path());
  after_a_failed_sync_everything_is_refused(memory.path());
  threads_that_ended_keep_no_descriptor(memory.path());
  return check::passed();
}

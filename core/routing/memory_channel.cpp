#include "routing/memory_channel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>

namespace holdfast {
namespace {

constexpr std::uint64_t kMagic = 0x31'4c'4e'48'43'44'4c'48;  // "HLDCHNL1"
constexpr std::size_t kLength = sizeof(std::uint64_t);       // before each message
constexpr std::int64_t kNone = -1;
constexpr int kSpins = 500;  // some ten microseconds, about what going to sleep costs
constexpr auto kLook = std::chrono::milliseconds(50);  // how often a reader looks whether the writer still is
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::size_t room_for(std::size_t size) { return kLength + (size + kLength - 1) / kLength * kLength; }

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* wait) {
  return syscall(SYS_futex, &word, operation, value, wait, nullptr, 0);
}

}  // namespace

// Memory of a channel, mapped: a header, and a ring of `capacity` bytes, a power of two.
class ChannelMemory {
 public:
  struct Header {
    std::uint64_t magic, token, capacity;
    // The writer's.
    alignas(64) std::atomic<std::uint64_t> written;  // bytes, since the beginning
    std::atomic<std::uint32_t> bell;                 // changes with each of the others here
    std::atomic<std::uint32_t> closed;
    std::atomic<std::int64_t> next;  // the descriptor of the memory that comes after this one
    // The reader's.
    alignas(64) std::atomic<std::uint64_t> taken;
    std::atomic<std::uint32_t> sleeps;
    std::atomic<std::uint32_t> left;
  };
  static constexpr std::size_t kHeader = 4096;
  static_assert(sizeof(Header) <= kHeader && std::atomic<std::uint64_t>::is_always_lock_free);

  // A writer's, new.
  ChannelMemory(std::size_t capacity, std::uint64_t token) : capacity_(capacity) {
    descriptor_ = memfd_create("holdfast-channel", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (descriptor_ < 0) fail("memory for a channel between ranks");
    if (ftruncate(descriptor_, static_cast<off_t>(kHeader + capacity_)) != 0 ||
        fcntl(descriptor_, F_ADD_SEALS, kSeals) != 0 || !map()) {
      const int error = errno;
      ::close(descriptor_);
      errno = error;
      fail("memory for a channel between ranks");
    }
    header().token = token;
    header().capacity = capacity_;
    header().next.store(kNone);
    header().magic = kMagic;
  }

  // A reader's, of the writer's.
  explicit ChannelMemory(const ChannelAddress& address) {
    const std::string path = "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
    descriptor_ = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (descriptor_ < 0) fail(path);
    struct stat status{};
    const bool is_sealed = (fcntl(descriptor_, F_GET_SEALS) & kSeals) == kSeals;
    if (is_sealed && fstat(descriptor_, &status) == 0 && status.st_size > static_cast<off_t>(kHeader)) {
      capacity_ = static_cast<std::size_t>(status.st_size) - kHeader;
    }
    const bool is_mapped = std::has_single_bit(capacity_) && map();
    ::close(std::exchange(descriptor_, -1));
    if (is_mapped && header().magic == kMagic && header().token == address.token && header().capacity == capacity_) {
      return;
    }
    if (is_mapped) munmap(base_, kHeader + capacity_);
    throw std::runtime_error(path + " is not the channel that it should be");
  }

  ~ChannelMemory() {
    munmap(base_, kHeader + capacity_);
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  ChannelMemory(const ChannelMemory&) = delete;
  ChannelMemory& operator=(const ChannelMemory&) = delete;

  Header& header() { return *reinterpret_cast<Header*>(base_); }
  std::size_t capacity() const { return capacity_; }
  int descriptor() const { return descriptor_; }

  void put(std::uint64_t position, const void* data, std::size_t size) {
    const std::size_t begin = position & (capacity_ - 1);
    const std::size_t first = std::min(size, capacity_ - begin);
    std::memcpy(ring() + begin, data, first);
    if (size > first) std::memcpy(ring(), static_cast<const char*>(data) + first, size - first);
  }

  void get(std::uint64_t position, void* data, std::size_t size) {
    const std::size_t begin = position & (capacity_ - 1);
    const std::size_t first = std::min(size, capacity_ - begin);
    std::memcpy(data, ring() + begin, first);
    if (size > first) std::memcpy(static_cast<char*>(data) + first, ring(), size - first);
  }

  void ring_bell() {
    header().bell.fetch_add(1);
    if (header().sleeps.load() != 0) futex(header().bell, FUTEX_WAKE, 1, nullptr);
  }

 private:
  bool map() {
    void* mapped = mmap(nullptr, kHeader + capacity_, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    base_ = mapped == MAP_FAILED ? nullptr : static_cast<char*>(mapped);
    return base_ != nullptr;
  }
  char* ring() { return base_ + kHeader; }

  std::size_t capacity_ = 0;
  int descriptor_ = -1;
  char* base_ = nullptr;
};

ChannelWriter::ChannelWriter(std::size_t capacity)
    : process_(getpid()),
      token_((std::uint64_t{std::random_device{}()} << 32) | std::random_device{}()),
      memory_(std::make_unique<ChannelMemory>(std::bit_ceil(capacity), token_)) {}

ChannelWriter::~ChannelWriter() { close(); }

ChannelAddress ChannelWriter::address() const { return {process_, memory_->descriptor(), token_}; }

void ChannelWriter::send(const void* data, std::size_t size) {
  let_go_of_what_was_left();
  const std::size_t room = room_for(size);
  const std::uint64_t written = memory_->header().written.load(std::memory_order_relaxed);
  const std::uint64_t untaken = written - memory_->header().taken.load(std::memory_order_acquire);
  const bool fits = untaken <= memory_->capacity() && room <= memory_->capacity() - untaken;
  if (!fits) go_on_with(std::bit_ceil(std::max(2 * room, 2 * memory_->capacity())));
  auto& header = memory_->header();
  const std::uint64_t position = fits ? written : 0;
  const std::uint64_t length = size;
  memory_->put(position, &length, kLength);
  if (size != 0) memory_->put(position + kLength, data, size);
  header.written.store(position + room, std::memory_order_release);
  memory_->ring_bell();
}

void ChannelWriter::go_on_with(std::size_t capacity) {
  auto next = std::make_unique<ChannelMemory>(capacity, token_);
  memory_->header().next.store(next->descriptor(), std::memory_order_release);
  memory_->ring_bell();
  older_.push_back(std::exchange(memory_, std::move(next)));
}

void ChannelWriter::let_go_of_what_was_left() {
  std::erase_if(older_, [](const auto& memory) { return memory->header().left.load(std::memory_order_acquire) != 0; });
}

void ChannelWriter::close() noexcept {
  if (getpid() != process_) return;
  memory_->header().closed.store(1, std::memory_order_release);
  memory_->ring_bell();
}

ChannelReader::ChannelReader(const ChannelAddress& address) : address_(address) {
  process_ = static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(address.process), 0));
  if (process_ < 0) fail("process " + std::to_string(address.process));
  try {
    memory_ = std::make_unique<ChannelMemory>(address);
  } catch (...) {
    ::close(process_);
    throw;
  }
}

ChannelReader::~ChannelReader() { ::close(process_); }

Reception ChannelReader::receive(void* data, std::size_t size, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto ends = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (int spin = 0;;) {
    auto& header = memory_->header();
    const std::uint32_t bell = header.bell.load(std::memory_order_acquire);
    if (take(data, size)) return Reception::received;
    if (header.next.load(std::memory_order_acquire) != kNone) {
      if (take(data, size)) return Reception::received;  // it was written before there was a next
      if (!go_on()) return Reception::gone;
      continue;
    }
    if (header.closed.load(std::memory_order_acquire) != 0) {
      return take(data, size) ? Reception::received : Reception::gone;
    }
    if (seconds <= 0.0) return Reception::not_yet;
    if (++spin < kSpins) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      continue;
    }
    const auto left = ends - Clock::now();
    if (left <= Clock::duration::zero()) return Reception::not_yet;
    const auto ns =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::min<Clock::duration>(left, kLook)).count();
    const timespec wait = {ns / 1'000'000'000, ns % 1'000'000'000};
    header.sleeps.store(1);
    const bool is_over = futex(header.bell, FUTEX_WAIT, bell, &wait) != 0 && errno == ETIMEDOUT;
    header.sleeps.store(0);
    if (is_over && has_ended()) return take(data, size) ? Reception::received : Reception::gone;
  }
}

bool ChannelReader::take(void* data, std::size_t size) {
  auto& header = memory_->header();
  const std::uint64_t untaken = header.written.load(std::memory_order_acquire) - taken_;
  if (untaken == 0) return false;
  std::uint64_t length = 0;
  memory_->get(taken_, &length, kLength);
  const std::size_t room = room_for(size);
  if (length != size || untaken < room || untaken > memory_->capacity()) {
    throw std::runtime_error("a message of " + std::to_string(length) + " bytes where " + std::to_string(size) +
                             " were to come: the ranks do not make the same calls");
  }
  if (size != 0) memory_->get(taken_ + kLength, data, size);
  taken_ += room;
  header.taken.store(taken_, std::memory_order_release);
  return true;
}

bool ChannelReader::go_on() {
  const ChannelAddress next = {address_.process, memory_->header().next.load(std::memory_order_acquire),
                               address_.token};
  try {
    auto memory = std::make_unique<ChannelMemory>(next);
    memory_->header().left.store(1, std::memory_order_release);
    memory_ = std::move(memory);
  } catch (const std::runtime_error&) {
    if (has_ended()) return false;
    throw;
  }
  taken_ = 0;
  return true;
}

bool ChannelReader::has_ended() const {
  pollfd process = {process_, POLLIN, 0};
  return poll(&process, 1, 0) > 0;
}

}  // namespace holdfast

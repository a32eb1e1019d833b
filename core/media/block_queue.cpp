#include "media/block_queue.h"

#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/native_thread.h"
#include "base/system_error.h"

#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace holdfast {
namespace {

constexpr std::size_t request_bytes = std::size_t{256} << 10;  // of a long range

// A read or write on its way.
struct Transfer {
  const BlockFile* file;
  std::uint64_t offset;
  std::size_t bytes;
  std::byte* memory;
  bool is_write;
  std::size_t done = 0;
  int error = 0;  // errno; ENODATA: the file ended

  bool finished() const { return done == bytes || error != 0; }

  // Takes what a system call said: bytes, or a negative errno. A short one is carried on from its last whole unit.
  void advance(std::int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return;
    if (result < 0) {
      error = static_cast<int>(-result);
      return;
    }
    const auto moved = static_cast<std::size_t>(result);
    const std::size_t unit = file->unit_bytes();
    const std::size_t whole = done + moved == bytes ? moved : moved / unit * unit;
    done += whole;
    if (whole == 0) error = is_write ? EIO : ENODATA;
  }

  [[noreturn]] void fail() const {
    const std::string what = (is_write ? "writing " : "reading ") + file->place(offset + done);
    if (error == ENODATA && !is_write) throw Error(ErrorKind::corrupted, what + ": the file ends too early");
    throw_errno(what, error);
  }
};

// What the transfers ask of each dialled medium that their files lie on, all of which work at a time.
class DialServices {
 public:
  explicit DialServices(std::span<const Transfer> transfers) {
    std::vector<std::pair<Dial*, DialWork>> works;
    for (const Transfer& transfer : transfers) {
      Dial* const dial = transfer.file->dial();
      if (dial == nullptr) continue;
      auto found = std::ranges::find(works, dial, &std::pair<Dial*, DialWork>::first);
      if (found == works.end()) found = works.insert(works.end(), {dial, DialWork{}});
      if (transfer.is_write) {
        dial->add_writes(found->second, 1, transfer.bytes);
      } else {
        dial->add_reads(found->second, 1, transfer.bytes);
      }
    }
    for (const auto& [dial, work] : works) services_.emplace_back(dial, work);
  }
  void finish() {
    for (DialService& service : services_) service.finish();
  }

 private:
  std::vector<DialService> services_;
};

// One io_uring. Used by one thread.
class Ring {
 public:
  // Nothing where the kernel refuses.
  static std::unique_ptr<Ring> make() {
    for (const unsigned flags : {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN, 0U}) {
      io_uring_params params{};
      params.flags = flags;
      const long fd = ::syscall(SYS_io_uring_setup, BlockQueue::depth, &params);
      if (fd >= 0) {
        std::unique_ptr<Ring> ring(new Ring(static_cast<int>(fd), params));
        return ring->mapped() ? std::move(ring) : nullptr;
      }
      if (errno != EINVAL) break;  // EINVAL: an older kernel that does not know the flags
    }
    return nullptr;
  }

  ~Ring() {
    for (const auto& [address, bytes] : mappings_) {
      if (address != MAP_FAILED) ::munmap(address, bytes);
    }
    ::close(fd_);
  }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  void run(std::span<Transfer> transfers) {
    std::size_t next = 0;
    unsigned in_flight = 0;
    bool stop = false;
    std::vector<std::size_t> again;  // those that were done in part
    for (;;) {
      while (in_flight < BlockQueue::depth && !stop && (next < transfers.size() || !again.empty())) {
        std::size_t i = next;
        if (again.empty()) {
          ++next;
        } else {
          i = again.back();
          again.pop_back();
        }
        push(transfers[i], i);
        ++in_flight;
      }
      if (in_flight == 0) return;
      // While there is more to submit, half of what is in flight at a time: every wait wakes a thread up, which is dear on
      // cores that train, and the other half keeps the device busy meanwhile.
      enter(stop || next == transfers.size() ? in_flight : std::min(in_flight, completions_at_once));
      in_flight -= reap([&](std::size_t i, std::int32_t result) {
        transfers[i].advance(result);
        if (transfers[i].error != 0) stop = true;
        if (!transfers[i].finished()) again.push_back(i);
      });
    }
  }

 private:
  static constexpr unsigned completions_at_once = BlockQueue::depth / 2;

  Ring(int fd, const io_uring_params& params) : fd_(fd) {
    const std::size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(std::uint32_t);
    const std::size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(io_uring_cqe);
    std::byte* sq = map(IORING_OFF_SQ_RING, sq_bytes);
    std::byte* cq = map(IORING_OFF_CQ_RING, cq_bytes);
    std::byte* entries = map(IORING_OFF_SQES, params.sq_entries * sizeof(io_uring_sqe));
    if (!mapped()) return;
    const auto word = [](std::byte* base, std::uint32_t offset) {
      return reinterpret_cast<std::uint32_t*>(base + offset);
    };
    sq_head_ = word(sq, params.sq_off.head);
    sq_tail_ = word(sq, params.sq_off.tail);
    sq_array_ = word(sq, params.sq_off.array);
    sq_mask_ = *word(sq, params.sq_off.ring_mask);
    entries_ = reinterpret_cast<io_uring_sqe*>(entries);
    cq_head_ = word(cq, params.cq_off.head);
    cq_tail_ = word(cq, params.cq_off.tail);
    cq_mask_ = *word(cq, params.cq_off.ring_mask);
    completions_ = reinterpret_cast<io_uring_cqe*>(cq + params.cq_off.cqes);
  }

  std::byte* map(std::uint64_t offset, std::size_t bytes) {
    void* address =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, static_cast<off_t>(offset));
    mappings_.emplace_back(address, bytes);
    return static_cast<std::byte*>(address);
  }
  bool mapped() const {
    return std::none_of(mappings_.begin(), mappings_.end(), [](const auto& m) { return m.first == MAP_FAILED; });
  }

  void push(const Transfer& transfer, std::size_t index) {
    const std::uint32_t tail = *sq_tail_;
    io_uring_sqe& entry = entries_[tail & sq_mask_];
    entry = io_uring_sqe{};
    entry.opcode = transfer.is_write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = transfer.file->fd();
    entry.off = transfer.offset + transfer.done;
    entry.addr = reinterpret_cast<std::uintptr_t>(transfer.memory + transfer.done);
    entry.len = static_cast<std::uint32_t>(std::min(transfer.bytes - transfer.done, largest_request_bytes));
    entry.user_data = index;
    sq_array_[tail & sq_mask_] = tail & sq_mask_;
    std::atomic_ref(*sq_tail_).store(tail + 1, std::memory_order_release);
  }

  // Submits what was pushed and waits for completions. May return early.
  void enter(unsigned completions) {
    const unsigned pushed = *sq_tail_ - std::atomic_ref(*sq_head_).load(std::memory_order_acquire);
    const long result =
        ::syscall(SYS_io_uring_enter, fd_, pushed, completions, IORING_ENTER_GETEVENTS, nullptr, std::size_t{0});
    if (result >= 0 || errno == EINTR || errno == EAGAIN || errno == EBUSY) return;
    std::terminate();  // the kernel may hold the callers' buffers: there is no way to give them back
  }

  template <class Completed>
  unsigned reap(const Completed& completed) {
    std::uint32_t head = *cq_head_;
    const std::uint32_t tail = std::atomic_ref(*cq_tail_).load(std::memory_order_acquire);
    const unsigned count = tail - head;
    for (; head != tail; ++head) {
      const io_uring_cqe& completion = completions_[head & cq_mask_];
      completed(static_cast<std::size_t>(completion.user_data), completion.res);
    }
    std::atomic_ref(*cq_head_).store(head, std::memory_order_release);
    return count;
  }

  static constexpr std::size_t largest_request_bytes = std::size_t{1} << 30;

  int fd_;
  std::vector<std::pair<void*, std::size_t>> mappings_;
  std::uint32_t* sq_head_ = nullptr;
  std::uint32_t* sq_tail_ = nullptr;
  std::uint32_t* sq_array_ = nullptr;
  std::uint32_t sq_mask_ = 0;
  io_uring_sqe* entries_ = nullptr;
  std::uint32_t* cq_head_ = nullptr;
  std::uint32_t* cq_tail_ = nullptr;
  std::uint32_t cq_mask_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

// A thread. Whoever sees that it has ended sees all that it did.
class ThreadLife {
 public:
  ThreadLife() = default;
  ~ThreadLife() { has_ended_->store(true, std::memory_order_release); }
  ThreadLife(const ThreadLife&) = delete;
  ThreadLife& operator=(const ThreadLife&) = delete;

  std::uint64_t number() const { return number_; }
  const std::shared_ptr<std::atomic<bool>>& has_ended() const { return has_ended_; }

 private:
  static inline std::atomic<std::uint64_t> last_{0};
  std::uint64_t number_ = ++last_;  // thread ids of the system are used again; these are not
  std::shared_ptr<std::atomic<bool>> has_ended_ = std::make_shared<std::atomic<bool>>(false);
};

const ThreadLife& this_thread() {
  thread_local const ThreadLife life;
  return life;
}

}  // namespace

class BlockQueue::Engine {
 public:
  virtual ~Engine() = default;
  virtual Way way() const = 0;
  // Finishes every transfer, or fails one and leaves those undone that had not begun.
  virtual void run(std::span<Transfer> transfers) = 0;
  void finish(std::span<Transfer> transfers) {
    if (transfers.empty()) return;
    run(transfers);
    for (const Transfer& transfer : transfers) {
      if (transfer.error != 0) transfer.fail();
    }
  }
};

// Calls take turns; the caller works too.
class BlockQueue::ThreadEngine final : public Engine {
 public:
  ~ThreadEngine() override {
    {
      const std::lock_guard lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Way way() const override { return Way::threads; }
  void run(std::span<Transfer> transfers) override {
    const std::lock_guard turn(turn_);
    const std::size_t helpers = std::min(transfers.size(), most_threads) - 1;
    have(helpers);
    {
      const std::lock_guard lock(mutex_);
      work_ = transfers;
      next_ = 0;
      stop_ = false;
      ++generation_;
    }
    wake_.notify_all();
    drain(transfers);
    std::unique_lock lock(mutex_);
    work_ = {};  // who wakes up now finds nothing
    done_.wait(lock, [this] { return busy_ == 0; });
  }

 private:
  static constexpr std::size_t most_threads = 16;

  // Where the system gives no more threads, those that there are do the work, and the caller.
  void have(std::size_t helpers) {
    threads_.reserve(helpers);
    try {
      while (threads_.size() < helpers) threads_.push_back(start_thread("hf-block", [this] { help(); }));
    } catch (const Error&) {
      return;
    }
  }

  void help() {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return closing_ || (generation_ != seen && !work_.empty()); });
      if (closing_) return;
      seen = generation_;
      const std::span<Transfer> work = work_;
      ++busy_;
      lock.unlock();
      drain(work);
      lock.lock();
      if (--busy_ == 0) done_.notify_all();
    }
  }

  void drain(std::span<Transfer> work) {
    for (std::size_t i = next_++; i < work.size() && !stop_; i = next_++) {
      while (!work[i].finished()) work[i].advance(call(work[i]));
      if (work[i].error != 0) stop_ = true;
    }
  }

  static std::int64_t call(const Transfer& transfer) {
    const auto offset = static_cast<off_t>(transfer.offset + transfer.done);
    std::byte* memory = transfer.memory + transfer.done;
    const std::size_t bytes = transfer.bytes - transfer.done;
    const ssize_t result = transfer.is_write ? ::pwrite(transfer.file->fd(), memory, bytes, offset)
                                             : ::pread(transfer.file->fd(), memory, bytes, offset);
    return result < 0 ? -errno : result;
  }

  std::mutex turn_;
  std::vector<std::thread> threads_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};

  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_;
  std::condition_variable done_;
  std::span<Transfer> work_;
  std::uint64_t generation_ = 0;
  std::size_t busy_ = 0;
  bool closing_ = false;
};

class BlockQueue::RingEngine final : public Engine {
 public:
  static std::unique_ptr<Engine> make() {
    auto ring = Ring::make();
    if (!ring) return nullptr;
    auto engine = std::make_unique<RingEngine>();
    engine->rings_.emplace(this_thread().number(), ThreadRing{this_thread().has_ended(), std::move(ring)});
    return engine;
  }
  Way way() const override { return Way::io_uring; }
  void run(std::span<Transfer> transfers) override {
    if (Ring* ring = ring_of_this_thread()) {
      ring->run(transfers);
    } else {
      without_ring_.run(transfers);
    }
  }

 private:
  struct ThreadRing {
    std::shared_ptr<const std::atomic<bool>> has_ended;  // the thread
    std::unique_ptr<Ring> ring;
  };

  // Null where the kernel has refused this thread one; it is not asked again. Each has a descriptor: those of threads
  // that have ended are given back before there is another.
  Ring* ring_of_this_thread() {
    const ThreadLife& thread = this_thread();
    const std::lock_guard lock(mutex_);
    auto found = rings_.find(thread.number());
    if (found == rings_.end()) {
      std::erase_if(rings_, [](const auto& of) { return of.second.has_ended->load(std::memory_order_acquire); });
      found = rings_.emplace(thread.number(), ThreadRing{thread.has_ended(), Ring::make()}).first;
    }
    return found->second.ring.get();
  }

  ThreadEngine without_ring_;
  std::mutex mutex_;
  std::map<std::uint64_t, ThreadRing> rings_;
};

BlockQueue::BlockQueue(Way wanted) {
  if (wanted == Way::io_uring) engine_ = RingEngine::make();
  if (!engine_) engine_ = std::make_unique<ThreadEngine>();
}

BlockQueue::~BlockQueue() = default;

void BlockQueue::read_range(const BlockFile& file, std::uint64_t offset, std::size_t bytes, std::byte* dst) {
  std::vector<BlockRead> reads;
  for (std::size_t at = 0; at < bytes; at += request_bytes) {
    reads.push_back({&file, offset + at, std::min(request_bytes, bytes - at), dst + at});
  }
  read_many(reads);
}

void BlockQueue::write_range(const BlockFile& file, std::uint64_t offset, std::size_t bytes, const std::byte* src) {
  std::vector<BlockWrite> writes;
  for (std::size_t at = 0; at < bytes; at += request_bytes) {
    writes.push_back({&file, offset + at, std::min(request_bytes, bytes - at), src + at});
  }
  write_many(writes);
}

BlockQueue::Way BlockQueue::way() const { return engine_->way(); }

void BlockQueue::read_many(std::span<const BlockRead> reads) {
  std::vector<Transfer> transfers;
  transfers.reserve(reads.size());
  for (const BlockRead& read : reads) {
    read.file->check_read(read.offset, read.bytes, read.dst);
    if (read.bytes != 0) transfers.push_back({read.file, read.offset, read.bytes, read.dst, false});
  }
  DialServices services(transfers);
  engine_->finish(transfers);
  services.finish();
}

void BlockQueue::write_many(std::span<const BlockWrite> writes) {
  std::vector<Transfer> transfers;
  transfers.reserve(writes.size());
  for (const BlockWrite& write : writes) {
    write.file->check_write(write.offset, write.bytes, write.src);
    // A write never stores through the pointer; the system calls take one that reads would.
    if (write.bytes != 0) {
      transfers.push_back({write.file, write.offset, write.bytes, const_cast<std::byte*>(write.src), true});
    }
  }
  DialServices services(transfers);
  engine_->finish(transfers);
  services.finish();
}

}  // namespace holdfast

// A channel: messages from one process to another on the same machine, through memory that both map.
//
// Invariants
// - One process writes and one reads, one thread of each. Messages come in order, and whole.
// - A writer waits for nobody: what does not fit beside what was not taken yet begins larger memory, which the reader
//   goes on to once it has taken what was in the old one. So no order of sends and receives can block two processes.
// - A reader's wait ends: with the message, when the writer has closed or its process has ended, or when time is over.
// - What the other process wrote says nothing about where memory lies: lengths and positions are checked against the
//   memory as it was mapped, which nobody can make shorter (it is sealed).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace holdfast {

// Where a channel's memory is: a file in memory that a process has open.
struct ChannelAddress {
  std::int64_t process = 0;
  std::int64_t descriptor = 0;
  std::uint64_t token = 0;  // by which a reader knows that it is this one
};

class ChannelMemory;

class ChannelWriter {
 public:
  // Throws std::runtime_error where the system gives no such memory; so does `send`.
  explicit ChannelWriter(std::size_t capacity = std::size_t{1} << 20);
  ~ChannelWriter();
  ChannelWriter(const ChannelWriter&) = delete;
  ChannelWriter& operator=(const ChannelWriter&) = delete;

  // For a reader in another process, until the first message that does not fit.
  ChannelAddress address() const;

  void send(const void* data, std::size_t size);

  // Nothing more will come. What was sent can be received while this lives. A forked child closes nothing of its parent's.
  void close() noexcept;

 private:
  void go_on_with(std::size_t capacity);
  void let_go_of_what_was_left();

  std::int64_t process_;
  std::uint64_t token_;
  std::unique_ptr<ChannelMemory> memory_;
  std::vector<std::unique_ptr<ChannelMemory>> older_;  // until the reader has gone on
};

enum class Reception { received, not_yet, gone };

class ChannelReader {
 public:
  // Throws std::runtime_error where that process cannot be reached from this one.
  explicit ChannelReader(const ChannelAddress& address);
  ~ChannelReader();
  ChannelReader(const ChannelReader&) = delete;
  ChannelReader& operator=(const ChannelReader&) = delete;

  // Takes the next message, which has to have this size; else throws std::runtime_error. Waits for `seconds` at most.
  Reception receive(void* data, std::size_t size, double seconds);

 private:
  bool take(void* data, std::size_t size);
  bool go_on();
  bool has_ended() const;

  ChannelAddress address_;
  int process_ = -1;  // a file descriptor of the writer's
  std::unique_ptr<ChannelMemory> memory_;
  std::uint64_t taken_ = 0;  // bytes, of this memory
};

}  // namespace holdfast

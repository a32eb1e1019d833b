// Channels: whatever is sent comes, in order and whole, between processes; and no wait outlives its writer.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "routing/memory_channel.h"

namespace holdfast {
namespace {

using Random = std::mt19937_64;
using Message = std::vector<std::uint64_t>;

constexpr double kLong = 60.0;  // seconds

// Sizes around those at which a ring is full, goes round, and grows.
std::size_t draw_size(Random& random) {
  switch (random() % 4) {
    case 0: return random() % 4;
    case 1: return random() % 600;
    case 2: return (std::size_t{1} << (random() % 12)) - random() % 2;
    default: return random() % 40;
  }
}

Message draw_message(Random& random) {
  Message message(draw_size(random));
  for (auto& word : message) word = random();
  return message;
}

void send(ChannelWriter& channel, const Message& message) { channel.send(message.data(), message.size() * 8); }

bool receive(ChannelReader& channel, const Message& expected, double seconds = kLong) {
  Message message(expected.size());
  const Reception reception = channel.receive(message.data(), message.size() * 8, seconds);
  CHECK(reception != Reception::received || message == expected);
  return reception == Reception::received;
}

Reception nothing_from(ChannelReader& channel, double seconds) {
  std::uint64_t word = 0;
  return channel.receive(&word, 8, seconds);
}

template <class Call>
bool fails(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error&) {
    return true;
  }
  return false;
}

pid_t in_a_process(const std::function<void()>& work) {
  const pid_t process = fork();
  CHECK(process >= 0);
  if (process != 0) return process;
  work();
  std::_Exit(0);
}

void ended_well(pid_t process) {
  int status = 0;
  CHECK(waitpid(process, &status, 0) == process);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

std::size_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(files), end(files)));
}

void all_that_is_sent_comes_in_order(Random& random) {
  for (int round = 0; round < 30; ++round) {
    ChannelWriter writer(std::size_t{64} << random() % 8);
    ChannelReader reader(writer.address());
    std::vector<Message> on_their_way;
    for (int i = 0; i < 200; ++i) {
      // As often full as empty, so that it grows, and is gone on from with much and with nothing in it.
      if (random() % 2 == 0) {
        on_their_way.push_back(draw_message(random));
        send(writer, on_their_way.back());
      } else if (!on_their_way.empty()) {
        CHECK(receive(reader, on_their_way.front()));
        on_their_way.erase(on_their_way.begin());
      } else {
        CHECK(nothing_from(reader, 0.0) == Reception::not_yet);
      }
    }
    writer.close();
    for (const Message& message : on_their_way) CHECK(receive(reader, message));
    CHECK(nothing_from(reader, kLong) == Reception::gone);
  }
}

void two_processes_talk_both_ways(Random& random) {
  // Both send first and receive then, more than memory has room for at the beginning.
  const std::uint64_t seed = random();
  ChannelWriter to_child(256);
  const auto talk = [&](ChannelWriter& out, ChannelReader& in, std::uint64_t mine, std::uint64_t others) {
    Random said(mine), heard(others);
    for (int i = 0; i < 2000; ++i) {
      const Message message = draw_message(said);
      send(out, message);
      if (mine % 2 == 0 && i % 64 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      CHECK(receive(in, draw_message(heard)));
    }
  };
  // A child of a fork has the parent's writer, whose memory is the parent's to name: each makes its own reader.
  int addresses[2];
  CHECK(pipe(addresses) == 0);
  const ChannelAddress parents = to_child.address();
  const pid_t child = in_a_process([&] {
    ChannelWriter own(256);
    const ChannelAddress address = own.address();
    CHECK(write(addresses[1], &address, sizeof address) == sizeof address);
    ChannelReader reader(parents);
    talk(own, reader, seed | 1, seed & ~std::uint64_t{1});
    while (nothing_from(reader, kLong) != Reception::gone) continue;
  });
  ChannelAddress address;
  CHECK(read(addresses[0], &address, sizeof address) == sizeof address);
  ChannelReader reader(address);
  talk(to_child, reader, seed & ~std::uint64_t{1}, seed | 1);
  to_child.close();
  ended_well(child);
  CHECK(nothing_from(reader, kLong) == Reception::gone);
  close(addresses[0]);
  close(addresses[1]);
}

void a_wait_ends_when_the_writer_is_killed() {
  int addresses[2];
  CHECK(pipe(addresses) == 0);
  const pid_t child = in_a_process([&] {
    ChannelWriter writer;
    const ChannelAddress address = writer.address();
    const std::uint64_t word = 7;
    writer.send(&word, 8);
    CHECK(write(addresses[1], &address, sizeof address) == sizeof address);
    for (;;) pause();
  });
  ChannelAddress address;
  CHECK(read(addresses[0], &address, sizeof address) == sizeof address);
  ChannelReader reader(address);
  CHECK(nothing_from(reader, kLong) == Reception::received);
  const auto began = std::chrono::steady_clock::now();
  CHECK(nothing_from(reader, 0.2) == Reception::not_yet);
  CHECK(std::chrono::steady_clock::now() - began >= std::chrono::milliseconds(200));
  std::thread killer([child] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    kill(child, SIGKILL);  // it is a zombie from then on, and has ended
  });
  CHECK(nothing_from(reader, kLong) == Reception::gone);
  CHECK(std::chrono::steady_clock::now() - began < std::chrono::seconds(30));
  killer.join();
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(fails([&] { ChannelReader late(address); }));
  close(addresses[0]);
  close(addresses[1]);
}

void a_sleeping_reader_is_woken() {
  ChannelWriter writer;
  ChannelReader reader(writer.address());
  for (const bool closes : {false, true}) {
    std::thread late([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
      const std::uint64_t word = 7;
      if (closes) writer.close();
      if (!closes) writer.send(&word, 8);
    });
    CHECK(nothing_from(reader, kLong) == (closes ? Reception::gone : Reception::received));
    late.join();
  }
}

void a_forked_child_closes_nothing() {
  auto writer = std::make_unique<ChannelWriter>();
  ChannelReader reader(writer->address());
  ended_well(in_a_process([&] { writer.reset(); }));
  CHECK(nothing_from(reader, 0.1) == Reception::not_yet);
  writer.reset();
  CHECK(nothing_from(reader, kLong) == Reception::gone);
}

void what_does_not_fit_together_is_refused() {
  ChannelWriter writer;
  const ChannelAddress address = writer.address();
  ChannelReader reader(address);
  const std::uint64_t words[2] = {1, 2};
  writer.send(words, 16);
  CHECK(fails([&] { nothing_from(reader, kLong); }));  // eight bytes
  CHECK(fails([&] { ChannelReader other({address.process, address.descriptor, address.token + 1}); }));
  CHECK(fails([&] { ChannelReader other({address.process, 0, address.token}); }));
  CHECK(fails([&] { ChannelReader other({-1, address.descriptor, address.token}); }));
}

void memory_of_others_is_not_followed() {
  // A file that says that it is longer than it is, and one that could be made shorter.
  for (const bool is_sealed : {true, false}) {
    const int file = memfd_create("made-up", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(ftruncate(file, 4096 + 64) == 0);
    const std::uint64_t header[3] = {0x31'4c'4e'48'43'44'4c'48, 5, is_sealed ? 1u << 20 : 64u};
    CHECK(pwrite(file, header, sizeof header, 0) == sizeof header);
    if (is_sealed) CHECK(fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0);
    CHECK(fails([&] { ChannelReader reader({getpid(), file, 5}); }));
    close(file);
  }
}

void nothing_is_left_open(Random& random) {
  const std::size_t before = open_files();
  {
    ChannelWriter writer(64);
    ChannelReader reader(writer.address());
    for (std::size_t size = 1; size < 10'000; size *= 3) {
      const Message message(size, random());
      send(writer, message);
      CHECK(receive(reader, message));
    }
    send(writer, Message(1));
    CHECK(open_files() <= before + 3);  // the process, the newest memory, and one that was left since the last message
  }
  CHECK(open_files() == before);
}

}  // namespace
}  // namespace holdfast

int main(int argc, char** argv) {
  using namespace holdfast;
  Random random(check::seed_from(argc, argv));
  two_processes_talk_both_ways(random);
  a_wait_ends_when_the_writer_is_killed();
  all_that_is_sent_comes_in_order(random);
  a_sleeping_reader_is_woken();
  a_forked_child_closes_nothing();
  what_does_not_fit_together_is_refused();
  memory_of_others_is_not_followed();
  nothing_is_left_open(random);
  return check::passed();
}

// The little that the core's tests need: a check that says where it failed, and a seed that replays.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <random>
#include <string>

namespace check {

inline std::string replay_command;
inline std::string context;  // what is being tested, for the message

// Usage: test [seed]. Without a seed, another one each time.
inline std::uint64_t seed_from(int argc, char** argv) {
  const bool is_given = argc > 1 && std::strcmp(argv[1], "random") != 0;
  const std::uint64_t seed = is_given ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  replay_command = std::string(argv[0]) + " " + std::to_string(seed);
  return seed;
}

[[noreturn]] inline void fail(const char* file, int line, const char* what) {
  std::fprintf(stderr, "%s:%d: failed: %s\n  in: %s\n  replay: %s\n", file, line, what, context.c_str(),
               replay_command.c_str());
  std::_Exit(1);  // threads of the core may be running
}

inline int passed() {
#if HOLDFAST_ALONE
  const std::filesystem::directory_iterator threads("/proc/self/task");
  if (std::distance(begin(threads), end(threads)) != 1) {
    fail(__FILE__, __LINE__,
         "no thread was begun: this test is not tried under TSan (HOLDFAST_ALONE in CMakeLists.txt)");
  }
#endif
  std::printf("passed (%s)\n", replay_command.c_str());
  return 0;
}

}  // namespace check

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

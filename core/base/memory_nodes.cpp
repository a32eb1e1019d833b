#include "base/memory_nodes.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>
#include <string>

#include "base/error.h"

namespace holdfast {
namespace {

// linux/mempolicy.h
constexpr int bind_to = 2;
constexpr int interleave = 3;
constexpr int interleave_by_weight = 6;

constexpr std::size_t most_nodes = 1024;
constexpr std::size_t word_bits = sizeof(unsigned long) * CHAR_BIT;
constexpr std::size_t page_bytes = 4096;

[[noreturn]] void refuse(std::span<const unsigned> nodes, const char* option, const std::string& why) {
  std::string list;
  for (const unsigned node : nodes) list += (list.empty() ? "" : ", ") + std::to_string(node);
  throw Error(ErrorKind::config, std::string(option) + " = [" + list + "]: " + why +
                                     "; /sys/devices/system/node/has_memory says which nodes there are");
}

bool set_policy(void* begin, std::size_t bytes, int policy,
                const std::array<unsigned long, most_nodes / word_bits>& mask) {
  return ::syscall(SYS_mbind, begin, bytes, policy, mask.data(), most_nodes + 1, 0) == 0;
}

}  // namespace

void place_on_nodes(void* begin, std::size_t bytes, std::span<const unsigned> nodes, const char* option) {
  if (nodes.empty() || bytes == 0) return;
  std::array<unsigned long, most_nodes / word_bits> mask{};
  for (const unsigned node : nodes) {
    if (node >= most_nodes) refuse(nodes, option, "there is no node " + std::to_string(node));
    mask[node / word_bits] |= 1UL << node % word_bits;
  }
  const bool is_placed = nodes.size() == 1 ? set_policy(begin, bytes, bind_to, mask)
                                           : set_policy(begin, bytes, interleave_by_weight, mask) ||
                                                 set_policy(begin, bytes, interleave, mask);
  if (!is_placed) refuse(nodes, option, std::string("the system refuses it: ") + std::strerror(errno));
}

void check_nodes(std::span<const unsigned> nodes, const char* option) {
  if (nodes.empty()) return;
  void* const page = ::mmap(nullptr, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) throw std::bad_alloc();
  struct Unmapped {
    void* page;
    ~Unmapped() { ::munmap(page, page_bytes); }
  } const unmapped{page};
  // Of several the kernel takes those that it has, and says nothing of the others.
  for (const unsigned node : nodes) place_on_nodes(page, page_bytes, {&node, 1}, option);
}

}  // namespace holdfast

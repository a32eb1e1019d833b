// A tracer of the stores that built code makes to mapped files: of every single one, of every line that is written back
// (clwb, clflushopt, clflush), of every store past the caches and of every fence, as the processor meets them.
//
// How it sees them
// - What is mapped of the traced directory may not be written to, so each store raises a fault. The handler lets this
//   one instruction pass, sees what it has changed and takes that down.
// - Instructions that write lines back, and fences, are breakpoints: their places come from objdump, and the handler
//   runs them in the program's stead. It also knows by its place whether a store went past the caches.
// - msync writes back whatever is mapped there, and waits for it.
// - A fence waits for what its own thread has written back, and for nothing else.
//
// MAP_SYNC is granted while a directory is traced: the code runs as on DAX memory, over whatever there is.
// Only for x86-64, and not under sanitizers, which want the same faults.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "recording.h"

extern "C" const char __executable_start;  // of the linker

namespace holdfast {

// An instruction that makes stores durable, and the memory that it names: disp + base + index * scale.
struct DurabilityInstruction {
  enum class Kind { write_back, fence };
  Kind kind;
  std::uintptr_t next;  // instruction
  std::int64_t displacement = 0;
  int base = -1;  // numbers of registers in a signal's context; -1: none
  int index = -1;
  std::int64_t scale = 1;
};

// Where the running program has them, by objdump.
class InstructionMap {
 public:
  InstructionMap() {
    std::FILE* const listing = ::popen("objdump -d --no-show-raw-insn /proc/$PPID/exe", "r");
    CHECK(listing != nullptr);
    std::array<char, 512> line;
    DurabilityInstruction* before = nullptr;
    while (std::fgets(line.data(), line.size(), listing) != nullptr) {
      unsigned long at = 0;
      std::array<char, 32> name{};
      std::array<char, 128> operands{};
      const int fields = std::sscanf(line.data(), " %lx: %31s %127[^\n#]", &at, name.data(), operands.data());
      if (fields < 2) continue;
      const std::uintptr_t place = reinterpret_cast<std::uintptr_t>(&__executable_start) + at;
      if (before != nullptr) before->next = place;
      before = nullptr;
      const std::string mnemonic = name.data();
      const bool is_write_back = mnemonic == "clwb" || mnemonic == "clflush" || mnemonic == "clflushopt";
      if (is_write_back || mnemonic == "sfence") {
        using enum DurabilityInstruction::Kind;
        before = &durable_.emplace(place, DurabilityInstruction{is_write_back ? write_back : fence, 0}).first->second;
        if (is_write_back) read_operand(operands.data(), *before);
      } else if ((mnemonic.starts_with("movnt") || mnemonic.starts_with("vmovnt")) && !mnemonic.ends_with("dqa")) {
        past_caches_.insert(place);
      }
    }
    CHECK(::pclose(listing) == 0);
    CHECK(!durable_.empty() && !past_caches_.empty());
  }

  const std::map<std::uintptr_t, DurabilityInstruction>& durable() const { return durable_; }
  bool goes_past_caches(std::uintptr_t place) const { return past_caches_.contains(place); }

 private:
  static int register_of(const std::string& name) {
    static const std::map<std::string, int> registers = {
        {"%rax", REG_RAX}, {"%rbx", REG_RBX}, {"%rcx", REG_RCX}, {"%rdx", REG_RDX},
        {"%rsi", REG_RSI}, {"%rdi", REG_RDI}, {"%rbp", REG_RBP}, {"%rsp", REG_RSP},
        {"%r8", REG_R8},   {"%r9", REG_R9},   {"%r10", REG_R10}, {"%r11", REG_R11},
        {"%r12", REG_R12}, {"%r13", REG_R13}, {"%r14", REG_R14}, {"%r15", REG_R15}};
    CHECK(registers.contains(name));
    return registers.at(name);
  }
  // As in "-0x40(%rax,%rcx,8)".
  static void read_operand(const std::string& text, DurabilityInstruction& instruction) {
    const auto open = text.find('(');
    const auto close = text.find(')');
    CHECK(open != std::string::npos && close != std::string::npos);
    if (open != 0) instruction.displacement = std::strtoll(text.c_str(), nullptr, 16);
    std::vector<std::string> parts = {""};
    for (const char c : text.substr(open + 1, close - open - 1)) {
      if (c == ',') {
        parts.emplace_back();
      } else {
        parts.back() += c;
      }
    }
    if (!parts[0].empty()) instruction.base = register_of(parts[0]);
    if (parts.size() > 1) instruction.index = register_of(parts[1]);
    if (parts.size() > 2) instruction.scale = std::strtoll(parts[2].c_str(), nullptr, 10);
  }

  std::map<std::uintptr_t, DurabilityInstruction> durable_;
  std::set<std::uintptr_t> past_caches_;
};

// The store that a thread is let make.
struct PassingStore {
  std::vector<std::uintptr_t> pages;  // two where it lies across their border
  bool past_caches = false;
};

class StoreTracer {
 public:
  static StoreTracer& instance() {
    static StoreTracer tracer;
    return tracer;
  }

  // What is mapped of `directory` from now on is taken down in `journal`, until `end`.
  void begin(const std::string& directory, Journal& journal) {
    directory_ = directory + "/";
    sizes_.clear();
    journal_ = &journal;
  }
  void end() {
    journal_ = nullptr;
    for (const auto& [begin, region] : regions_)
      CHECK(::mprotect(at(begin), region.bytes, PROT_READ | PROT_WRITE) == 0);
    regions_.clear();
  }
  bool is_tracing() const { return journal_ != nullptr; }

  // How often each was met, so that a test sees that something was.
  std::uint64_t num_stores = 0;
  std::uint64_t num_past_caches = 0;
  std::uint64_t num_written_back = 0;
  std::uint64_t num_fences = 0;

  // Calls of the system that the traced code makes.
  void mapped(void* address, std::size_t bytes, int protection, int descriptor) {
    if (!is_tracing() || (protection & PROT_WRITE) == 0 || descriptor < 0) return;
    const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
    std::array<char, 4096> path{};
    if (::readlink(link.c_str(), path.data(), path.size() - 1) < 0) return;
    const std::string name = path.data();
    if (!name.starts_with(directory_) || name.ends_with("(deleted)")) return;
    const std::string file = name.substr(directory_.size());
    const auto [size, is_new] = sizes_.try_emplace(file, bytes);
    if (!is_new && std::exchange(size->second, bytes) != bytes) journal_->add(Resize{file, bytes});
    Region& region = regions_[reinterpret_cast<std::uintptr_t>(address)];
    region = {file, format::align_up(bytes, page_bytes), bytes, {}};
    const auto* const data = static_cast<const std::byte*>(address);
    region.seen.assign(data, data + bytes);
    CHECK(::mprotect(address, region.bytes, PROT_READ) == 0);
  }
  void unmapped(void* address) { regions_.erase(reinterpret_cast<std::uintptr_t>(address)); }
  void synced(void* address, std::size_t bytes) {
    if (!is_tracing() || region_of(reinterpret_cast<std::uintptr_t>(address)) == nullptr) return;
    write_back(reinterpret_cast<std::uintptr_t>(address), bytes);
    fence();
  }

 private:
  static constexpr std::size_t page_bytes = 4096;
  static constexpr std::size_t line_bytes = 64;
  static constexpr greg_t single_step = 0x100;  // the flag

  struct Region {
    std::string file;
    std::size_t bytes = 0;  // in whole pages
    std::size_t size = 0;  // of the file
    Bytes seen;  // its contents after the last store that was taken down
  };
  StoreTracer() {
    struct sigaction action{};
    action.sa_flags = SA_SIGINFO;
    action.sa_sigaction = [](int, siginfo_t* info, void* context) {
      instance().store_begins(*info, *static_cast<ucontext_t*>(context));
    };
    CHECK(::sigaction(SIGSEGV, &action, nullptr) == 0);
    action.sa_sigaction = [](int, siginfo_t*, void* context) {
      auto& of_thread = *static_cast<ucontext_t*>(context);
      if (passing_.pages.empty()) {
        instance().run_in_its_stead(of_thread);
      } else {
        instance().store_ends(of_thread);
      }
    };
    CHECK(::sigaction(SIGTRAP, &action, nullptr) == 0);
    for (const auto& [place, instruction] : instructions_.durable()) {
      const std::uintptr_t page = place / page_bytes * page_bytes;
      CHECK(::mprotect(at(page), page_bytes, PROT_READ | PROT_WRITE | PROT_EXEC) == 0);
      *static_cast<volatile std::uint8_t*>(at(place)) = 0xcc;
    }
  }

  static void* at(std::uintptr_t address) { return reinterpret_cast<void*>(address); }
  static std::uint64_t this_thread() { return static_cast<std::uint64_t>(::syscall(SYS_gettid)); }

  Region* region_of(std::uintptr_t address, std::uintptr_t* begin = nullptr) {
    auto found = regions_.upper_bound(address);
    if (found == regions_.begin()) return nullptr;
    --found;
    if (address >= found->first + found->second.bytes) return nullptr;
    if (begin != nullptr) *begin = found->first;
    return &found->second;
  }

  void store_begins(const siginfo_t& info, ucontext_t& context) {
    const auto address = reinterpret_cast<std::uintptr_t>(info.si_addr);
    if (passing_.pages.empty()) {
      while (one_passes_.test_and_set(std::memory_order_acquire)) {
      }
    }
    if (region_of(address) == nullptr) {
      ::signal(SIGSEGV, SIG_DFL);  // a fault of the program's own: it comes again, and ends it
      one_passes_.clear(std::memory_order_release);
      return;
    }
    const std::uintptr_t page = address / page_bytes * page_bytes;
    CHECK(::mprotect(at(page), page_bytes, PROT_READ | PROT_WRITE) == 0);
    passing_.pages.push_back(page);
    passing_.past_caches =
        instructions_.goes_past_caches(static_cast<std::uintptr_t>(context.uc_mcontext.gregs[REG_RIP]));
    context.uc_mcontext.gregs[REG_EFL] |= single_step;
  }

  void store_ends(ucontext_t& context) {
    for (const std::uintptr_t page : passing_.pages) {
      take_down(page);
      CHECK(::mprotect(at(page), page_bytes, PROT_READ) == 0);
    }
    passing_.pages.clear();
    context.uc_mcontext.gregs[REG_EFL] &= ~single_step;
    one_passes_.clear(std::memory_order_release);
  }

  void take_down(std::uintptr_t page) {
    std::uintptr_t begin = 0;
    Region& region = *region_of(page, &begin);
    const auto* const now = static_cast<const std::byte*>(at(begin));
    const std::size_t end = std::min(page - begin + page_bytes, region.size);
    for (std::size_t word = page - begin; word < end; word += word_bytes) {
      if (std::memcmp(now + word, region.seen.data() + word, word_bytes) == 0) continue;
      std::memcpy(region.seen.data() + word, now + word, word_bytes);
      journal_->add(Store{region.file, word, {now + word, now + word + word_bytes}});
      ++num_stores;
      if (!passing_.past_caches) continue;
      ++num_past_caches;
      journal_->add(Flush{.file = region.file, .offset = word, .bytes = word_bytes, .thread = this_thread()});
    }
  }

  void run_in_its_stead(ucontext_t& context) {
    greg_t* const registers = context.uc_mcontext.gregs;
    const auto place = static_cast<std::uintptr_t>(registers[REG_RIP]) - 1;
    const DurabilityInstruction& instruction = instructions_.durable().at(place);
    registers[REG_RIP] = static_cast<greg_t>(instruction.next);
    if (!is_tracing()) return;
    if (instruction.kind == DurabilityInstruction::Kind::fence) {
      fence();
      return;
    }
    std::int64_t address = instruction.displacement;
    if (instruction.base >= 0) address += registers[instruction.base];
    if (instruction.index >= 0) address += registers[instruction.index] * instruction.scale;
    write_back(static_cast<std::uintptr_t>(address) / line_bytes * line_bytes, line_bytes);
  }

  void write_back(std::uintptr_t address, std::size_t bytes) {
    std::uintptr_t begin = 0;
    const Region* const region = region_of(address, &begin);
    if (region == nullptr) return;
    ++num_written_back;
    journal_->add(Flush{.file = region->file, .offset = address - begin, .bytes = bytes, .thread = this_thread()});
  }
  void fence() {
    ++num_fences;
    journal_->point();
    journal_->add(Fence{.thread = this_thread()});
  }

  InstructionMap instructions_;
  std::string directory_;
  Journal* journal_ = nullptr;
  std::map<std::uintptr_t, Region> regions_;
  std::map<std::string, std::size_t> sizes_;  // of files that were mapped
  std::atomic_flag one_passes_;  // held from a store's fault to its end
  static inline thread_local PassingStore passing_;
};

}  // namespace holdfast

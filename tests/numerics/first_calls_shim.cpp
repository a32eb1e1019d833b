// Stands before MKL's vector functions in a process (LD_PRELOAD), and passes calls on.
//
// FIRST_CALLS=FILE           a line for every call: the function, the number of elements, the calling thread.
// FIRST_CALLS_AS_INTEL       MKL takes the processor for one of Intel's.
// FIRST_CALLS_SLOWLY         the first thread that finds out the kind of processor takes 0.3 s between the two numbers
//                            that it stores: the page of the table that the second comes from cannot be read until then.
//                            Any thread but the process's first begins its first call 0.1 s late.

#include <dlfcn.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool is_asked_for(const char* variable) { return std::getenv(variable) != nullptr; }

// The library's own: Python loads it out of everybody's sight, so it is not what comes next.
template <typename Function>
Function own(const char* name) {
  void* const library = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(library, name));
}

void begin_call(const char* function, int count) {
  static FILE* const file = is_asked_for("FIRST_CALLS") ? std::fopen(std::getenv("FIRST_CALLS"), "a") : nullptr;
  static const bool is_slow = is_asked_for("FIRST_CALLS_SLOWLY");
  if (file != nullptr) {
    std::fprintf(file, "%s %d %d\n", function, count, static_cast<int>(gettid()));
    std::fflush(file);
  }
  if (is_slow && gettid() != getpid()) usleep(100'000);
}

constexpr std::size_t PAGE_BYTES = 4096;
void* table_page = nullptr;

void let_read(int) {
  usleep(300'000);
  mprotect(table_page, PAGE_BYTES, PROT_READ);
}

// `mkl_vml_serv_cpu_detect` ends its first call with: lea rcx, [rip + offset of the table]; mov eax, [rcx + 4 * rax].
void withhold_table() {
  const auto* code = own<const unsigned char*>("mkl_vml_serv_cpu_detect");
  for (int at = 0; code != nullptr && at < 80; ++at) {
    if (std::memcmp(code + at, "\x48\x8d\x0d", 3) != 0) continue;
    std::int32_t offset = 0;
    std::memcpy(&offset, code + at + 3, sizeof offset);
    const auto table = reinterpret_cast<std::uintptr_t>(code) + static_cast<std::uintptr_t>(at + 7 + offset);
    table_page = reinterpret_cast<void*>(table & ~(PAGE_BYTES - 1));
    signal(SIGSEGV, let_read);
    mprotect(table_page, PAGE_BYTES, PROT_NONE);
    return;
  }
}

int as_intel(const char* name) {
  if (is_asked_for("FIRST_CALLS_AS_INTEL")) return 1;
  const auto real = own<int (*)()>(name);
  return real == nullptr ? 0 : real();
}

}  // namespace

#define STAND_BEFORE(name, type)                                                       \
  extern "C" void name(int count, const type* in, type* out, long long mode) {         \
    static const auto real = own<void (*)(int, const type*, type*, long long)>(#name); \
    begin_call(#name, count);                                                          \
    real(count, in, out, mode);                                                        \
  }
#define STAND_BEFORE_BOTH(function)  \
  STAND_BEFORE(vms##function, float) \
  STAND_BEFORE(vmd##function, double)

STAND_BEFORE_BOTH(Acos)
STAND_BEFORE_BOTH(Asin)
STAND_BEFORE_BOTH(Atan)
STAND_BEFORE_BOTH(Cos)
STAND_BEFORE_BOTH(Erf)
STAND_BEFORE_BOTH(Erfc)
STAND_BEFORE_BOTH(ErfInv)
STAND_BEFORE_BOTH(Exp)
STAND_BEFORE_BOTH(Ln)
STAND_BEFORE_BOTH(Log10)
STAND_BEFORE_BOTH(Log2)
STAND_BEFORE_BOTH(Sin)
STAND_BEFORE_BOTH(Sqrt)
STAND_BEFORE_BOTH(Tan)
STAND_BEFORE_BOTH(Tanh)
STAND_BEFORE_BOTH(Trunc)

extern "C" int mkl_serv_intel_cpu() { return as_intel("mkl_serv_intel_cpu"); }
extern "C" int mkl_serv_intel_cpu_true() { return as_intel("mkl_serv_intel_cpu_true"); }

extern "C" int mkl_serv_vml_cpu_detect() {
  static const auto real = own<int (*)()>("mkl_serv_vml_cpu_detect");
  const int kind = real();
  if (is_asked_for("FIRST_CALLS_SLOWLY")) withhold_table();
  return kind;
}

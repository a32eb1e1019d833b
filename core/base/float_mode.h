// The floating-point mode in which results are computed, whoever calls.
//
// Everything has internal linkage: translation units compiled for different instruction sets include this header, and
// the linker must not give one of them the other's copy.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace holdfast {
namespace {

// The mode that IEEE 754 starts in: round to nearest, subnormals kept. The calling thread may have another one
// (torch.set_flush_denormal), and worker threads then another than the caller.
class DefaultFloatMode {
 public:
#if defined(__x86_64__)
  DefaultFloatMode() : saved_(_mm_getcsr()) {
    if (differs()) _mm_setcsr(default_mode);
  }
  ~DefaultFloatMode() {
    if (differs()) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned default_mode = 0x1f80;
  bool differs() const { return (saved_ & ~0x3fu) != default_mode; }  // but for the sticky exception flags
  unsigned saved_;
#else
  DefaultFloatMode() {}
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
};

}  // namespace
}  // namespace holdfast

#include "io_class.h"

#include <linux/ioprio.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace holdfast {

void set_io_class(IoClass io_class) noexcept {
  constexpr int this_thread = 0;
  const int wanted = io_class == IoClass::idle ? IOPRIO_CLASS_IDLE : IOPRIO_CLASS_NONE;
  ::syscall(SYS_ioprio_set, IOPRIO_WHO_PROCESS, this_thread, IOPRIO_PRIO_VALUE(wanted, 0));
}

}  // namespace holdfast

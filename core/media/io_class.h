// How urgent a thread's reads and writes are to the disk's scheduler. A hint: mq-deadline and bfq heed it, `none` does not,
// nor does what BlockQueue hands to threads of its own where there is no io_uring.
#pragma once

namespace holdfast {

// idle: only while nobody else's requests wait or are on their way.
enum class IoClass { normal, idle };

// Of what the calling thread asks for from now on.
void set_io_class(IoClass io_class) noexcept;

}  // namespace holdfast

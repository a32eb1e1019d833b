// Threads of the core's own.
#pragma once

#include <signal.h>

#include <cstddef>
#include <functional>
#include <thread>

namespace holdfast {

// Held by a thread that starts another one, which inherits it: signals are for the application's threads, but for those
// that a fault raises in this one, which a debugger or Python's faulthandler may want to see.
class SignalsBlocked {
 public:
  SignalsBlocked();
  ~SignalsBlocked();
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// A thread that takes no signals. The name, 15 characters at most, is what top and perf show. Throws failed.
std::thread start_thread(const char* name, std::function<void()> run);

// Runs body(i) for i in [0, count), each on a thread of its own where there are several; returns when all are done. The
// first exception is rethrown. For what waits for a device: parallel_for has as many threads as there is CPU.
void in_threads(std::size_t count, const char* name, const std::function<void(std::size_t)>& body);

// The calling thread has what the others of its process leave: PyTorch's meet at a barrier many times a step, and each
// waits for the one that was held up. Where the system refuses, nothing changes.
void give_way() noexcept;

}  // namespace holdfast

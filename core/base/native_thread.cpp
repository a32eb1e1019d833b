#include "base/native_thread.h"

#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <exception>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "base/error.h"

namespace holdfast {

SignalsBlocked::SignalsBlocked() {
  sigset_t blocked;
  sigfillset(&blocked);
  for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_SETMASK, &blocked, &before_);
}

SignalsBlocked::~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

std::thread start_thread(const char* name, std::function<void()> run) {
  const SignalsBlocked blocked;
  try {
    std::thread thread(std::move(run));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    const std::string advice = error.code() == std::errc::resource_unavailable_try_again
                                   ? "; allow more threads (ulimit -u, a container's limit of processes) or memory"
                                   : "";
    throw Error(ErrorKind::failed, std::string("starting the thread ") + name + ": " + error.code().message() + advice);
  }
}

void in_threads(std::size_t count, const char* name, const std::function<void(std::size_t)>& body) {
  if (count == 1) return body(0);
  std::vector<std::exception_ptr> failures(count);
  std::vector<std::thread> threads;
  const auto join = [&] {
    for (std::thread& thread : threads) thread.join();
  };
  try {
    threads.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      threads.push_back(start_thread(name, [&, i] {
        try {
          body(i);
        } catch (...) {
          failures[i] = std::current_exception();
        }
      }));
    }
  } catch (...) {
    join();
    throw;
  }
  join();
  for (const std::exception_ptr& failure : failures) {
    if (failure) std::rethrow_exception(failure);
  }
}

void give_way() noexcept {
  constexpr int niceness = 10;
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), niceness);
}

}  // namespace holdfast

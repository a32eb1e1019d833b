#include "native_thread.h"

#include <pthread.h>
#include <signal.h>

#include <string>
#include <system_error>
#include <utility>

#include "error.h"

namespace holdfast {
namespace {

// In the thread that starts another one, which inherits it.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_thread(const char* name, std::function<void()> run) {
  const SignalsBlocked blocked;
  try {
    std::thread thread(std::move(run));
    pthread_setname_np(thread.native_handle(), name);
    return thread;
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::failed, std::string("starting the thread ") + name + ": " + error.code().message());
  }
}

}  // namespace holdfast

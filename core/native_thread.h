// A thread of the core's own: it has a name, which top and perf show, and leaves signals to the main thread (Python's).
#pragma once

#include <functional>
#include <thread>

namespace holdfast {

// name: 15 characters at most. Throws failed where the system has no thread to give.
std::thread start_thread(const char* name, std::function<void()> run);

}  // namespace holdfast

// Threads for the kernels: PyTorch's OpenMP team where there is one, else a small pool of our own.
//
// Invariants
// - Work is handed out by index; which thread runs an index never changes a result.
// - Workers sleep when idle (they share the cores with PyTorch's own threads), after a short spin.
// - parallel_for may be called from several threads; calls on our own workers take turns. A call from inside a worker
//   runs inline.
// - The team is used by the process's main thread only, and never in the child of a fork.
// - Threads are started at the first parallel_for that wants them, and never in the child of a fork before that.
#pragma once

#include <cstddef>
#include <functional>

namespace holdfast {

// Number of threads that parallel_for uses, the caller's included. Starts at the CPUs this process may run on.
void set_num_threads(int num_threads);
// The same, unless that was called.
void suggest_num_threads(int num_threads);
int num_threads();

// Runs body(i) for i in [0, count), on all threads; returns when all are done. The first exception is rethrown.
void parallel_for(std::size_t count, const std::function<void(std::size_t)>& body);

}  // namespace holdfast

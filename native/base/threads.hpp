// A thread pool for loops over chunks. The caller works too; helpers spin briefly between loops, then sleep.
#pragma once

#include <cstddef>

namespace polyquant {

// Runs work(context, chunk) for every chunk in [0, chunks), on up to set_threads() threads. A concurrent second caller
// runs
// its loop alone. `work` must not throw.
void run_chunks(size_t chunks, void (*work)(void* context, size_t chunk), void* context);

template <class F>
void parallel_for(size_t chunks, F&& work) {
  run_chunks(chunks, [](void* context, size_t chunk) { (*static_cast<F*>(context))(chunk); }, &work);
}

// 1 ... 256; 0 for the processors available to this process.
void set_threads(int count);
int get_threads();

// Adds the time from construction to destruction to kernel_nanoseconds(): the time spent in kernels, as seen from
// Python.
class KernelTime {
 public:
  KernelTime();
  ~KernelTime();
  KernelTime(const KernelTime&) = delete;
  KernelTime& operator=(const KernelTime&) = delete;

 private:
  long long start_;
};
long long kernel_nanoseconds();

}  // namespace polyquant

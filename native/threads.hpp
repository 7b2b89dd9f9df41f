// A pool of threads for loops over chunks. The caller works too; helpers spin for a moment between loops, then sleep.
#pragma once

#include <cstddef>

namespace polyquant {

// Runs work(context, chunk) for every chunk in [0, chunks), on as many threads as set_threads says. A second caller at the same time
// runs its loop alone. `work` must not throw.
void run_chunks(size_t chunks, void (*work)(void* context, size_t chunk), void* context);

template <class F>
void parallel_for(size_t chunks, F&& work) {
  run_chunks(chunks, [](void* context, size_t chunk) { (*static_cast<F*>(context))(chunk); }, &work);
}

// 1 ... 256; 0 for the processors that this process may use.
void set_threads(int count);
int get_threads();

// Adds the time from construction to destruction to kernel_nanoseconds(): what a model spends inside kernels, seen from Python.
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

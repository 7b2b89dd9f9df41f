#include "base/threads.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace polyquant {
namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

int processors() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
#endif
  return std::max(1, int(std::thread::hardware_concurrency()));
}

constexpr int kSpins = 4000;  // about 0.1 ms: longer than the gap between two operations of a layer

class Pool {
 public:
  // As many helpers as the system provides: without any, the caller works alone.
  explicit Pool(int threads) {
    helpers_.reserve(size_t(threads));
    try {
      for (int i = 1; i < threads; ++i) helpers_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {  // thread limit; rethrowing would end the process with its running threads
    }
  }
  ~Pool() {
    stop_.store(true);
    round_.fetch_add(1);
    round_.notify_all();
    for (auto& t : helpers_) t.join();
  }

  void run(size_t chunks, void (*work)(void*, size_t), void* context) {
    chunks_ = chunks, work_ = work, context_ = context;
    next_.store(0, std::memory_order_relaxed);
    door_.store(kOpen, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
    take();
    // Helpers that have not entered by now stay outside: the caller does not wait for a sleeping thread.
    uint32_t inside = door_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int i = 0; inside; ++i) {
      i < kSpins ? pause() : std::this_thread::yield();
      inside = door_.load(std::memory_order_acquire);
    }
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;

  void take() {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < chunks_;) work_(context_, i);
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      for (int i = 0; i < kSpins && round_.load(std::memory_order_acquire) == seen; ++i) pause();
      round_.wait(seen, std::memory_order_acquire);
      seen = round_.load(std::memory_order_acquire);
      if (stop_.load()) return;
      uint32_t state = door_.load(std::memory_order_acquire);
      while ((state & kOpen) && !door_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {}
      if (!(state & kOpen)) continue;
      take();
      door_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  alignas(64) std::atomic<size_t> next_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
  alignas(64) std::atomic<uint32_t> door_{0};  // open bit, and the number of helpers inside
  alignas(64) std::atomic<bool> stop_{false};
  size_t chunks_ = 0;
  void (*work_)(void*, size_t) = nullptr;
  void* context_ = nullptr;
  std::vector<std::thread> helpers_;
};

std::mutex guard;
Pool* pool = nullptr;  // never destroyed at exit: helpers may be asleep in it during static destruction
int wanted = 0;

// A forked child has none of the threads: it creates a new pool, and the old one is left to the parent.
void forget() { pool = nullptr; }

Pool& ready() {
  if (!pool) {
#if defined(__linux__)
    static const int once = pthread_atfork(nullptr, nullptr, [] {
      forget();
      new (&guard) std::mutex;
    });
    (void)once;
#endif
    pool = new Pool(get_threads());
  }
  return *pool;
}

std::atomic<long long> spent{0};

long long now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

void run_chunks(size_t chunks, void (*work)(void*, size_t), void* context) {
  if (chunks > 1) {
    std::unique_lock lock(guard, std::try_to_lock);
    if (lock.owns_lock() && get_threads() > 1) return ready().run(chunks, work, context);
  }
  for (size_t i = 0; i < chunks; ++i) work(context, i);
}

void set_threads(int count) {
  std::unique_lock lock(guard);
  wanted = std::clamp(count, 0, 256);
  delete pool;
  pool = nullptr;
}

int get_threads() {
  static const int found = processors();
  return wanted ? wanted : found;
}

KernelTime::KernelTime() : start_(now()) {}
KernelTime::~KernelTime() { spent.fetch_add(now() - start_, std::memory_order_relaxed); }
long long kernel_nanoseconds() { return spent.load(); }

}  // namespace polyquant

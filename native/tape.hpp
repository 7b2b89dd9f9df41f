// One token's way through a model, recorded once and run again without Python. While a tape records, every operation of a layer runs as
// always and leaves a step behind: a function of the position that holds pointers to its activations and owns whatever else it reads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

namespace polyquant {

// Memory of the activations. What Python lets go of is lent again: nothing that is recorded later reads the old, so a run in the same order
// may overwrite it as well.
class Lender {
 public:
  float* lend(size_t floats);
  void take_back(float* p, size_t floats) { free_[floats].push_back(p); }
  bool owns(const float* p) const;
  size_t bytes() const;

 private:
  struct Free {
    void operator()(float* p) const;
  };
  std::vector<std::pair<std::unique_ptr<float[], Free>, size_t>> blocks_;
  std::unordered_map<size_t, std::vector<float*>> free_;
};

struct Tape {
  std::vector<std::function<void(size_t position)>> steps;
  std::shared_ptr<Lender> memory = std::make_shared<Lender>();  // shared with the arrays that are lent
  bool complete = true;    // every step reads and writes lent memory alone: nothing came from elsewhere in between
  size_t start = SIZE_MAX;  // position that was recorded
  size_t room = SIZE_MAX;   // positions that the caches hold
  bool busy = false;        // a thread records or runs it: another must keep away from its steps and activations

  Tape() = default;
  Tape(const Tape&) = delete;

  void run(size_t position) const;
};

extern thread_local Tape* recording;  // of this thread; null for none

// touched: the activations of a step.
template <class F>
void record(std::initializer_list<const float*> touched, const F& step) {
  if (!recording) return;
  for (const float* p : touched) recording->complete &= recording->memory->owns(p);
  recording->steps.emplace_back(step);
}

// Of a step that stores `count` positions from `start` in a cache with room for `room`.
void positions_to(size_t start, size_t count, size_t room);

}  // namespace polyquant

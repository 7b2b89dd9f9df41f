// The forward pass of one token, recorded once and replayed without Python. While a tape records, every operation of a
// layer
// runs as usual and adds a step: a function of the position that holds pointers to its activations and owns its other
// inputs.
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

// Memory of the activations. Memory released by Python is lent again: later steps do not read the old values, so a
// replay in
// the same order may overwrite them too.
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
  std::shared_ptr<Lender> memory = std::make_shared<Lender>();  // shared with the lent arrays
  bool complete = true;                                         // all steps read and write only lent memory
  size_t start = SIZE_MAX;                                      // the recorded position
  size_t room = SIZE_MAX;                                       // positions that fit the caches
  bool busy = false;  // a thread is recording or running it: others must not touch its steps and activations

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

// Declares that a step stores `count` positions from `start` in a cache with room for `room`.
void positions_to(size_t start, size_t count, size_t room);

}  // namespace polyquant

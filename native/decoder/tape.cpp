#include "decoder/tape.hpp"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace polyquant {

thread_local Tape* recording = nullptr;

void Lender::Free::operator()(float* p) const { std::free(p); }

float* Lender::lend(size_t floats) {
  if (auto& again = free_[floats]; !again.empty()) {
    float* p = again.back();
    again.pop_back();
    return p;
  }
  auto* made = static_cast<float*>(std::aligned_alloc(64, std::max<size_t>(1, (floats + 15) / 16) * 64));
  if (!made) throw std::bad_alloc();
  blocks_.emplace_back(made, floats);
  return made;
}

bool Lender::owns(const float* p) const {
  return std::any_of(blocks_.begin(), blocks_.end(),
                     [=](const auto& b) { return p >= b.first.get() && p < b.first.get() + b.second; });
}

size_t Lender::bytes() const {
  size_t sum = 0;
  for (const auto& b : blocks_) sum += b.second * sizeof(float);
  return sum;
}

void Tape::run(size_t position) const {
  for (const auto& step : steps) step(position);
}

void positions_to(size_t start, size_t count, size_t room) {
  if (!recording) return;
  recording->complete &= count == 1 && (recording->start == SIZE_MAX || recording->start == start);
  recording->start = start;
  recording->room = std::min(recording->room, room);
}

}  // namespace polyquant

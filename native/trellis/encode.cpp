// The encoder's frame: the seam, the traceback, and a walk for any processor. A path through the trellis has one state
// per
// value: state j shares its low window - bits bits (its group) with the high bits of state j - 1.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "base/threads.hpp"
#include "kernel_sets.hpp"
#include "trellis/trellis.hpp"

namespace polyquant {
namespace {

inline int distance(const TrellisSearch& s, int x, size_t state) {
  const int d = std::clamp((x - int(s.levels[state])) * (1 << s.doublings), -32768, 32767);
  return (d * d + 0x4000) >> 15;
}

void walk_plain(const TrellisSearch& s, const int16_t*, const int16_t* x[2], size_t steps,
                const TrellisTrail trail[2]) {
  const size_t groups = s.groups();
  for (int t = 0; t < 2; ++t)
    for (size_t j = 0; j < steps; ++j) {
      const uint16_t* metric = trail[t].at(j);
      uint16_t* next = trail[t].at(j + 1);
      const int base = *std::min_element(metric, metric + groups);
      trail[t].base[j] = uint16_t(base);
      for (size_t q = 0; q < groups; ++q) {
        int best = 65535;
        for (size_t b = 0; b < size_t(1) << s.bits; ++b) {
          const size_t state = q << s.bits | b;
          best = std::min(best, int(metric[state & (groups - 1)]) + distance(s, x[t][j], state));
        }
        next[q] = uint16_t(best - base);
      }
    }
}

// The completed walk, traversed from its end.
struct WayBack {
  const TrellisSearch& s;
  const TrellisWalk& way;
  const int16_t* x;
  const TrellisTrail& trail;

  int metric(size_t step, size_t group) const {
    if (step % trail.every == 0) return trail.at(step)[way.place(s, group)];
    return best(step - 1, group).first - trail.base[step - 1];
  }

  // The smallest sum with which step `step` reaches a group, and the first state that attains it: without branches,
  // which would be mispredicted.
  std::pair<int, size_t> best(size_t step, size_t group) const {
    const size_t first = group << s.bits, choices = size_t(1) << s.bits;
    unsigned found = ~0u;
    for (size_t b = 0; b < choices; ++b) {
      const int before = metric(step, (first + b) & (s.groups() - 1));
      const unsigned sum = unsigned(std::min(65535, before + distance(s, x[step], first + b)));
      found = std::min(found, sum << 8 | unsigned(b));
    }
    return {int(found >> 8), first + (found & 255)};
  }

  // Goes from `group` after step last - 1 back to the group before step `first`, which is returned; states[j] is the
  // state at
  // step j.
  size_t go(size_t first, size_t last, size_t group, uint16_t* states) const {
    for (size_t j = last; j-- > first;) {
      states[j] = uint16_t(best(j, group).second);
      group = states[j] & (s.groups() - 1);
    }
    return group;
  }
};

// An array aligned to a cache line: vectors that straddle two lines load at half speed.
template <class T>
struct Lines {
  std::vector<T> numbers;
  T* of(size_t count) {
    if (numbers.size() < count + 64 / sizeof(T)) numbers.resize(count + 64 / sizeof(T));
    return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(numbers.data()) + 63) / 64 * 64);
  }
};

struct Room {
  Lines<uint16_t> history[2];
  uint16_t base[2][kTile];
  int16_t x[2][kTile], around[2][kTile];
  uint16_t states[kTile];
};

// Rows that would exceed the caches in total are not all kept.
size_t kept_every(const TrellisSearch& s) { return s.window < 15 || s.bits > 3 ? 1 : 2; }

void encode_two(const float* tiles, const TrellisSearch& s, const TrellisWalk& way, Room& room, uint8_t* codes,
                int count) {
  static_assert(2 * kSeam == kTile);
  const size_t row = way.row(s), every = kept_every(s), kept = kTile / every + 1;
  TrellisTrail trail[2];
  const int16_t *x[2], *around[2];
  for (int t = 0; t < 2; ++t) {
    uint16_t* rows = room.history[t].of((kept + every) * row);
    trail[t] = {rows, rows + kept * row, room.base[t], every, row};
    const float* tile = tiles + (t < count ? t : 0) * kTile;
    for (size_t j = 0; j < kTile; ++j) {
      const float scaled = tile[j] * s.factor;
      room.x[t][j] = int16_t(std::nearbyint(std::clamp(scaled == scaled ? scaled : 0.0f, -32767.0f, 32767.0f)));
    }
    std::memcpy(room.around[t], room.x[t] + kTile - kSeam, kSeam * sizeof(int16_t));
    std::memcpy(room.around[t] + kSeam, room.x[t], kSeam * sizeof(int16_t));
    x[t] = room.x[t], around[t] = room.around[t];
    std::memset(rows, 0, row * sizeof(uint16_t));
  }
  way.walk(s, way.table, around, kTile, trail);
  size_t seam[2];
  for (int t = 0; t < 2; ++t) {
    const uint16_t* last = trail[t].at(kTile);
    size_t best = 0;
    for (size_t g = 1; g < s.groups(); ++g)
      if (last[way.place(s, g)] < last[way.place(s, best)]) best = g;
    seam[t] = WayBack{s, way, around[t], trail[t]}.go(kSeam, kTile, best, room.states);
    std::fill_n(trail[t].kept, row, uint16_t(65535));
    trail[t].kept[way.place(s, seam[t])] = 0;
  }
  way.walk(s, way.table, x, kTile, trail);
  for (int t = 0; t < count; ++t) {
    WayBack{s, way, x[t], trail[t]}.go(0, kTile, seam[t], room.states);
    for (size_t j = 0; j < kTile; ++j) codes[size_t(t) * kTile + j] = uint8_t(room.states[j] & ((1u << s.bits) - 1));
  }
}

// levels[q << bits | b] for as many adjacent q as lanes, then the next b
void in_planes(const TrellisSearch& s, size_t lanes, int16_t* out) {
  const size_t choices = size_t(1) << s.bits, groups = s.groups();
  for (size_t n = 0; n < groups; ++n) {
    const size_t block = lanes * choices, q = trellis_block(s, lanes, n / block * block) + n % block;
    for (size_t b = 0; b < choices; ++b) out[(n / lanes * choices + b) * lanes + n % lanes] = s.levels[q << s.bits | b];
  }
}

}  // namespace

void trellis_encode(const float* tiles, size_t count, const TrellisSearch& search, uint8_t* codes) {
  TrellisSearch s = search;
  s.clear = 32767;
  for (size_t i = 0; i < size_t(1) << s.window; ++i) s.clear = std::min(s.clear, 32767 - std::abs(int(s.levels[i])));
  TrellisWalk way{s.levels, walk_plain};
  Lines<int16_t> arranged;
  TrellisWalker walk = nullptr;
  for (const auto find : kernel_set().walkers)
    if (find && !walk) walk = find(s, &way.lanes);
  if (walk) way.walk = walk;
  if (walk && way.lanes) {
    int16_t* const table = arranged.of(size_t(1) << s.window);
    in_planes(s, way.lanes, table);
    way.table = table;
  }
  parallel_for((count + 1) / 2, [&](size_t pair) {
    thread_local Room room;
    encode_two(tiles + 2 * pair * kTile, s, way, room, codes + 2 * pair * kTile,
               int(std::min<size_t>(2, count - 2 * pair)));
  });
}

}  // namespace polyquant

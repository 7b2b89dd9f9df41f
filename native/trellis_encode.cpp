// The encoder's frame: the seam, the way back, and a walk for any processor. A path through the trellis has one state a number: state j
// shares its low window - bits bits (its group) with state j - 1, whose high bits they are.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "threads.hpp"
#include "trellis.hpp"

namespace polyquant {
namespace {

inline int distance(const TrellisSearch& s, int x, size_t state) {
  int d = std::clamp(x - int(s.levels[state]), -32768, 32767);
  for (int i = 0; i < s.doublings; ++i) d = std::clamp(2 * d, -32768, 32767);
  return (d * d + 0x4000) >> 15;
}

inline int sum(const TrellisSearch& s, const uint16_t* metric, const TrellisWalk& way, int x, size_t state) {
  return std::min(65535, int(metric[way.place(s, state & (s.groups() - 1))]) + distance(s, x, state));
}

void walk_plain(const TrellisSearch& s, const int16_t*, const int16_t* x[2], size_t steps, uint16_t* history[2]) {
  const size_t groups = s.groups();
  const TrellisWalk way{nullptr, nullptr, false};
  for (int t = 0; t < 2; ++t)
    for (size_t j = 0; j < steps; ++j) {
      const uint16_t* metric = history[t] + j * groups;
      uint16_t* next = history[t] + (j + 1) * groups;
      const int base = *std::min_element(metric, metric + groups);
      for (size_t q = 0; q < groups; ++q) {
        int best = 65535;
        for (size_t b = 0; b < size_t(1) << s.bits; ++b) best = std::min(best, sum(s, metric, way, x[t][j], q << s.bits | b));
        next[q] = uint16_t(best - base);
      }
    }
}

// From `group` after the last step to the one before the first, which is returned; states[j] is passed on the way.
size_t walk_back(const TrellisSearch& s, const TrellisWalk& way, const int16_t* x, size_t steps, const uint16_t* history, size_t group, uint16_t* states) {
  const size_t groups = s.groups(), row = way.row(s);
  for (size_t j = steps; j-- > 0;) {
    const uint16_t* metric = history + j * row;
    size_t best = group << s.bits;
    int least = 65536;
    for (size_t b = 0; b < size_t(1) << s.bits; ++b) {
      const int found = sum(s, metric, way, x[j], group << s.bits | b);
      if (found < least) least = found, best = group << s.bits | b;
    }
    states[j] = uint16_t(best);
    group = best & (groups - 1);
  }
  return group;
}

// Numbers in memory that begins with a cache line: vectors that straddle two lines load at half speed.
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
  int16_t x[2][kTile], around[2][2 * kSeam];
  uint16_t states[kTile];
};

void encode_two(const float* tiles, const TrellisSearch& s, const TrellisWalk& way, Room& room, uint8_t* codes, int count) {
  const size_t groups = s.groups(), row = way.row(s);
  uint16_t* history[2];
  const int16_t *x[2], *around[2];
  for (int t = 0; t < 2; ++t) {
    history[t] = room.history[t].of((kTile + 1) * row);
    const float* tile = tiles + (t < count ? t : 0) * kTile;
    for (size_t j = 0; j < kTile; ++j) {
      const float scaled = tile[j] * s.factor;
      room.x[t][j] = int16_t(std::nearbyint(std::clamp(scaled == scaled ? scaled : 0.0f, -32767.0f, 32767.0f)));
    }
    std::memcpy(room.around[t], room.x[t] + kTile - kSeam, kSeam * sizeof(int16_t));
    std::memcpy(room.around[t] + kSeam, room.x[t], kSeam * sizeof(int16_t));
    x[t] = room.x[t], around[t] = room.around[t];
    std::memset(history[t], 0, row * sizeof(uint16_t));
  }
  way.walk(s, way.table, around, 2 * kSeam, history);
  size_t seam[2];
  for (int t = 0; t < 2; ++t) {
    const uint16_t* last = history[t] + 2 * kSeam * row;
    size_t best = 0;
    for (size_t g = 1; g < groups; ++g)
      if (last[way.place(s, g)] < last[way.place(s, best)]) best = g;
    seam[t] = walk_back(s, way, around[t] + kSeam, kSeam, history[t] + kSeam * row, best, room.states);
    std::fill_n(history[t], row, uint16_t(65535));
    history[t][way.place(s, seam[t])] = 0;
  }
  way.walk(s, way.table, x, kTile, history);
  for (int t = 0; t < count; ++t) {
    walk_back(s, way, x[t], kTile, history[t], seam[t], room.states);
    for (size_t j = 0; j < kTile; ++j) codes[size_t(t) * kTile + j] = uint8_t(room.states[j] & ((1u << s.bits) - 1));
  }
}

// levels[q << bits | b] for 16 neighbours q together, then the next b
void in_planes(const TrellisSearch& s, int16_t* out) {
  const size_t choices = size_t(1) << s.bits, groups = s.groups();
  for (size_t n = 0; n < groups; ++n) {
    const size_t block = 16 * choices, q = trellis_block(s, n / block * block) + n % block;
    for (size_t b = 0; b < choices; ++b) out[(n / 16 * choices + b) * 16 + n % 16] = s.levels[q << s.bits | b];
  }
}

}  // namespace

void trellis_encode(const float* tiles, size_t count, const TrellisSearch& s, uint8_t* codes) {
  TrellisWalk way{s.levels, walk_plain, false};
  Lines<int16_t> arranged;
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx2"))
    if (const TrellisWalker walk = trellis_walk_avx2(s, &way.planes)) {
      way.walk = walk;
      if (way.planes) {
        int16_t* const table = arranged.of(size_t(1) << s.window);
        in_planes(s, table);
        way.table = table;
      }
    }
#endif
  parallel_for((count + 1) / 2, [&](size_t pair) {
    thread_local Room room;
    encode_two(tiles + 2 * pair * kTile, s, way, room, codes + 2 * pair * kTile, int(std::min<size_t>(2, count - 2 * pair)));
  });
}

}  // namespace polyquant

// K types, encoding: the search of src/polyquant/quantizers/k_search.py, operation by operation, so the bytes are
// equal.
// One tile holds one super-block of 16 sub-blocks or two of 8.
#include <algorithm>
#include <cmath>

#include "codecs/blocks.hpp"
#include "codecs/ggml_k.hpp"
#include "codecs/ggml_k_tile.hpp"

namespace polyquant {
namespace {

using namespace k_search;

// ---------------------------------------------------------------- w = (d * sub) * q - (dmin * submin)

template <int W>
struct Affine {
  static constexpr int kPer = Tile<W>::kPer, kBlocks = Tile<W>::kBlocks;
  Tile<W> tile;
  int subs, second;       // largest integer of sub-scales and minima; the second anchor tried for every block
  Lane sign, scale, min;  // best real-valued scale and minimum of each sub-block

  struct State {
    Lane d, dmin, sub, min, error;  // super-scales, repeated in each lane of their block
    PQ_INLINE void scales(Lane& s, Lane& m) const {
      for (int l = 0; l < kLanes; ++l) s[l] = d[l] * sub[l], m[l] = dmin[l] * min[l];
    }
  };

  // Blocks with mostly positive weights are encoded negated: minima only extend below zero.
  PQ_INLINE void orient(Lane& lo, Lane& range) {
    Lane down, up;
    tile.extremes(down, up);
    for (int b = 0; b < kBlocks; ++b) {
      float plain = 0, negated = 0;
      for (int l = b * kPer; l < (b + 1) * kPer; ++l) {
        const float p = up[l] - (down[l] < 0 ? down[l] : 0.0f), n = (up[l] > 0 ? up[l] : 0.0f) - down[l];
        plain += p * p;
        negated += n * n;
      }
      for (int l = b * kPer; l < (b + 1) * kPer; ++l) sign[l] = negated < plain ? -1.0f : 1.0f;
    }
    for (int l = 0; l < kLanes; ++l) {
      const float a = sign[l] > 0 ? down[l] : -up[l], b = sign[l] > 0 ? up[l] : -down[l];
      lo[l] = a < 0 ? a : 0.0f;
      range[l] = b - lo[l];
      tile.sx[l] *= sign[l];
    }
    for (int i = 0; i < W; ++i)
      for (int l = 0; l < kLanes; ++l) tile.x[i][l] *= sign[l];
  }

  // Least squares on the codes of seven initial scales.
  PQ_INLINE void start() {
    Lane lo, range, gain, offset, inv;
    orient(lo, range);
    for (int l = 0; l < kLanes; ++l) {
      scale[l] = range[l] / tile.hi;
      min[l] = offset[l] = -lo[l];
      gain[l] = 0;
    }
    for (float t : kAffineStarts) {
      for (int l = 0; l < kLanes; ++l) inv[l] = (tile.hi + t) * inverse(range[l]);
      Sums c;
      tile.sums(inv, offset, c);
      for (int l = 0; l < kLanes; ++l) {
        const float product = tile.sw[l] * c.qq[l], det = product - c.q[l] * c.q[l], inv_det = inverse(det);
        const float m1 = (c.q[l] * c.xq[l] - c.qq[l] * tile.sx[l]) * inv_det;
        const float s1 = (tile.sw[l] * c.xq[l] - tile.sx[l] * c.q[l]) * inv_det;
        const float m = m1 > 0 ? m1 : 0.0f, s = m1 > 0 ? s1 : c.xq[l] * inverse(c.qq[l]);
        const float g = s * c.xq[l] - m * tile.sx[l];
        const bool better = (det > kSingular * product) & (g > gain[l] * kMargin);
        gain[l] = better ? g : gain[l];
        scale[l] = better ? s : scale[l];
        min[l] = better ? m : min[l];
      }
    }
  }

  // The integers of every sub-block for given super-scales: the nearest, then the best of a window by true error.
  // The minimum's window is centered on the least-squares minimum of each scale, for the current codes.
  PQ_INLINE void refine(State& at, const Lane& scale, const Lane& min, int window) const {
    Lane s, m, base, inv, inv_min;
    for (int l = 0; l < kLanes; ++l) {
      inv_min[l] = inverse(at.dmin[l]);
      at.sub[l] = base[l] = nearest(scale[l] * inverse(at.d[l]), 0.0f, float(subs));
      at.min[l] = nearest(min[l] * inv_min[l], 0.0f, float(subs));
    }
    at.scales(s, m);
    tile.error(s, m, at.error);
    for (int l = 0; l < kLanes; ++l) inv[l] = inverse(s[l]);
    Sums c;
    tile.sums(inv, m, c);
    for (int i = -window; i <= window; ++i) {
      Lane sub, centre;
      for (int l = 0; l < kLanes; ++l) {
        sub[l] = clamp(base[l] + float(i), 0.0f, float(subs));
        s[l] = at.d[l] * sub[l];
        centre[l] = nearest(((s[l] * c.q[l] - tile.sx[l]) / tile.sw[l]) * inv_min[l], 0.0f, float(subs));
      }
      for (int j = -1; j <= 1; ++j) {
        Lane submin, e;
        for (int l = 0; l < kLanes; ++l) {
          submin[l] = clamp(centre[l] + float(j), 0.0f, float(subs));
          m[l] = at.dmin[l] * submin[l];
        }
        tile.error(s, m, e);
        for (int l = 0; l < kLanes; ++l) {
          const bool better = e[l] < at.error[l];
          at.error[l] = better ? e[l] : at.error[l];
          at.sub[l] = better ? sub[l] : at.sub[l];
          at.min[l] = better ? submin[l] : at.min[l];
        }
      }
    }
  }

  // Least-squares super-scales for the integers and codes of `at`, rounded to fp16.
  PQ_INLINE void refit(State& at) const {
    Lane s, m, inv;
    at.scales(s, m);
    for (int l = 0; l < kLanes; ++l) inv[l] = inverse(s[l]);
    Sums c;
    tile.sums(inv, m, c);
    for (int b = 0; b < kBlocks; ++b) {
      const int first = b * kPer;
      float A = 0, B = 0, C = 0, X = 0, Y = 0;
      for (int l = first; l < first + kPer; ++l) {
        A += (at.sub[l] * at.sub[l]) * c.qq[l];
        B += (at.sub[l] * at.min[l]) * c.q[l];
        C += (at.min[l] * at.min[l]) * tile.sw[l];
        X += at.sub[l] * c.xq[l];
        Y += at.min[l] * tile.sx[l];
      }
      const float det = A * C - B * B, old = at.dmin[first];
      const bool regular = det > kSingular * (A * C);
      const float new_d = regular ? (X * C - B * Y) / det : A > 0 ? (X + old * B) / A : at.d[first];
      const float new_min = regular ? (B * X - A * Y) / det : old;
      std::fill_n(at.d + first, kPer, super_scale(new_d));
      std::fill_n(at.dmin + first, kPer, super_scale(new_min));
    }
  }

  // Super-scales that map the largest scale and minimum to the integer `anchor`; refined, refitted, refined.
  PQ_INLINE void attempt(State& best, int anchor, const bool* wanted) const {
    State at;
    for (int b = 0; b < kBlocks; ++b) {
      const int first = b * kPer;
      const float s = *std::max_element(scale + first, scale + first + kPer);
      const float m = *std::max_element(min + first, min + first + kPer);
      std::fill_n(at.d + first, kPer, super_scale(s / float(anchor)));
      std::fill_n(at.dmin + first, kPer, super_scale(m / float(anchor)));
    }
    Lane s, m;
    std::copy_n(scale, kLanes, s);
    std::copy_n(min, kLanes, m);
    for (int window = 2;; window = 1) {
      refine(at, s, m, window);
      keep(best, at, wanted);
      if (window == 1) return;
      at.scales(s, m);
      refit(at);
    }
  }

  PQ_INLINE void keep(State& best, const State& at, const bool* wanted) const {
    for (int b = 0; b < kBlocks; ++b) {
      const int first = b * kPer;
      if (!wanted[b] || !(tile.total(at.error, first) < tile.total(best.error, first))) continue;
      for (int l = first; l < first + kPer; ++l) {
        best.d[l] = at.d[l];
        best.dmin[l] = at.dmin[l];
        best.sub[l] = at.sub[l];
        best.min[l] = at.min[l];
        best.error[l] = at.error[l];
      }
    }
  }

  // Two anchors for every block; all anchors for blocks that are exact except for the rounding of super-scales.
  PQ_INLINE void search(State& best) {
    bool wanted[kBlocks], any = true;
    std::fill_n(wanted, kBlocks, true);
    std::fill_n(best.error, kLanes, INFINITY);
    start();
    for (int k = 0; any && k < kAnchors; ++k) {
      attempt(best, anchor(k, subs, second), wanted);
      if (k != 1) continue;
      any = false;
      for (int b = 0; b < kBlocks; ++b) any |= wanted[b] = tile.nearly_exact(best.error, b * kPer);
    }
  }

  // codes [kBlocks * 256]
  PQ_INLINE void codes(const State& at, uint8_t* out) const {
    Lane s, m;
    at.scales(s, m);
    for (int l = 0; l < kLanes; ++l) {
      const float inv = inverse(s[l]);
      for (int i = 0; i < W; ++i) out[l * W + i] = uint8_t(tile.code(tile.x[i][l], m[l], inv));
    }
  }
};

// ---------------------------------------------------------------- w = (d * sub) * q

struct Symmetric {
  static constexpr int kPer = 16, kBlocks = 1;
  Tile<16> tile;
  int subs, second, window;
  Lane scale, zero = {};  // best real-valued scale of each sub-block

  struct State {
    float d;
    Lane sub, error;
    PQ_INLINE void scales(Lane& s) const {
      for (int l = 0; l < kLanes; ++l) s[l] = d * sub[l];
    }
  };

  // Least squares on the codes of five initial scales of either sign; the first maps the weight of largest magnitude to
  // the
  // lowest code.
  PQ_INLINE void start() {
    Lane lo, hi, peak, inv, gain;
    tile.extremes(lo, hi);
    for (int l = 0; l < kLanes; ++l) {
      peak[l] = hi[l] > -lo[l] ? hi[l] : lo[l];
      scale[l] = gain[l] = 0;
    }
    for (float side : {-1.0f, 1.0f})
      for (float t : kSymmetricStarts) {
        for (int l = 0; l < kLanes; ++l) inv[l] = (side * (-tile.lo + t)) * inverse(peak[l]);
        Sums c;
        tile.sums(inv, zero, c);
        for (int l = 0; l < kLanes; ++l) {
          const float s = c.xq[l] * inverse(c.qq[l]), g = s * c.xq[l];
          const bool better = g > gain[l] * kMargin;
          gain[l] = better ? g : gain[l];
          scale[l] = better ? s : scale[l];
        }
      }
  }

  PQ_INLINE void refine(State& at, const Lane& scale, int window) const {
    Lane base, s;
    const float inv = inverse(at.d);
    for (int l = 0; l < kLanes; ++l) at.sub[l] = base[l] = nearest(scale[l] * inv, float(-subs), float(subs - 1));
    at.scales(s);
    tile.error(s, zero, at.error);
    for (int k = -window; k <= window; ++k) {
      Lane sub, e;
      for (int l = 0; l < kLanes; ++l) {
        sub[l] = clamp(base[l] + float(k), float(-subs), float(subs - 1));
        s[l] = at.d * sub[l];
      }
      tile.error(s, zero, e);
      for (int l = 0; l < kLanes; ++l) {
        const bool better = e[l] < at.error[l];
        at.error[l] = better ? e[l] : at.error[l];
        at.sub[l] = better ? sub[l] : at.sub[l];
      }
    }
  }

  PQ_INLINE float refit(const State& at) const {
    Lane s, inv;
    at.scales(s);
    for (int l = 0; l < kLanes; ++l) inv[l] = inverse(s[l]);
    Sums c;
    tile.sums(inv, zero, c);
    float A = 0, X = 0;
    for (int l = 0; l < kLanes; ++l) {
      A += (at.sub[l] * at.sub[l]) * c.qq[l];
      X += at.sub[l] * c.xq[l];
    }
    const float d = A > 0 ? X / A : at.d;
    return d < 0 ? -super_scale(-d) : super_scale(d);
  }

  // A super-scale that maps the scale of largest magnitude to the integer -anchor; refined, refitted, refined.
  PQ_INLINE void attempt(State& best, int anchor) const {
    State at;
    float peak = 0;
    for (int l = 0; l < kLanes; ++l) peak = std::fabs(scale[l]) > std::fabs(peak) ? scale[l] : peak;
    const float d = super_scale(std::fabs(peak) / float(anchor));
    at.d = peak > 0 ? -d : d;
    Lane s;
    std::copy_n(scale, kLanes, s);
    for (int pass = 0;; ++pass) {
      refine(at, s, pass == 0 ? window : 1);
      keep(best, at);
      if (pass == 1) return;
      at.scales(s);
      at.d = refit(at);
    }
  }

  PQ_INLINE void keep(State& best, const State& at) const {
    if (tile.total(at.error, 0) < tile.total(best.error, 0)) best = at;
  }

  // See Affine::search.
  PQ_INLINE void search(State& best) {
    std::fill_n(best.error, kLanes, INFINITY);
    start();
    for (int k = 0; k < kAnchors; ++k) {
      attempt(best, anchor(k, subs, second));
      if (k == 1 && !tile.nearly_exact(best.error, 0)) break;
    }
  }

  PQ_INLINE void codes(const State& at, uint8_t* out) const {
    Lane s;
    at.scales(s);
    for (int l = 0; l < kLanes; ++l) {
      const float inv = inverse(s[l]);
      for (int i = 0; i < 16; ++i) out[l * 16 + i] = uint8_t(int(tile.code(tile.x[i][l], 0.0f, inv)) - int(tile.lo));
    }
  }
};

// ---------------------------------------------------------------- codes -> bytes

// Byte i of each group of `width` holds the low bits of `fields` codes with a stride of `width`, lowest field first.
template <int Width, int Fields, int Bits>
PQ_INLINE void join(const uint8_t* q, uint8_t* out, int bytes, int shift) {
  for (int g = 0; g < bytes; g += Width, q += Width * Fields)
    for (int i = 0; i < Width; ++i) {
      int v = 0;
      for (int f = 0; f < Fields; ++f) v |= (q[f * Width + i] >> shift & ((1 << Bits) - 1)) << f * Bits;
      out[g + i] = uint8_t(v);
    }
}

PQ_INLINE void pack_scale_min(const float* sub, const float* min, uint8_t* out) {
  for (int j = 0; j < 4; ++j) {
    const int a = int(sub[j + 4]), b = int(min[j + 4]);
    out[j] = uint8_t(int(sub[j]) | a >> 4 << 6);
    out[j + 4] = uint8_t(int(min[j]) | b >> 4 << 6);
    out[j + 8] = uint8_t((a & 15) | (b & 15) << 4);
  }
}

PQ_INLINE void pack(const Affine<16>& k, const Affine<16>::State& at, int, const uint8_t* q, uint8_t* out) {
  for (int s = 0; s < 16; ++s) out[s] = uint8_t(int(at.sub[s]) | int(at.min[s]) << 4);
  join<32, 4, 2>(q, out + 16, 64, 0);
  store_half(out + 80, k.sign[0] * at.d[0]);
  store_half(out + 82, k.sign[0] * at.dmin[0]);
}

PQ_INLINE void pack(const Affine<32>& k, const Affine<32>::State& at, int first, const uint8_t* q, uint8_t* out) {
  store_half(out, k.sign[first] * at.d[first]);
  store_half(out + 2, k.sign[first] * at.dmin[first]);
  pack_scale_min(at.sub + first, at.min + first, out + 4);
  const bool five = k.tile.hi > 15;
  if (five) join<32, 8, 1>(q, out + 16, 32, 4);
  join<32, 2, 4>(q, out + (five ? 48 : 16), 128, 0);
}

PQ_INLINE void pack(const Symmetric& k, const Symmetric::State& at, int, const uint8_t* q, uint8_t* out) {
  uint8_t sub[16];
  if (k.subs == 32) {
    for (int s = 0; s < 16; ++s) sub[s] = uint8_t(int(at.sub[s]) + 32);
    join<32, 8, 1>(q, out, 32, 2);
    join<32, 4, 2>(q, out + 32, 64, 0);
    join<8, 2, 4>(sub, out + 96, 8, 0);
    join<4, 4, 2>(sub, out + 104, 4, 4);
    store_half(out + 108, at.d);
  } else {
    join<64, 2, 4>(q, out, 128, 0);
    join<32, 4, 2>(q, out + 128, 64, 4);
    for (int s = 0; s < 16; ++s) out[192 + s] = uint8_t(int8_t(int(at.sub[s])));
    store_half(out + 208, at.d);
  }
}

// ---------------------------------------------------------------- rows

// One super-block's importance, scaled to at most 1 and at least 2^-20: products stay in range and every weight counts.
PQ_INLINE void scaled_importance(const float* src, float* dst) {
  float peak = 0;
  for (int i = 0; i < 256; ++i) {
    dst[i] = clamp(src[i], 0.0f, 1e30f);
    peak = dst[i] > peak ? dst[i] : peak;
  }
  for (int i = 0; i < 256; ++i) dst[i] = peak > 0 ? std::max(dst[i] / peak, 0x1p-20f) : 1.0f;
}

template <class Search>
PQ_INLINE void encode(Search& search, const float* src, uint8_t* dst, size_t blocks, size_t per_row,
                      const float* importance, size_t bytes) {
  constexpr int step = Search::kBlocks;
  typename Search::State state = {};
  uint8_t q[step * 256];
  float weights[step * 256];
  std::fill_n(weights, step * 256, 1.0f);
  for (size_t i = 0; i < blocks; i += step) {
    const int n = int(std::min<size_t>(step, blocks - i));
    if (importance)
      for (int b = 0; b < n; ++b) scaled_importance(importance + (i + size_t(b)) % per_row * 256, weights + b * 256);
    search.tile.load(src + i * 256, weights, n);
    search.search(state);
    search.codes(state, q);
    for (int b = 0; b < n; ++b) pack(search, state, b * Search::kPer, q + b * 256, dst + (i + size_t(b)) * bytes);
  }
}

PQ_SIMD void encode_affine_16(const float* src, uint8_t* dst, size_t blocks, size_t per_row, const float* importance) {
  Affine<16> k;
  k.tile.lo = 0, k.tile.hi = 3, k.subs = 15, k.second = 13;
  encode(k, src, dst, blocks, per_row, importance, 84);
}

PQ_SIMD void encode_affine_32(const float* src, uint8_t* dst, size_t blocks, size_t per_row, const float* importance,
                              int codes) {
  Affine<32> k;
  k.tile.lo = 0, k.tile.hi = float(codes), k.subs = 63, k.second = 55;
  encode(k, src, dst, blocks, per_row, importance, codes == 15 ? 144 : 176);
}

PQ_SIMD void encode_symmetric(const float* src, uint8_t* dst, size_t blocks, size_t per_row, const float* importance,
                              int half) {
  Symmetric k;
  k.tile.lo = float(-half), k.tile.hi = float(half - 1);
  k.subs = half == 4 ? 32 : 128, k.second = half == 4 ? 24 : 122, k.window = half == 4 ? 2 : 6;
  encode(k, src, dst, blocks, per_row, importance, half == 4 ? 110 : 210);
}

}  // namespace

void quantize_q2_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  encode_affine_16(src, dst, rows * cols / 256, cols / 256, importance);
}

void quantize_q3_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  encode_symmetric(src, dst, rows * cols / 256, cols / 256, importance, 4);
}

void quantize_q4_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  encode_affine_32(src, dst, rows * cols / 256, cols / 256, importance, 15);
}

void quantize_q5_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  encode_affine_32(src, dst, rows * cols / 256, cols / 256, importance, 31);
}

void quantize_q6_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float* importance) {
  encode_symmetric(src, dst, rows * cols / 256, cols / 256, importance, 32);
}

// Bytes equal to ggml's: no search, the largest magnitude maps to -127.
PQ_SIMD void quantize_q8_k(const float* src, uint8_t* dst, size_t rows, size_t cols, const float*) {
  for (size_t i = 0; i < rows * cols / 256; ++i, src += 256, dst += 292) {
    float peak = 0;
    for (int j = 0; j < 256; ++j) peak = std::fabs(src[j]) > std::fabs(peak) ? src[j] : peak;
    const float factor = peak != 0 ? -127.0f / peak : 0.0f;
    store(dst, inverse(factor));
    for (int s = 0; s < 16; ++s) {
      int sum = 0;
      for (int j = 16 * s; j < 16 * s + 16; ++j) {
        const int q = int(nearest(src[j] * factor, -128.0f, 127.0f));
        dst[4 + j] = uint8_t(int8_t(q));
        sum += q;
      }
      store(dst + 260 + 2 * s, int16_t(sum));
    }
  }
}

}  // namespace polyquant

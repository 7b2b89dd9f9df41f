// Tables of scales: 16-bit floats to float32, and back if every number fits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace polyquant {

// stored: IEEE halves, or bfloat16.
void widen_halves(const uint16_t* stored, float* values, size_t n);
void widen_bfloats(const uint16_t* stored, float* values, size_t n);

// Rounds half to even. False if a number is not finite afterwards, or becomes zero.
bool narrow_halves(const float* values, uint16_t* stored, size_t n);
bool narrow_bfloats(const float* values, uint16_t* stored, size_t n);

}  // namespace polyquant

// The kernels of matrices for each instruction set, and the choice of one when the program runs.
#pragma once

#include <span>
#include <string_view>

#include "affine/matrix.hpp"
#include "packed/packed.hpp"
#include "trellis/matrix.hpp"
#include "trellis/trellis.hpp"

namespace polyquant {

struct KernelSet {
  const char* name;    // of an instruction set: "AVX2"
  const char* option;  // of POLYQUANT_ISA: "avx2"
  bool (*supported)();
  const PackedSet& (*packed)();
  std::span<const PackedKernel> (*grouped)();
  const AffineSet& (*affine)();
  const TrellisSet& (*trellis)();
  // Of Trellis encoders, the first that has one for a search is used.
  TrellisWalker (*walkers[2])(const TrellisSearch& search, size_t* lanes) = {};
};

std::span<const KernelSet> kernel_sets();  // of this build, the fastest first, for any processor the last
const KernelSet& kernel_set();             // the chosen one, or the first that this processor supports

// Chooses the set of an option; an empty one: the first that is supported. Existing matrices keep their kernels.
// Returns false if there is none or this processor lacks the instructions.
bool use_kernels(std::string_view option);

}  // namespace polyquant

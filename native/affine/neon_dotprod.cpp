#if defined(__aarch64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "affine/kernels_neon.hpp"

namespace polyquant {

const AffineSet& affine_neon_dotprod() { return kSet; }

}  // namespace polyquant
#endif

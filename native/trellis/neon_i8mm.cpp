#if defined(__aarch64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "trellis/kernels_neon.hpp"

namespace polyquant {

const TrellisSet& trellis_neon_i8mm() { return neon_set<false>(); }

}  // namespace polyquant
#endif

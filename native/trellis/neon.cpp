#if defined(__aarch64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "trellis/kernels_neon.hpp"

namespace polyquant {

const TrellisSet& trellis_neon() { return neon_set<true>(); }

}  // namespace polyquant
#endif

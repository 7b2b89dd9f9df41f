#if defined(__aarch64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#define PQ_NEON
#include "packed/table.hpp"

namespace polyquant {

const PackedSet& packed_neon_i8mm() { return kSet; }

}  // namespace polyquant
#endif

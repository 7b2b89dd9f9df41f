#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "packed/table.hpp"

namespace polyquant {

const PackedSet& packed_avx_vnni() { return kSet; }

}  // namespace polyquant
#endif

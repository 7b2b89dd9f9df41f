#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "exact/kernels.hpp"

namespace polyquant {

const ExactSet& exact_avx512() { return kSet; }

}  // namespace polyquant
#endif

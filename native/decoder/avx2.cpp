#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "decoder/kernels.hpp"

namespace polyquant {

const DecoderSet& decoder_avx2() { return kSet; }

}  // namespace polyquant
#endif

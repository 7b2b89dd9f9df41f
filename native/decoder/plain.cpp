#include "decoder/kernels.hpp"

namespace polyquant {

const DecoderSet& decoder_plain() { return kSet; }

}  // namespace polyquant

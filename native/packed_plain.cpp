#include "packed_table.hpp"

namespace polyquant {

const PackedSet& packed_plain() {
  static constexpr PackedSet set{"plain",         kKernels,        round_blocks,  round_token,
                                 multiply_floats, kMultiplyHalves, kPutFloatLanes};
  return set;
}

}  // namespace polyquant

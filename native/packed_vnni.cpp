#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "packed_table.hpp"

namespace polyquant {

const PackedSet& packed_vnni() {
  static constexpr PackedSet set{"AVX-512 VNNI",  kKernels,        round_blocks,  round_token,
                                 multiply_floats, kMultiplyHalves, kPutFloatLanes};
  return set;
}

const PackedSet& packed_amx() {
  static const PackedSet set = [] {
    PackedSet s = packed_vnni();
    s.name = "AVX-512 VNNI with AMX", s.tiles = tiles_amx();
    return s;
  }();
  return set;
}

}  // namespace polyquant
#endif

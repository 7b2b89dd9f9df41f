#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "packed/table.hpp"

namespace polyquant {

const PackedSet& packed_vnni() { return kSet; }

const PackedSet& packed_amx() {
  static const PackedSet set = [] {
    PackedSet s = packed_vnni();
    s.tiles = tiles_amx();
    return s;
  }();
  return set;
}

}  // namespace polyquant
#endif

#include "packed/table.hpp"

namespace polyquant {

const PackedSet& packed_plain() { return kSet; }

}  // namespace polyquant

#include "grouped/table.hpp"

namespace polyquant {

std::span<const PackedKernel> grouped_plain() { return kGrouped; }

}  // namespace polyquant

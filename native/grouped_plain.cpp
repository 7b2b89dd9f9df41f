#include "grouped_table.hpp"

namespace polyquant {

std::span<const PackedKernel> grouped_plain() { return kGrouped; }

}  // namespace polyquant

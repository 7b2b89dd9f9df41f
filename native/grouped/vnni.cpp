#if defined(__x86_64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#include "grouped/table.hpp"

namespace polyquant {

std::span<const PackedKernel> grouped_vnni() { return kGrouped; }

}  // namespace polyquant
#endif

#if defined(__aarch64__) && defined(__GNUC__)  // compiled with this instruction set: see CMakeLists.txt
#define PQ_NEON
#include "grouped/table.hpp"

namespace polyquant {

std::span<const PackedKernel> grouped_neon_dotprod() { return kGrouped; }

}  // namespace polyquant
#endif

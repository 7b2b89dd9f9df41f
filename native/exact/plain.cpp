#include "exact/kernels.hpp"

namespace polyquant {

const ExactSet& exact_plain() { return kSet; }

}  // namespace polyquant

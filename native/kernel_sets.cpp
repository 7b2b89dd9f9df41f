#include "kernel_sets.hpp"

#include <atomic>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace polyquant {
namespace {

bool always() { return true; }

#if defined(__x86_64__) && defined(__GNUC__)

// Two registers of CPUID's leaf 7, zeros if there is none: for features that older compilers have no name for.
struct Features {
  unsigned eax = 0, edx = 0;
};
Features features(unsigned subleaf) {
  Features found;
  unsigned ebx = 0, ecx = 0;
  __get_cpuid_count(7, subleaf, &found.eax, &ebx, &ecx, &found.edx);
  return found;
}

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }  // f16c came before avx2

bool has_avx_vnni() {
#if defined(POLYQUANT_EMULATE_AVX_VNNI)
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl");
#else
  return has_avx2() && (features(1).eax >> 4 & 1);
#endif
}

bool has_vnni() {
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bw");
}

// Linux lends a process the memory of the tiles when it asks, for good: its signals then need larger stacks.
bool has_amx() {
  if (!has_vnni() || !packed_amx().tiles) return false;
#if defined(POLYQUANT_EMULATE_AMX)
  return true;
#elif defined(__linux__)
  constexpr unsigned kTile = 1u << 24, kInt8 = 1u << 25, both = kTile | kInt8;
  if ((features(0).edx & both) != both) return false;
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

bool has_fp16() { return features(0).edx >> 23 & 1; }

// Some processors with VNNI lack VBMI.
const TrellisSet& trellis_512() { return __builtin_cpu_supports("avx512vbmi") ? trellis_vnni() : trellis_avx2(); }

std::span<const PackedKernel> grouped_512() {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") ? grouped_bf16() : grouped_vnni();
}

// Processors with AMX have FP16, if their host passes it on.
const TrellisSet& trellis_of_amx() {
  const TrellisSet* const halves = trellis_fp16();
  return halves && has_fp16() ? *halves : trellis_512();
}

constexpr KernelSet kSets[] = {
    {"AVX-512 VNNI with AMX",
     "amx",
     has_amx,
     packed_amx,
     grouped_512,
     affine_amx,
     trellis_of_amx,
     {trellis_walk_avx512, trellis_walk_avx2}},
    {"AVX-512 VNNI",
     "avx512",
     has_vnni,
     packed_vnni,
     grouped_512,
     affine_vnni,
     trellis_512,
     {trellis_walk_avx512, trellis_walk_avx2}},
    {"AVX-VNNI",
     "avxvnni",
     has_avx_vnni,
     packed_avx_vnni,
     grouped_avx_vnni,
     affine_avx_vnni,
     trellis_avx_vnni,
     {trellis_walk_avx2}},
    {"AVX2", "avx2", has_avx2, packed_avx2, grouped_avx2, affine_avx2, trellis_avx2, {trellis_walk_avx2}},
    {"plain", "plain", always, packed_plain, grouped_plain, affine_plain, trellis_plain},
};

#elif defined(__aarch64__) && defined(__GNUC__)

#if defined(__linux__)
bool has_dotprod() { return getauxval(AT_HWCAP) >> 20 & 1; }                   // HWCAP_ASIMDDP
bool has_i8mm() { return has_dotprod() && (getauxval(AT_HWCAP2) >> 13 & 1); }  // HWCAP2_I8MM
#elif defined(__APPLE__)
bool has(const char* feature) {
  int there = 0;
  size_t size = sizeof there;
  return sysctlbyname(feature, &there, &size, nullptr, 0) == 0 && there != 0;
}
bool has_dotprod() { return has("hw.optional.arm.FEAT_DotProd"); }
bool has_i8mm() { return has_dotprod() && has("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_dotprod() { return false; }
bool has_i8mm() { return false; }
#endif

constexpr KernelSet kSets[] = {
    {"NEON with i8mm", "i8mm", has_i8mm, packed_neon_i8mm, grouped_neon_i8mm, affine_neon_i8mm, trellis_neon_i8mm},
    {"NEON with dot products", "dotprod", has_dotprod, packed_neon_dotprod, grouped_neon_dotprod, affine_neon_dotprod,
     trellis_neon_dotprod},
    {"NEON", "neon", always, packed_neon, grouped_neon, affine_neon, trellis_neon},
    {"plain", "plain", always, packed_plain, grouped_plain, affine_plain, trellis_plain},
};

#else

constexpr KernelSet kSets[] = {
    {"plain", "plain", always, packed_plain, grouped_plain, affine_plain, trellis_plain},
};

#endif

const KernelSet& best() {
  const KernelSet* set = kSets;
  while (!set->supported()) ++set;
  return *set;
}

std::atomic<const KernelSet*> chosen{nullptr};  // null: the best

}  // namespace

std::span<const KernelSet> kernel_sets() { return kSets; }

const KernelSet& kernel_set() {
  const KernelSet* const set = chosen.load(std::memory_order_relaxed);
  if (set) return *set;
  static const KernelSet& found = best();
  return found;
}

bool use_kernels(std::string_view option) {
  const KernelSet* found = nullptr;
  for (const KernelSet& set : kSets)
    if (set.option == option && set.supported()) found = &set;
  if (!found && !option.empty()) return false;
  chosen.store(found, std::memory_order_relaxed);
  return true;
}

}  // namespace polyquant

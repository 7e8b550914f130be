#include "cpu/kernels/isa.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace specdec_ops::cpu {
namespace {

constexpr Isa kAllIsas[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};

#if defined(__x86_64__)

struct CpuidLeaf {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuidLeaf cpuid(uint32_t leaf) {
  CpuidLeaf r;
  if (!__get_cpuid_count(leaf, 0, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
  return r;
}

bool has_all(uint32_t value, uint32_t wanted) { return (value & wanted) == wanted; }

/// The register state that the operating system saves; the CPU's own word is not enough.
uint64_t enabled_state() {
  constexpr uint32_t kOsxsave = 1u << 27;
  if (!has_all(cpuid(1).ecx, kOsxsave)) return 0;
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t{high} << 32) | low;
}

Isa detect() {
  constexpr uint64_t kYmmState = 0x6, kZmmState = 0xE6;
  constexpr uint32_t kFma = 1u << 12, kAvx = 1u << 28, kF16c = 1u << 29;   // leaf 1, ecx
  constexpr uint32_t kBmi1 = 1u << 3, kAvx2 = 1u << 5, kBmi2 = 1u << 8;    // leaf 7, ebx
  constexpr uint32_t kAvx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  const uint64_t state = enabled_state();
  const uint32_t features7 = cpuid(7).ebx;
  if ((state & kYmmState) != kYmmState || !has_all(cpuid(1).ecx, kFma | kAvx | kF16c) ||
      !has_all(features7, kBmi1 | kAvx2 | kBmi2)) {
    return Isa::kScalar;
  }
  if ((state & kZmmState) != kZmmState || !has_all(features7, kAvx512)) return Isa::kAvx2;
  return Isa::kAvx512;
}

#else

Isa detect() { return Isa::kScalar; }

#endif

/// The tier of a name, null for a name that is none.
const Isa* find(const char* name) {
  for (const Isa& isa : kAllIsas) {
    if (std::strcmp(name, name_of(isa)) == 0) return &isa;
  }
  return nullptr;
}

const char* cap() {
  const char* name = std::getenv("SPECDEC_OPS_CPU_ISA");
  return name == nullptr || *name == '\0' ? nullptr : name;
}

std::atomic<Isa>& current() {
  static std::atomic<Isa> isa = [] {
    const Isa* allowed = cap() != nullptr ? find(cap()) : nullptr;
    return allowed != nullptr && *allowed < detect() ? *allowed : detect();
  }();
  return isa;
}

}  // namespace

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    default:
      return "scalar";
  }
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kAllIsas) {
    if (isa <= detect()) isas.push_back(isa);
  }
  return isas;
}

Isa current_isa() { return current().load(std::memory_order_relaxed); }

bool isa_cap_is_known() { return cap() == nullptr || find(cap()) != nullptr; }

bool set_isa(const char* name) {
  const Isa* isa = find(name);
  if (isa == nullptr || *isa > detect()) return false;
  current().store(*isa, std::memory_order_relaxed);
  return true;
}

}  // namespace specdec_ops::cpu

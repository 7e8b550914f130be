#pragma once

#include <vector>

namespace specdec_ops::cpu {

/// Instruction-set tiers of the kernels, in rising order.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

const char* name_of(Isa isa);
/// The tiers that this processor and operating system can run; never empty.
std::vector<Isa> available_isas();
/// The tier in use: at first the highest available one that SPECDEC_OPS_CPU_ISA allows.
Isa current_isa();
/// Whether SPECDEC_OPS_CPU_ISA is unset or names a tier; a name that is not one caps nothing.
bool isa_cap_is_known();
/// Switches the tier. False, and no change, if the tier is unknown or not available here.
bool set_isa(const char* name);

}  // namespace specdec_ops::cpu

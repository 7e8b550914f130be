#pragma once

#include <vector>

namespace specdec_ops::cpu {

/// Instruction-set tiers of the kernels, in rising order.
enum class Isa : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

const char* name_of(Isa isa);
/// The tiers that this processor and operating system can run; never empty.
std::vector<Isa> available_isas();
/// The tier in use: the highest available one, capped by SPECDEC_OPS_CPU_ISA when the process starts.
Isa current_isa();
/// Switches the tier. False, and no change, if the tier is unknown or not available here.
bool set_isa(const char* name);

}  // namespace specdec_ops::cpu

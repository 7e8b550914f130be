#pragma once

#include <cstddef>
#include <cstdint>

#include "common/chain_params.h"
#include "cpu/kernels/types.h"

/// Verification of draft chains, sampling and recovered tokens: one program on raw pointers.
namespace specdec_ops::cpu {

using specdec_ops::ChainParams;
using specdec_ops::DraftLawKind;
using specdec_ops::Rule;

/// Runs task(context, worker) for worker = 0 ... num_workers - 1, on threads or one after another.
using ParallelFor = void (*)(int num_workers, void (*task)(void* context, int worker), void* context);

/// How many workers a call is worth, at most `max_workers`.
int chain_num_workers(const ChainParams& params, int max_workers);
/// Bytes of scratch memory, 64-byte aligned, for run_chain.
size_t chain_workspace_size(const ChainParams& params, int num_workers);
/// The tokens do not depend on num_workers or on how parallel_for runs its tasks.
void run_chain(const ChainParams& params, void* workspace, int num_workers, ParallelFor parallel_for);

}  // namespace specdec_ops::cpu

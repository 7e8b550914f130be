#pragma once

#include <cuda_runtime_api.h>

#include "common/chain_params.h"

/// The chain program on a GPU: the decisions of csrc/cpu/kernels/chain.kernel.h, bit for bit.
namespace specdec_ops::cuda {

/// The largest vocabulary: masses of this many ids' blocks fit shared memory.
constexpr int64_t kLargestVocabSize = int64_t{2048} * kBlockSize;

/// Bytes of device memory, 16-byte aligned, for launch_chain. Depends on shapes alone.
size_t chain_workspace_size(const ChainParams& params);
/// Puts the program on a stream of the current device, in two launches, or three with filters, and without
/// waiting for anything.
/// cudaErrorLaunchOutOfResources where the device has too little shared memory: float32 rows on sm_75.
cudaError_t launch_chain(const ChainParams& params, void* workspace, int device, cudaStream_t stream);

}  // namespace specdec_ops::cuda

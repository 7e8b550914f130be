#pragma once

#include <cuda_runtime_api.h>

#include "common/draft_vocabulary.h"

namespace specdec_ops::cuda {

cudaError_t launch_map_draft_tokens(const MapDraftTokens& map, cudaStream_t stream);

/// In bytes; depends on shapes alone.
int64_t expand_draft_logits_workspace_size(const ExpandDraftLogits& expand);

/// `workspace` is aligned to 16 bytes and need not be initialised.
cudaError_t launch_expand_draft_logits(const ExpandDraftLogits& expand, DType expanded_dtype, void* workspace,
                                       cudaStream_t stream);

}  // namespace specdec_ops::cuda

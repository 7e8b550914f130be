// The ops that prepare a draft model's inputs over a paged key-value cache.

#include <torch/csrc/stable/library.h>

#include "common/slot_mapping_ops.h"
#include "cuda/for_each_request.cuh"

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  using specdec_ops::cuda::RequestBackend;
  m.impl("compute_slot_mapping_", TORCH_BOX(&specdec_ops::compute_slot_mapping_<RequestBackend>));
  m.impl("advance_draft_step_", TORCH_BOX(&specdec_ops::advance_draft_step_<RequestBackend>));
  m.impl("expand_draft_inputs_", TORCH_BOX(&specdec_ops::expand_draft_inputs_<RequestBackend>));
  m.impl("expand_dflash_inputs_", TORCH_BOX(&specdec_ops::expand_dflash_inputs_<RequestBackend>));
}

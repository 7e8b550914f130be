// The bookkeeping ops, which users of vLLM know under this file's name.

#include <torch/csrc/stable/library.h>

#include "common/spec_decode_ops.h"
#include "cuda/for_each_request.cuh"
#include "cuda/recovered_probs.h"

namespace specdec_ops::cuda {
namespace {

struct Backend : RequestBackend {
  static void sample_recovered_probs(const Checks& checks, const RecoveredProbsParams& params,
                                     const Tensor& beside) {
    const DeviceScope scope(beside);
    // Freed on return: torch's allocator gives it only to what runs later on the same stream.
    Tensor workspace = empty_beside(beside, {recovered_probs_workspace_size(params)}, ScalarType::Byte);
    check(launch_recovered_probs(params, workspace.mutable_data_ptr(), scope.stream()), checks.op());
  }
};

}  // namespace
}  // namespace specdec_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  using specdec_ops::cuda::Backend;
  m.impl("count_accepted", TORCH_BOX(&specdec_ops::count_accepted<Backend>));
  m.impl("verify_argmax_", TORCH_BOX(&specdec_ops::verify_argmax_<Backend>));
  m.impl("verify_probs_", TORCH_BOX(&specdec_ops::verify_probs_<Backend>));
  m.impl("sample_recovered_probs_", TORCH_BOX(&specdec_ops::sample_recovered_probs_<Backend>));
  m.impl("expand_to_drafts_", TORCH_BOX(&specdec_ops::expand_to_drafts_<Backend>));
  m.impl("prepare_padded_draft_inputs_", TORCH_BOX(&specdec_ops::prepare_padded_draft_inputs_<Backend>));
  m.impl("prepare_next_tokens_", TORCH_BOX(&specdec_ops::prepare_next_tokens_<Backend>));
}

// The bookkeeping between a runner's batches and the state of its requests.

#include <torch/csrc/stable/library.h>

#include "common/runner_state_ops.h"
#include "cpu/for_each_request.h"

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  using specdec_ops::cpu::RequestBackend;
  m.impl("combine_sampled_and_draft_tokens_",
         TORCH_BOX(&specdec_ops::combine_sampled_and_draft_tokens_<RequestBackend>));
  m.impl("count_emitted_and_rejected_", TORCH_BOX(&specdec_ops::count_emitted_and_rejected_<RequestBackend>));
  m.impl("update_request_state_", TORCH_BOX(&specdec_ops::update_request_state_<RequestBackend>));
  m.impl("update_num_computed_tokens_", TORCH_BOX(&specdec_ops::update_num_computed_tokens_<RequestBackend>));
  m.impl("expand_request_indices_", TORCH_BOX(&specdec_ops::expand_request_indices_<RequestBackend>));
  m.impl("prepare_positions_and_seq_lens_",
         TORCH_BOX(&specdec_ops::prepare_positions_and_seq_lens_<RequestBackend>));
  m.impl("gather_draft_tokens_", TORCH_BOX(&specdec_ops::gather_draft_tokens_<RequestBackend>));
}

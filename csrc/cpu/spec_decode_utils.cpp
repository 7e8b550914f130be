// The bookkeeping ops, which users of vLLM know under this file's name.

#include <torch/csrc/stable/library.h>

#include <memory>

#include "common/spec_decode_ops.h"
#include "cpu/for_each_request.h"
#include "cpu/kernels/recovered_probs.h"

namespace specdec_ops::cpu {
namespace {

struct Backend : RequestBackend {
  static void sample_recovered_probs(const Checks&, const RecoveredProbsParams& params, const Tensor&) {
    RecoveredProbsRun run;
    run.params = &params;
    run.num_blocks = num_score_blocks(params.vocab_size);
    const std::unique_ptr<double[]> block_scores(new double[params.drafts.num_drafts * run.num_blocks]);
    run.block_scores = block_scores.get();
    const int num_workers =
        recovered_probs_num_workers(params, static_cast<int>(torch::stable::get_num_threads()));
    if (num_workers == 1) {
      score_blocks(run);
    } else {
      torch::stable::parallel_for(0, num_workers, 1, [&](int64_t, int64_t) { score_blocks(run); });
    }
    pick_recovered(run);
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  using specdec_ops::cpu::Backend;
  m.impl("count_accepted", TORCH_BOX(&specdec_ops::count_accepted<Backend>));
  m.impl("verify_argmax_", TORCH_BOX(&specdec_ops::verify_argmax_<Backend>));
  m.impl("verify_probs_", TORCH_BOX(&specdec_ops::verify_probs_<Backend>));
  m.impl("sample_recovered_probs_", TORCH_BOX(&specdec_ops::sample_recovered_probs_<Backend>));
  m.impl("expand_to_drafts_", TORCH_BOX(&specdec_ops::expand_to_drafts_<Backend>));
  m.impl("prepare_padded_draft_inputs_", TORCH_BOX(&specdec_ops::prepare_padded_draft_inputs_<Backend>));
  m.impl("prepare_next_tokens_", TORCH_BOX(&specdec_ops::prepare_next_tokens_<Backend>));
}

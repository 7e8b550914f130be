// The ops of docs/engines.md that work around verification.

#include <torch/csrc/stable/library.h>

#include "common/draft_vocabulary_ops.h"
#include "common/logit_processors_ops.h"
#include "common/plan_verification_ops.h"
#include "common/row_statistics_ops.h"
#include "common/token_logprobs_ops.h"
#include "cuda/draft_vocabulary.h"
#include "cuda/logit_processors.h"
#include "cuda/plan_verification.h"
#include "cuda/row_statistics.h"
#include "cuda/stream.h"
#include "cuda/token_logprobs.h"

namespace specdec_ops::cuda {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  /// Calls launch(params, memory, stream).
  template <class Params, class Launch>
  static void run(const Checks& checks, const Tensor& beside, const Params& params, int64_t workspace_size,
                  const Launch& launch) {
    const DeviceScope scope(beside);
    // Freed on return: torch's allocator gives it only to what runs later on the same stream.
    Tensor workspace = empty_beside(beside, {workspace_size}, ScalarType::Byte);
    check(launch(params, workspace.mutable_data_ptr(), scope.stream()), checks.op());
  }

  static void plan_verification(const Checks& checks, const PlanVerificationParams& params,
                                const Tensor& beside) {
    run(checks, beside, params, plan_verification_workspace_size(params), launch_plan_verification);
  }
  static void row_statistics(const Checks& checks, const RowStatisticsParams& params, const Tensor& beside) {
    run(checks, beside, params, row_statistics_workspace_size(params), launch_row_statistics);
  }
  static void token_logprobs(const Checks& checks, const TokenLogprobsParams& params, const Tensor& beside) {
    run(checks, beside, params, token_logprobs_workspace_size(params), launch_token_logprobs);
  }
  static void apply_logit_processors(const Checks& checks, const LogitProcessors& apply,
                                     const Tensor& beside) {
    run(checks, beside, apply, logit_processors_workspace_size(apply), launch_logit_processors);
  }
  static void map_draft_tokens(const Checks& checks, const MapDraftTokens& map, const Tensor& beside) {
    const DeviceScope scope(beside);
    check(launch_map_draft_tokens(map, scope.stream()), checks.op());
  }
  static void expand_draft_logits(const Checks& checks, const ExpandDraftLogits& expand, DType expanded_dtype,
                                  const Tensor& beside) {
    run(checks, beside, expand, expand_draft_logits_workspace_size(expand),
        [&](const ExpandDraftLogits& params, void* memory, cudaStream_t stream) {
          return launch_expand_draft_logits(params, expanded_dtype, memory, stream);
        });
  }
};

}  // namespace
}  // namespace specdec_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  using specdec_ops::cuda::Backend;
  m.impl("plan_verification", TORCH_BOX(&specdec_ops::plan_verification<Backend>));
  m.impl("row_statistics", TORCH_BOX(&specdec_ops::row_statistics<Backend>));
  m.impl("token_logprobs", TORCH_BOX(&specdec_ops::token_logprobs<Backend>));
  m.impl("map_draft_tokens", TORCH_BOX(&specdec_ops::map_draft_tokens<Backend>));
  m.impl("expand_draft_logits_", TORCH_BOX(&specdec_ops::expand_draft_logits_<Backend>));
  m.impl("apply_logit_processors_", TORCH_BOX(&specdec_ops::apply_logit_processors_<Backend>));
}

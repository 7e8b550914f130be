// The ops around verification, with the CUDA kernels on an emulated device, for tensors of the CPU.

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
#include "cuda/token_logprobs.h"
#include "workspace.h"

namespace {

using namespace specdec_ops::cuda;
using specdec_ops::Checks;
using specdec_ops::Tensor;

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  /// Calls launch(params, memory, stream) and runs what it has launched.
  template <class Params, class Launch>
  static void run(const Checks& checks, const Params& params, int64_t workspace_size, const Launch& launch) {
    emulation::Workspace workspace(static_cast<size_t>(workspace_size));
    const cudaError_t error = launch(params, workspace.begin(), cudaStream_t{});
    checks.require(error == cudaSuccess, "CUDA error ", static_cast<int>(error));
    emulation::synchronize();
    checks.require(workspace.is_intact(), "something was written past the workspace");
  }

  static void plan_verification(const Checks& checks, const specdec_ops::PlanVerificationParams& params,
                                const Tensor&) {
    run(checks, params, plan_verification_workspace_size(params), launch_plan_verification);
  }
  static void row_statistics(const Checks& checks, const specdec_ops::RowStatisticsParams& params,
                             const Tensor&) {
    run(checks, params, row_statistics_workspace_size(params), launch_row_statistics);
  }
  static void token_logprobs(const Checks& checks, const specdec_ops::TokenLogprobsParams& params,
                             const Tensor&) {
    run(checks, params, token_logprobs_workspace_size(params), launch_token_logprobs);
  }
  static void apply_logit_processors(const Checks& checks, const specdec_ops::LogitProcessors& apply,
                                     const Tensor&) {
    run(checks, apply, logit_processors_workspace_size(apply), launch_logit_processors);
  }
  static void map_draft_tokens(const Checks& checks, const specdec_ops::MapDraftTokens& map, const Tensor&) {
    run(checks, map, 0, [](const specdec_ops::MapDraftTokens& params, void*, cudaStream_t stream) {
      return launch_map_draft_tokens(params, stream);
    });
  }
  static void expand_draft_logits(const Checks& checks, const specdec_ops::ExpandDraftLogits& expand,
                                  specdec_ops::DType expanded_dtype, const Tensor&) {
    run(checks, expand, expand_draft_logits_workspace_size(expand),
        [&](const specdec_ops::ExpandDraftLogits& params, void* memory, cudaStream_t stream) {
          return launch_expand_draft_logits(params, expanded_dtype, memory, stream);
        });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_ops_emulated_gpu, CPU, m) {
  m.impl("plan_verification", TORCH_BOX(&specdec_ops::plan_verification<Backend>));
  m.impl("row_statistics", TORCH_BOX(&specdec_ops::row_statistics<Backend>));
  m.impl("token_logprobs", TORCH_BOX(&specdec_ops::token_logprobs<Backend>));
  m.impl("map_draft_tokens", TORCH_BOX(&specdec_ops::map_draft_tokens<Backend>));
  m.impl("expand_draft_logits_", TORCH_BOX(&specdec_ops::expand_draft_logits_<Backend>));
  m.impl("apply_logit_processors_", TORCH_BOX(&specdec_ops::apply_logit_processors_<Backend>));
}

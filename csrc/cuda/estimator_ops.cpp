// The ops that estimate and plan.

#include <torch/csrc/stable/library.h>

#include "common/plan_verification_ops.h"
#include "cuda/plan_verification.h"
#include "cuda/stream.h"

namespace specdec_ops::cuda {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  static void plan_verification(const Checks& checks, const PlanVerificationParams& params,
                                const Tensor& beside) {
    const DeviceScope scope(beside);
    // Freed on return: torch's allocator gives it only to what runs later on the same stream.
    Tensor workspace = empty_beside(beside, {plan_verification_workspace_size(params)}, ScalarType::Byte);
    check(launch_plan_verification(params, workspace.mutable_data_ptr(), scope.stream()), checks.op());
  }
};

}  // namespace
}  // namespace specdec_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  using specdec_ops::cuda::Backend;
  m.impl("plan_verification", TORCH_BOX(&specdec_ops::plan_verification<Backend>));
}

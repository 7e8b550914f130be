#include <torch/csrc/stable/library.h>

#include "common/chain_ops.h"
#include "cuda/chain.h"
#include "cuda/stream.h"

namespace specdec_ops::cuda {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  static void run(const Checks& checks, const ChainParams& params, const Tensor& beside) {
    require_rule_of_gpu(checks, params);
    checks.require(params.vocab_size <= kLargestVocabSize, "vocab_size must be at most ", kLargestVocabSize,
                   " on a GPU, got ", params.vocab_size);
    const DeviceScope scope(beside);
    const auto size = static_cast<int64_t>(chain_workspace_size(params));
    // Freed on return: torch's allocator gives it only to what runs later on the same stream.
    Tensor workspace = empty_beside(beside, {size}, ScalarType::Byte);
    const cudaError_t error =
        launch_chain(params, workspace.mutable_data_ptr(), scope.device(), scope.stream());
    checks.require(error != cudaErrorLaunchOutOfResources,
                   "logits must be bfloat16 or float16 on a GPU with as little shared memory as this one, "
                   "got float32");
    check(error, checks.op());
  }
};

}  // namespace
}  // namespace specdec_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  using specdec_ops::cuda::Backend;
  m.impl("verify_chain", TORCH_BOX(&specdec_ops::verify_chain<Backend>));
  m.impl("sample", TORCH_BOX(&specdec_ops::sample<Backend>));
  m.impl("sample_recovered", TORCH_BOX(&specdec_ops::sample_recovered<Backend>));
}

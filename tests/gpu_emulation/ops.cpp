// The ops of the chain program with the CUDA kernels, on an emulated device, for tensors of the CPU.

#include <torch/csrc/stable/library.h>

#include <mutex>

#include "common/chain_ops.h"
#include "cuda/chain.h"
#include "workspace.h"

namespace {

using specdec_ops::ChainParams;
using specdec_ops::Checks;
using specdec_ops::Tensor;

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  static void run(const Checks& checks, const ChainParams& params, const Tensor&) {
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    emulation::Workspace workspace(specdec_ops::cuda::chain_workspace_size(params));
    const int device = static_cast<int>(emulation::pick(2));
    const cudaError_t error = specdec_ops::cuda::launch_chain(params, workspace.begin(), device, nullptr);
    checks.require(error == cudaSuccess, "CUDA error ", static_cast<int>(error));
    emulation::synchronize();
    checks.require(workspace.is_intact(), "something was written past the workspace");
  }
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void set_emulation_seed(uint64_t seed) {
  emulation::set_seed(seed);
}

STABLE_TORCH_LIBRARY_IMPL(specdec_ops_emulated_gpu, CPU, m) {
  m.impl("verify_chain", TORCH_BOX(&specdec_ops::verify_chain<Backend>));
  m.impl("sample", TORCH_BOX(&specdec_ops::sample<Backend>));
  m.impl("sample_recovered", TORCH_BOX(&specdec_ops::sample_recovered<Backend>));
}

// The ops of the chain program with the CUDA kernels, on an emulated device, for tensors of the CPU.

#include <torch/csrc/stable/library.h>

#include <mutex>
#include <vector>

#include "common/chain_ops.h"
#include "cuda/chain.h"
#include "machine.h"

namespace {

using specdec_ops::ChainParams;
using specdec_ops::Checks;
using specdec_ops::Tensor;

/// The memory of a call between two guards. It holds NaN, small int64 numbers, or what calls before have
/// left.
class Workspace {
 public:
  explicit Workspace(size_t size) : size_(size) {
    memory_.resize(std::max(memory_.size(), size + 2 * kGuardSize), 0xFF);
    switch (emulation::pick(3)) {
      case 0:
        std::fill(memory_.begin(), memory_.end(), 0xFF);
        break;
      case 1:
        std::fill(memory_.begin(), memory_.end(), 0);
        for (size_t i = 0; i < memory_.size(); i += sizeof(int64_t)) {
          memory_[i] = static_cast<unsigned char>(emulation::pick(8));
        }
        break;
    }
    std::fill(memory_.begin(), memory_.begin() + kGuardSize, kGuard);
    std::fill(end(), end() + kGuardSize, kGuard);
  }
  void* begin() { return memory_.data() + kGuardSize; }
  bool is_intact() {
    const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuardSize, is_guard) &&
           std::all_of(end(), end() + kGuardSize, is_guard);
  }

 private:
  static constexpr size_t kGuardSize = 4096;
  static constexpr unsigned char kGuard = 0xA5;

  std::vector<unsigned char>::iterator end() {
    return memory_.begin() + static_cast<std::ptrdiff_t>(kGuardSize + size_);
  }

  static std::vector<unsigned char> memory_;
  size_t size_;
};
std::vector<unsigned char> Workspace::memory_;

struct Backend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  static void run(const Checks& checks, const ChainParams& params, const Tensor&) {
    specdec_ops::require_rule_of_gpu(checks, params);
    static std::mutex mutex;
    const std::lock_guard<std::mutex> lock(mutex);
    Workspace workspace(specdec_ops::cuda::chain_workspace_size(params));
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

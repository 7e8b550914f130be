#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <memory>

#include "common/chain_ops.h"
#include "cpu/kernels/chain.h"

namespace specdec_ops::cpu {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  /// Runs the program on torch's threads, with scratch memory of a size that depends on shapes alone.
  static void run(const Checks&, const ChainParams& params, const Tensor&) {
    const int num_workers = chain_num_workers(params, static_cast<int>(torch::stable::get_num_threads()));
    const std::unique_ptr<void, decltype(&std::free)> workspace(
        std::aligned_alloc(64, (chain_workspace_size(params, num_workers) + 63) / 64 * 64), &std::free);
    if (workspace == nullptr) throw std::bad_alloc();
    run_chain(params, workspace.get(), num_workers, [](int workers, void (*task)(void*, int), void* context) {
      torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
        for (int64_t worker = begin; worker < end; ++worker) task(context, static_cast<int>(worker));
      });
    });
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  using specdec_ops::cpu::Backend;
  m.impl("verify_chain", TORCH_BOX(&specdec_ops::verify_chain<Backend>));
  m.impl("sample", TORCH_BOX(&specdec_ops::sample<Backend>));
  m.impl("sample_recovered", TORCH_BOX(&specdec_ops::sample_recovered<Backend>));
}

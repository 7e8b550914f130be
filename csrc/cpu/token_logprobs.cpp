#include "cpu/kernels/token_logprobs.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/token_logprobs_ops.h"

namespace specdec_ops::cpu {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  static void token_logprobs(const Checks&, const TokenLogprobsParams& params, const Tensor&) {
    std::vector<TokenRow> tokens;
    tokens.reserve(static_cast<size_t>(params.num_rows));
    if (params.is_verified) params.cu_num_tokens[0] = 0;
    for (int64_t request = 0; request < params.batch; ++request) {
      const int64_t count = params.num_emitted(request);
      for (int64_t slot = 0; slot < count; ++slot) tokens.push_back(emitted_token(params, request, slot));
      params.cu_num_tokens[request + 1] = static_cast<int32_t>(tokens.size());
    }
    for (int64_t row = 0; row < params.num_rows && !params.is_verified; ++row) {
      tokens.push_back(given_token(params, row));
    }
    tokens.resize(static_cast<size_t>(params.num_rows), TokenRow{-1, -1, -1});
    torch::stable::parallel_for(
        0, params.num_rows, token_logprobs_grain(params),
        [&](int64_t begin, int64_t end) { run_token_logprobs(params, tokens.data(), begin, end); });
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("token_logprobs", TORCH_BOX(&specdec_ops::token_logprobs<specdec_ops::cpu::Backend>));
}

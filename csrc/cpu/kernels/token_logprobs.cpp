#include "cpu/kernels/token_logprobs.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <type_traits>

#include "common/philox.h"
#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/isa.h"
#include "cpu/kernels/row_ref.h"
#include "cpu/kernels/types.h"

#define SPECDEC_KERNEL "cpu/kernels/token_logprobs.kernel.h"
#include "cpu/kernels/foreach_isa.h"

namespace specdec_ops::cpu {

int64_t token_logprobs_grain(const TokenLogprobsParams& params) {
  constexpr int64_t kElementsPerWorker = 32768;
  return std::max<int64_t>(kElementsPerWorker / params.vocab_size, 1);
}

void run_token_logprobs(const TokenLogprobsParams& params, const TokenRow* tokens, int64_t begin,
                        int64_t end) {
  const std::unique_ptr<BlockStats[]> workspace(new BlockStats[static_cast<size_t>(params.num_blocks())]);
  const DenormalsOn environment;
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::logprobs_of_rows(params, tokens, begin, end, workspace.get());
    case Isa::kAvx2:
      return avx2::logprobs_of_rows(params, tokens, begin, end, workspace.get());
#endif
    default:
      return scalar::logprobs_of_rows(params, tokens, begin, end, workspace.get());
  }
}

}  // namespace specdec_ops::cpu

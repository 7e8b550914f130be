#include "cpu/kernels/recovered_probs.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "common/numerics.h"
#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/isa.h"
#include "cpu/kernels/types.h"

namespace specdec_ops::cpu {
namespace {

/// Blocks that a worker takes at a time, of every draft of one request: they share the noise.
constexpr int64_t kBlocksPerTask = 8;
/// Elements that repay waking another thread.
constexpr int64_t kElementsPerWorker = 32768;

}  // namespace
}  // namespace specdec_ops::cpu

#define SPECDEC_KERNEL "cpu/kernels/recovered_probs.kernel.h"
#include "cpu/kernels/foreach_isa.h"

namespace specdec_ops::cpu {

int64_t num_score_blocks(int64_t vocab_size) { return (vocab_size + kScoreBlock - 1) / kScoreBlock; }

int recovered_probs_num_workers(const RecoveredProbsParams& params, int max_workers) {
  const int64_t work = params.drafts.num_drafts * params.vocab_size;
  return static_cast<int>(std::clamp<int64_t>(work / kElementsPerWorker, 1, std::max(max_workers, 1)));
}

void score_blocks(RecoveredProbsRun& run) {
  const DenormalsOn environment;
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::score_blocks_of_tasks(run);
    case Isa::kAvx2:
      return avx2::score_blocks_of_tasks(run);
#endif
    default:
      return scalar::score_blocks_of_tasks(run);
  }
}

void pick_recovered(const RecoveredProbsRun& run) {
  const DenormalsOn environment;
  switch (current_isa()) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512::pick_of_drafts(run);
    case Isa::kAvx2:
      return avx2::pick_of_drafts(run);
#endif
    default:
      return scalar::pick_of_drafts(run);
  }
}

}  // namespace specdec_ops::cpu

#include <torch/csrc/stable/library.h>

#include <queue>
#include <vector>

#include "common/plan_verification_ops.h"

namespace specdec_ops::cpu {
namespace {

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  /// Admits drafts one by one. A request has its next slot alone in the queue: a later one is no likelier.
  static void plan_verification(const Checks&, const PlanVerificationParams& params, const Tensor&) {
    std::vector<Survival> survivals(static_cast<size_t>(params.batch));
    std::vector<int64_t> sums(static_cast<size_t>(params.batch), 0);
    std::vector<Candidate> room;
    room.reserve(static_cast<size_t>(params.batch));
    const auto comes_after = [](const Candidate& a, const Candidate& b) { return comes_before(b, a); };
    std::priority_queue<Candidate, std::vector<Candidate>, decltype(comes_after)> queue(comes_after,
                                                                                        std::move(room));
    const auto offer = [&](int64_t request, int64_t slot) {
      const Span drafts = params.drafts.of(request);
      if (slot == drafts.size()) return;
      const int64_t survival =
          survivals[static_cast<size_t>(request)].next(at(params.accept_probs, drafts.begin + slot));
      if (survival > 0) queue.push({survival, slot, request});
    };
    for (int64_t request = 0; request < params.batch; ++request) {
      params.num_draft_tokens[request] = 0;
      offer(request, 0);
    }
    const int64_t most = params.most_drafts();
    int64_t sum = 0;
    for (int64_t num_drafts = 1; num_drafts <= most && !queue.empty(); ++num_drafts) {
      const Candidate next = queue.top();
      queue.pop();
      if (params.step_costs && lowers_tokens_per_cost(params, num_drafts, sum + next.survival, sum)) break;
      sum += next.survival;
      sums[static_cast<size_t>(next.request)] += next.survival;
      params.num_draft_tokens[next.request] = static_cast<int32_t>(next.slot + 1);
      offer(next.request, next.slot + 1);
    }
    for (int64_t request = 0; request < params.batch; ++request) {
      params.expected_tokens[request] = expected_tokens(sums[static_cast<size_t>(request)]);
    }
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("plan_verification", TORCH_BOX(&specdec_ops::plan_verification<specdec_ops::cpu::Backend>));
}

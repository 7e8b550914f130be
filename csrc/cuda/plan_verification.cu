// Plans on a GPU: each draft finds its own place in the order of admission, so nothing is sorted.

#include "cuda/plan_verification.h"

#include "cuda/cta.cuh"
#include "cuda/launch.h"

namespace specdec_ops::cuda {
namespace {

/// What the launches of a call hand on, each [num_drafts].
struct PlanWorkspace {
  int64_t* survivals;
  /// How many drafts are admitted before this one.
  int64_t* ranks;
  /// The survivals in the order of admission, then 0; where there are costs.
  int64_t* in_order;
};

PlanWorkspace workspace_at(void* memory, const PlanVerificationParams& params) {
  auto* numbers = static_cast<int64_t*>(memory);
  return {numbers, numbers + params.drafts.num_drafts, numbers + 2 * params.drafts.num_drafts};
}

/// A thread to a request.
__global__ void __launch_bounds__(kCtaThreads)
    find_survivals(int64_t num_ctas, PlanVerificationParams params, PlanWorkspace workspace) {
  const int64_t thread = first_thread_task();
  for (int64_t draft = thread; params.step_costs && draft < params.drafts.num_drafts;
       draft += num_ctas * kCtaThreads) {
    workspace.in_order[draft] = 0;
  }
  for (int64_t request = thread; request < params.batch; request += num_ctas * kCtaThreads) {
    const Span drafts = params.drafts.of(request);
    Survival survival;
    for (int64_t draft = drafts.begin; draft < drafts.end; ++draft) {
      workspace.survivals[draft] = survival.next(at(params.accept_probs, draft));
    }
  }
}

/// How many drafts of a request come before a candidate: its first ones, since survivals do not rise.
__device__ int64_t num_before(const int64_t* survivals, const Span& drafts, int64_t request,
                              const Candidate& candidate) {
  int64_t first = 0, last = drafts.size();
  while (first < last) {
    const int64_t slot = (first + last) / 2;
    if (comes_before({survivals[drafts.begin + slot], slot, request}, candidate)) {
      first = slot + 1;
    } else {
      last = slot;
    }
  }
  return first;
}

/// A warp to a request.
__global__ void __launch_bounds__(kCtaThreads)
    rank_drafts(int64_t num_ctas, PlanVerificationParams params, PlanWorkspace workspace) {
  for (int64_t request = first_warp_task(); request < params.batch; request += num_ctas * kCtaWarps) {
    const Span drafts = params.drafts.of(request);
    for (int64_t slot = 0; slot < drafts.size(); ++slot) {
      const Candidate candidate = {workspace.survivals[drafts.begin + slot], slot, request};
      int64_t rank = 0;
      for (int64_t other = lane_index(); other < params.batch; other += kWarpSize) {
        rank += num_before(workspace.survivals, params.drafts.of(other), other, candidate);
      }
      rank = warp_sum(rank);
      if (lane_index() != 0) continue;
      workspace.ranks[drafts.begin + slot] = rank;
      // Totals that decrease give a draft to several requests, and then there are more ranks than drafts.
      if (params.step_costs && rank < params.drafts.num_drafts) workspace.in_order[rank] = candidate.survival;
    }
  }
}

/// The smallest value that a thread of the CTA brings.
__device__ int64_t cta_min(int64_t value) {
  __shared__ int64_t least_of_warps[kCtaWarps];
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    const int64_t other = __shfl_xor_sync(kAllLanes, value, distance);
    value = other < value ? other : value;
  }
  __syncthreads();
  if (lane_index() == 0) least_of_warps[warp_index()] = value;
  __syncthreads();
  for (int warp = 0; warp < kCtaWarps; ++warp) {
    value = least_of_warps[warp] < value ? least_of_warps[warp] : value;
  }
  return value;
}

/// How many drafts are admitted before the first that lowers the tokens per cost. Called by one CTA.
__device__ int64_t num_worth_their_cost(const PlanVerificationParams& params, const int64_t* in_order) {
  const int64_t most = params.most_drafts();
  const int64_t end = most < params.drafts.num_drafts ? most : params.drafts.num_drafts;
  int64_t sum_before = 0;
  for (int64_t begin = 0; begin < end; begin += kCtaThreads) {
    const int64_t place = begin + threadIdx.x;
    const int64_t survival = place < end ? in_order[place] : 0;
    const CtaSum sum = cta_prefix_sum(survival);
    const int64_t survivals = sum_before + sum.inclusive;
    const bool stops =
        survival == 0 || lowers_tokens_per_cost(params, place + 1, survivals, survivals - survival);
    const int64_t first = cta_min(stops ? place : INT64_MAX);
    if (first != INT64_MAX) return first < end ? first : end;
    sum_before += sum.total;
  }
  return end;
}

/// One CTA.
__global__ void __launch_bounds__(kCtaThreads)
    write_plan(int64_t, PlanVerificationParams params, PlanWorkspace workspace) {
  const int64_t admitted =
      params.step_costs ? num_worth_their_cost(params, workspace.in_order) : params.most_drafts();
  for (int64_t request = threadIdx.x; request < params.batch; request += kCtaThreads) {
    const Span drafts = params.drafts.of(request);
    int64_t count = 0, sum = 0;
    for (int64_t draft = drafts.begin; draft < drafts.end; ++draft) {
      if (workspace.survivals[draft] == 0 || workspace.ranks[draft] >= admitted) break;
      ++count;
      sum += workspace.survivals[draft];
    }
    params.num_draft_tokens[request] = static_cast<int32_t>(count);
    params.expected_tokens[request] = expected_tokens(sum);
  }
}

}  // namespace

int64_t plan_verification_workspace_size(const PlanVerificationParams& params) {
  return params.drafts.num_drafts * 3 * static_cast<int64_t>(sizeof(int64_t));
}

cudaError_t launch_plan_verification(const PlanVerificationParams& params, void* memory,
                                     cudaStream_t stream) {
  const PlanWorkspace workspace = workspace_at(memory, params);
  const int64_t size = std::max(params.batch, params.drafts.num_drafts);
  cudaError_t error = launch(find_survivals, ctas_of_threads(size), kCtaThreads, stream, params, workspace);
  if (error != cudaSuccess) return error;
  error = launch(rank_drafts, ctas_of_warps(params.batch), kCtaThreads, stream, params, workspace);
  if (error != cudaSuccess) return error;
  return launch(write_plan, 1, kCtaThreads, stream, params, workspace);
}

}  // namespace specdec_ops::cuda

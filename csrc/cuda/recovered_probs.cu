// The recovered tokens of probabilities: scores by chunks of the vocabulary, then the best of the chunks.

#include "cuda/recovered_probs.h"

#include <algorithm>
#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "cuda/warp.cuh"

namespace specdec_ops::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
/// Elements of a row that a thread has in flight at a time.
constexpr int kUnroll = 8;
constexpr int kChunk = 2 * kUnroll * kThreads;
/// The id of a draft that belongs to no request.
constexpr int32_t kNoRequest = -1;
constexpr int64_t kMaxCtas = 1 << 20;

int64_t num_chunks(const RecoveredProbsParams& params) { return (params.vocab_size + kChunk - 1) / kChunk; }

/// A score and its id. A score that is not a number never gets here, so that the better one of two does not
/// depend on the order in which they are found.
template <class Score>
struct Best {
  Score score = -static_cast<Score>(__builtin_inff());
  int32_t id = 0;

  __device__ void offer(Score other_score, int32_t other_id) {
    if (other_score > score || (other_score == score && other_id < id)) {
      score = other_score;
      id = other_id;
    }
  }
  __device__ void offer_of_warp() {
#pragma unroll
    for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
      const Score other_score = __shfl_xor_sync(kAllLanes, score, distance);
      const int32_t other_id = __shfl_xor_sync(kAllLanes, id, distance);
      offer(other_score, other_id);
    }
  }
};

/// The ids of a thread: kThreads apart from `first` on, those below `end`.
template <class T, class From>
__device__ __forceinline__ void load(const From* row, int64_t first, int64_t end, T (&values)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) {
    const int64_t id = first + u * kThreads;
    if constexpr (std::is_same_v<From, float> || std::is_same_v<From, double>) {
      values[u] = id < end ? static_cast<T>(row[id]) : T{0};
    } else {
      values[u] = id < end ? static_cast<T>(static_cast<float>(row[id])) : T{0};
    }
  }
}
template <class T>
__device__ __forceinline__ void load(const FloatRowsView& rows, int64_t row, int64_t first, int64_t end,
                                     T (&values)[kUnroll]) {
  const int64_t offset = row * rows.row_stride;
  switch (rows.dtype) {
    case FloatType::kFloat64:
      // Float rows beside float64 ones are converted to them, never the other way round.
      if constexpr (std::is_same_v<T, double>) {
        load(static_cast<const double*>(rows.data) + offset, first, end, values);
      }
      break;
    case FloatType::kFloat32:
      load(static_cast<const float*>(rows.data) + offset, first, end, values);
      break;
    case FloatType::kBFloat16:
      load(static_cast<const torch::headeronly::BFloat16*>(rows.data) + offset, first, end, values);
      break;
    case FloatType::kFloat16:
      load(static_cast<const torch::headeronly::Half*>(rows.data) + offset, first, end, values);
      break;
  }
}

/// The request that a draft belongs to; the batch if there is none. Called by the CTA as one.
__device__ int64_t request_of(const RecoveredProbsParams& params, int64_t draft) {
  __shared__ unsigned long long owner;
  __syncthreads();
  if (threadIdx.x == 0) owner = static_cast<unsigned long long>(params.batch);
  __syncthreads();
  for (int64_t request = threadIdx.x; request < params.batch; request += kThreads) {
    const Span drafts = params.drafts.of(request);
    // Totals that decrease may give a draft to several: it goes to the first.
    if (draft >= drafts.begin && draft < drafts.end) {
      atomicMin(&owner, static_cast<unsigned long long>(request));
    }
  }
  __syncthreads();
  return static_cast<int64_t>(owner);
}

/// T: of the probabilities and their difference. Score: of the noise and the product.
template <class T, class Score>
__device__ Best<Score> best_of_thread(const RecoveredProbsParams& params, int64_t request, int64_t draft,
                                      int64_t begin, int64_t end) {
  const int64_t one_hot_id = params.draft_probs ? -1 : at(params.draft_token_ids, draft);
  Best<Score> best;
  for (int64_t first = begin + threadIdx.x; first < end; first += kUnroll * kThreads) {
    T p[kUnroll], q[kUnroll] = {};
    Score noise[kUnroll];
    load(params.target_probs, draft, first, end, p);
    if (params.draft_probs) load(params.draft_probs, draft, first, end, q);
    load(params.inverse_noise, request, first, end, noise);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t id = first + u * kThreads;
      if (id >= end) break;
      const T rest = id == one_hot_id ? T{0} : p[u] - q[u];
      best.offer(static_cast<Score>(rest > T{0} ? rest : T{0}) * noise[u], static_cast<int32_t>(id));
    }
  }
  return best;
}

/// A task is a chunk of a draft's row.
template <class T, class Score>
__global__ void __launch_bounds__(kThreads)
    score_chunks(RecoveredProbsParams params, int64_t chunks_per_draft, int64_t num_tasks,
                 Best<double>* chunk_bests) {
  __shared__ Score scores[kWarps];
  __shared__ int32_t ids[kWarps];
  for (int64_t task = blockIdx.x; task < num_tasks; task += gridDim.x) {
    const int64_t draft = task / chunks_per_draft, begin = task % chunks_per_draft * kChunk;
    const int64_t end = begin + kChunk < params.vocab_size ? begin + kChunk : params.vocab_size;
    const int64_t request = request_of(params, draft);
    if (request == params.batch) {
      if (threadIdx.x == 0) chunk_bests[task].id = kNoRequest;
      continue;
    }
    Best<Score> best = best_of_thread<T, Score>(params, request, draft, begin, end);
    best.offer_of_warp();
    if (lane_index() == 0) {
      scores[warp_index()] = best.score;
      ids[warp_index()] = best.id;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kWarps; ++warp) best.offer(scores[warp], ids[warp]);
      chunk_bests[task].score = static_cast<double>(best.score);
      chunk_bests[task].id = best.id;
    }
  }
}

/// A warp to a draft.
__global__ void __launch_bounds__(kThreads)
    pick_recovered(RecoveredProbsParams params, int64_t chunks_per_draft, const Best<double>* chunk_bests) {
  const int64_t num_warps = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t draft = static_cast<int64_t>(blockIdx.x) * kWarps + warp_index();
       draft < params.drafts.num_drafts; draft += num_warps) {
    const Best<double>* bests = chunk_bests + draft * chunks_per_draft;
    if (bests[0].id == kNoRequest) continue;
    Best<double> best;
    for (int64_t chunk = lane_index(); chunk < chunks_per_draft; chunk += kWarpSize) {
      best.offer(bests[chunk].score, bests[chunk].id);
    }
    best.offer_of_warp();
    if (lane_index() == 0) put(params.token_ids, draft, best.id);
  }
}

}  // namespace

int64_t recovered_probs_workspace_size(const RecoveredProbsParams& params) {
  return params.drafts.num_drafts * num_chunks(params) * static_cast<int64_t>(sizeof(Best<double>));
}

cudaError_t launch_recovered_probs(const RecoveredProbsParams& params, void* workspace, cudaStream_t stream) {
  const int64_t num_drafts = params.drafts.num_drafts;
  const int64_t chunks_per_draft = num_chunks(params), num_tasks = num_drafts * chunks_per_draft;
  auto* chunk_bests = static_cast<Best<double>*>(workspace);
  const auto score = [&](auto* kernel) {
    kernel<<<static_cast<unsigned>(std::min(num_tasks, kMaxCtas)), kThreads, 0, stream>>>(
        params, chunks_per_draft, num_tasks, chunk_bests);
  };
  if (params.target_probs.dtype == FloatType::kFloat64 ||
      (params.draft_probs && params.draft_probs.dtype == FloatType::kFloat64)) {
    score(score_chunks<double, double>);
  } else if (params.inverse_noise.dtype == FloatType::kFloat64) {
    score(score_chunks<float, double>);
  } else {
    score(score_chunks<float, float>);
  }
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  const int64_t num_ctas = std::min((num_drafts + kWarps - 1) / kWarps, kMaxCtas);
  pick_recovered<<<static_cast<unsigned>(num_ctas), kThreads, 0, stream>>>(params, chunks_per_draft,
                                                                           chunk_bests);
  return cudaGetLastError();
}

}  // namespace specdec_ops::cuda

// Log-probabilities of tokens: blocks of rows by warps, then rows by warps.
// csrc/cpu/kernels/token_logprobs.kernel.h defines the bits.

#include "cuda/token_logprobs.h"

#include "cuda/blocks.cuh"
#include "cuda/cta.cuh"
#include "cuda/launch.h"

namespace specdec_ops::cuda {
namespace {

/// What is known of a block of a row.
struct TokenBlock {
  BlockStats stats;
  /// Logits that are not below that of the row's token.
  int32_t num_not_below;
};

/// What the launches of a call hand on.
struct TokenWorkspace {
  TokenRow* tokens;    ///< [num_rows]
  TokenBlock* blocks;  ///< [num_rows, num_blocks]
};

TokenWorkspace workspace_at(void* memory, const TokenLogprobsParams& params) {
  auto* tokens = static_cast<TokenRow*>(memory);
  return {tokens, reinterpret_cast<TokenBlock*>(tokens + params.num_rows)};
}

/// One CTA: where each request's tokens go.
__global__ void __launch_bounds__(kCtaThreads)
    place_tokens(int64_t, TokenLogprobsParams params, TokenWorkspace workspace) {
  if (!params.is_verified) {
    for (int64_t row = threadIdx.x; row < params.num_rows; row += kCtaThreads) {
      workspace.tokens[row] = given_token(params, row);
    }
    return;
  }
  if (threadIdx.x == 0) params.cu_num_tokens[0] = 0;
  int64_t num_before = 0;
  for (int64_t begin = 0; begin < params.batch; begin += kCtaThreads) {
    const int64_t request = begin + threadIdx.x;
    const int64_t count = request < params.batch ? params.num_emitted(request) : 0;
    const CtaSum sum = cta_prefix_sum(count);
    const int64_t end = num_before + sum.inclusive;
    num_before += sum.total;
    if (request >= params.batch) continue;
    params.cu_num_tokens[request + 1] = static_cast<int32_t>(end < params.num_rows ? end : params.num_rows);
    for (int64_t slot = 0; slot < count; ++slot) {
      const int64_t row = end - count + slot;
      // Totals that decrease give rows to several requests, and then there are too many.
      if (row < params.num_rows) workspace.tokens[row] = emitted_token(params, request, slot);
    }
  }
  for (int64_t row = num_before + threadIdx.x; row < params.num_rows; row += kCtaThreads) {
    workspace.tokens[row] = {-1, -1, -1};
  }
}

/// A row of the outputs and the logits that it is about.
struct RowTask {
  TokenRow token;
  RowRef row;
  float scale;
  /// NaN where the token is no id.
  float own;
};
__device__ RowTask row_task(const TokenLogprobsParams& params, const TokenRow& token) {
  RowTask task = {token, row_of(params.logits, token.logits_row < 0 ? 0 : token.logits_row), 1.0f,
                  __builtin_nanf("")};
  if (token.logits_row < 0) return task;
  const float temperature = static_cast<float>(at(params.temperature, token.entry));
  task.scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
  if (token.token >= 0 && token.token < params.vocab_size) task.own = element(task.row, token.token);
  return task;
}

/// The octet of the thread in a row of a block.
__device__ void load_row(const BlockRef& block, int row, float (&x)[kOctet]) {
  const int64_t begin = block.begin + row * kNumLanes + lane_index() * kOctet;
  load_octet(block.row, begin, block.begin + block.size, kMasked, x);
}

/// Whether any logit of a block is no NaN. A warp's.
__device__ bool has_number(const BlockRef& block) {
  bool found = false;
  for (int row = 0; row < block.rows(); ++row) {
    float x[kOctet];
    load_row(block, row, x);
    for (int j = 0; j < kOctet; ++j) {
      found |= x[j] == x[j] && row * kNumLanes + lane_index() * kOctet + j < block.size;
    }
  }
  return __any_sync(kAllLanes, found);
}

__device__ TokenBlock read_block(const BlockRef& block, float scale, float own) {
  float best = kMasked;
  bool has_nan = false;
  int count = 0;
  for (int row = 0; row < block.rows(); ++row) {
    float x[kOctet];
    load_row(block, row, x);
    for (int j = 0; j < kOctet; ++j) {
      best = fmaxf(best, x[j]);
      has_nan |= x[j] != x[j];
      // What pads the block does not count.
      count += x[j] >= own && row * kNumLanes + lane_index() * kOctet + j < block.size;
    }
  }
  best = warp_max(best);
  has_nan = __any_sync(kAllLanes, has_nan);
  count = static_cast<int>(warp_sum(count));
  // The list has it behind blocks that are masked. It changes no law: no maximum of a row is NaN.
  if (has_nan && best == kMasked && !has_number(block)) best = __builtin_nanf("");
  if (has_nan || best == -kMasked) return {{best, __builtin_nanf("")}, count};
  if (best == kMasked) return {{best, 0.0f}, count};
  const Exp2 exp2(best, scale);
  float sums[kOctet] = {};
  for (int row = 0; row < block.rows(); ++row) {
    float x[kOctet];
    load_row(block, row, x);
    for (int j = 0; j < kOctet; ++j) {
      float polynomial, power;
      exp2.factors(x[j], &polynomial, &power);
      sums[j] = fma_ftz(polynomial, power, sums[j]);
    }
  }
  return {{best, tree_sum(sums)}, count};
}

__device__ BlockRef block_of(const TokenLogprobsParams& params, const RowRef& row, int block) {
  return {row, static_cast<int64_t>(block) * kBlockSize, params.block_length(block)};
}

/// A warp to a block of a row.
__global__ void __launch_bounds__(kCtaThreads)
    read_blocks(int64_t num_ctas, TokenLogprobsParams params, TokenWorkspace workspace, int64_t num_tasks) {
  const int num_blocks = params.num_blocks();
  for (int64_t index = first_warp_task(); index < num_tasks; index += num_ctas * kCtaWarps) {
    const RowTask task = row_task(params, workspace.tokens[index / num_blocks]);
    if (task.token.logits_row < 0) continue;
    const BlockRef block = block_of(params, task.row, static_cast<int>(index % num_blocks));
    const TokenBlock read = read_block(block, task.scale, task.own);
    if (lane_index() == 0) workspace.blocks[index] = read;
  }
}

/// The largest keys that were offered: lane l holds numbers l and l + 32 in falling order, 0 where there is
/// none. Keys past the capacity may be there too, but count for nothing.
class ListingOfWarp {
 public:
  __device__ explicit ListingOfWarp(int capacity) : capacity_(capacity) {}

  __device__ uint64_t floor() const { return floor_; }
  __device__ uint64_t key(int place) const {
    return __shfl_sync(kAllLanes, place < kWarpSize ? first_ : second_, place % kWarpSize);
  }

  /// Offers the keys of all lanes.
  __device__ void offer(uint64_t key) {
    unsigned lanes = __ballot_sync(kAllLanes, key > floor_);
    for (; lanes != 0; lanes &= lanes - 1) {
      insert(__shfl_sync(kAllLanes, key, __ffs(static_cast<int>(lanes)) - 1));
    }
  }

 private:
  static_assert(kMaxTopN == 2 * kWarpSize, "a lane holds two keys");

  __device__ void insert(uint64_t key) {
    if (key <= floor_) return;
    const int lane = lane_index();
    const int place =
        __popc(__ballot_sync(kAllLanes, first_ > key)) + __popc(__ballot_sync(kAllLanes, second_ > key));
    const uint64_t before_first = __shfl_up_sync(kAllLanes, first_, 1);
    uint64_t before_second = __shfl_up_sync(kAllLanes, second_, 1);
    const uint64_t end_of_first = __shfl_sync(kAllLanes, first_, kWarpSize - 1);
    if (lane == 0) before_second = end_of_first;
    if (lane >= place) first_ = lane == place ? key : before_first;
    if (lane + kWarpSize >= place) second_ = lane + kWarpSize == place ? key : before_second;
    floor_ = this->key(capacity_ - 1);
  }

  int capacity_;
  uint64_t floor_ = 0, first_ = 0, second_ = 0;
};

/// Lists the likeliest ids. They lie in the blocks with the largest maxima.
__device__ void list_ids(const TokenLogprobsParams& params, const RowTask& task, const TokenBlock* blocks,
                         ListingOfWarp* listing) {
  const int num_blocks = params.num_blocks();
  ListingOfWarp maxima(params.top_n);
  for (int begin = 0; begin < num_blocks; begin += kWarpSize) {
    const int block = begin + lane_index();
    maxima.offer(block < num_blocks ? listing_key(blocks[block].stats.max, block) : 0);
  }
  for (int b = 0; b < num_blocks; ++b) {
    if (listing_key(blocks[b].stats.max, b) < maxima.floor()) continue;
    const BlockRef block = block_of(params, task.row, b);
    for (int row = 0; row < block.rows(); ++row) {
      float x[kOctet];
      load_row(block, row, x);
      for (int j = 0; j < kOctet; ++j) {
        const int i = row * kNumLanes + lane_index() * kOctet + j;
        listing->offer(i < block.size ? listing_key(x[j], block.begin + i) : 0);
      }
    }
  }
}

/// A warp to a row.
__global__ void __launch_bounds__(kCtaThreads)
    write_rows(int64_t num_ctas, TokenLogprobsParams params, TokenWorkspace workspace) {
  const int num_blocks = params.num_blocks();
  for (int64_t row = first_warp_task(); row < params.num_rows; row += num_ctas * kCtaWarps) {
    const RowTask task = row_task(params, workspace.tokens[row]);
    if (task.token.logits_row < 0) {
      if (lane_index() == 0) write_nothing(params, row);
      continue;
    }
    const TokenBlock* blocks = workspace.blocks + row * num_blocks;
    RowMax largest = {kMasked, false};
    int64_t rank = 0;
    for (int block = lane_index(); block < num_blocks; block += kWarpSize) {
      largest.max = fmaxf(largest.max, blocks[block].stats.max);
      largest.non_finite |= blocks[block].stats.sum != blocks[block].stats.sum;
      rank += blocks[block].num_not_below;
    }
    largest = {warp_max(largest.max), __any_sync(kAllLanes, largest.non_finite) != 0};
    rank = warp_sum(rank);
    double total = 0.0;
    for (int begin = 0; begin < num_blocks; begin += kWarpSize) {
      const int block = begin + lane_index();
      double sum = 0.0, weight = 0.0;
      if (block < num_blocks && blocks[block].stats.sum > 0.0f) {
        sum = static_cast<double>(blocks[block].stats.sum);
        weight = block_weight(blocks[block].stats, largest.max, task.scale);
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const double next_sum = __shfl_sync(kAllLanes, sum, lane);
        const double next_weight = __shfl_sync(kAllLanes, weight, lane);
        if (next_sum > 0.0) total = fma64(next_sum, next_weight, total);
      }
    }
    const RowLaw law = row_law_from_total(task.scale, largest, total);
    if (lane_index() == 0) write_own_token(params, row, task.token, law, task.own, rank);
    if (params.top_n == 0) continue;
    ListingOfWarp listing(params.top_n);
    list_ids(params, task, blocks, &listing);
    for (int i = 0; i < params.top_n; ++i) {
      const uint64_t key = listing.key(i);
      if (i % kWarpSize == lane_index()) {
        write_token(params, row, 1 + i, id_of_key(key), law, logit_of_key(key));
      }
    }
  }
}

}  // namespace

int64_t token_logprobs_workspace_size(const TokenLogprobsParams& params) {
  return params.num_rows * static_cast<int64_t>(sizeof(TokenRow) + static_cast<size_t>(params.num_blocks()) *
                                                                       sizeof(TokenBlock));
}

cudaError_t launch_token_logprobs(const TokenLogprobsParams& params, void* memory, cudaStream_t stream) {
  const TokenWorkspace workspace = workspace_at(memory, params);
  cudaError_t error = launch(place_tokens, 1, kCtaThreads, stream, params, workspace);
  if (error != cudaSuccess) return error;
  const int64_t num_tasks = params.num_rows * params.num_blocks();
  error = launch(read_blocks, ctas_of_warps(num_tasks), kCtaThreads, stream, params, workspace, num_tasks);
  if (error != cudaSuccess) return error;
  return launch(write_rows, ctas_of_warps(params.num_rows), kCtaThreads, stream, params, workspace);
}

}  // namespace specdec_ops::cuda

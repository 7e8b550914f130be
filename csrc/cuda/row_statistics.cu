// Statistics of rows of logits: blocks by warps, then rows from their blocks.
// csrc/cpu/kernels/row_statistics.kernel.h defines the bits.

#include "cuda/row_statistics.h"

#include "cuda/blocks.cuh"
#include "cuda/cta.cuh"
#include "cuda/launch.h"

namespace specdec_ops::cuda {
namespace {

/// A row once its blocks were read.
struct ReadRow {
  RowLaw law;
  /// Where the law is one-hot.
  int64_t argmax;
};

/// What the launches of a call hand on. Target rows come first, then draft rows.
struct RowWorkspace {
  BlockStatistics* blocks;  ///< [rows, num_blocks]
  ReadRow* rows;            ///< [rows]
  float2* overlaps;         ///< [num_rows, num_blocks], of pairs: sums of min(p, q) and of max(p - q, 0)
};

int64_t num_rows_read(const RowStatisticsParams& params) {
  return params.num_rows * (params.has_draft() ? 2 : 1);
}

RowWorkspace workspace_at(void* memory, const RowStatisticsParams& params) {
  RowWorkspace workspace;
  workspace.rows = static_cast<ReadRow*>(memory);
  workspace.blocks = reinterpret_cast<BlockStatistics*>(workspace.rows + num_rows_read(params));
  workspace.overlaps =
      reinterpret_cast<float2*>(workspace.blocks + num_rows_read(params) * params.num_blocks());
  return workspace;
}

/// A row of the call: which logits, and the temperature of the law that is made of them.
struct RowTask {
  RowRef row;
  float temperature;
  bool exists;

  __device__ float scale() const { return log2_scale(is_greedy(temperature) ? 1.0f : temperature); }
};
__device__ RowTask row_task(const RowStatisticsParams& params, int64_t index) {
  const bool is_draft = index >= params.num_rows;
  const int64_t row = is_draft ? index - params.num_rows : index;
  const int64_t target_row = params.target_row(row);
  // A pair without a target row is not looked at.
  if (target_row < 0) return {{nullptr, DType::kFloat32}, 1.0f, false};
  if (is_draft) return {row_of(params.draft, row), params.draft_temperature_of(row), true};
  return {row_of(params.target, target_row), params.temperature_of(row), true};
}

__device__ BlockRef block_of(const RowStatisticsParams& params, const RowRef& row, int block) {
  return {row, static_cast<int64_t>(block) * kBlockSize, params.block_length(block)};
}

/// The octet of the thread in a row of a block.
__device__ void load_row(const BlockRef& block, int row, float (&x)[kOctet]) {
  const int64_t begin = block.begin + row * kNumLanes + lane_index() * kOctet;
  load_octet(block.row, begin, block.begin + block.size, kMasked, x);
}

__device__ TopTwo warp_top_two(TopTwo top) {
  for (int distance = kWarpSize / 2; distance >= 1; distance /= 2) {
    const float first = __shfl_xor_sync(kAllLanes, top.first, distance);
    const float second = __shfl_xor_sync(kAllLanes, top.second, distance);
    top.offer(first);
    top.offer(second);
  }
  return top;
}

__device__ BlockStatistics block_statistics(const BlockRef& block, float scale) {
  TopTwo top;
  bool has_nan = false;
  for (int row = 0; row < block.rows(); ++row) {
    float x[kOctet];
    load_row(block, row, x);
    for (int j = 0; j < kOctet; ++j) {
      top.offer(x[j]);
      has_nan |= x[j] != x[j];
    }
  }
  top = warp_top_two(top);
  has_nan = __any_sync(kAllLanes, has_nan);
  if (has_nan || top.first == -kMasked) return {top, __builtin_nanf(""), 0.0f};
  if (top.first == kMasked) return {top, 0.0f, 0.0f};
  const Exp2 exp2(top.first, scale);
  float sums[kOctet] = {}, moments[kOctet] = {};
  for (int row = 0; row < block.rows(); ++row) {
    float x[kOctet];
    load_row(block, row, x);
    for (int j = 0; j < kOctet; ++j) {
      float polynomial, power;
      exp2.factors(x[j], &polynomial, &power);
      sums[j] = fma_ftz(polynomial, power, sums[j]);
      const float above = max_or_nan(exp2.floor, sub_ftz(x[j], exp2.reference));
      moments[j] = fma_ftz(mul_ftz(polynomial, power), above, moments[j]);
    }
  }
  return {top, tree_sum(sums), tree_sum(moments)};
}

/// A warp to a block of a row.
__global__ void __launch_bounds__(kCtaThreads)
    read_blocks(int64_t num_ctas, RowStatisticsParams params, RowWorkspace workspace, int64_t num_tasks) {
  const int num_blocks = params.num_blocks();
  for (int64_t task = first_warp_task(); task < num_tasks; task += num_ctas * kCtaWarps) {
    const RowTask row = row_task(params, task / num_blocks);
    if (!row.exists) continue;
    const BlockRef block = block_of(params, row.row, static_cast<int>(task % num_blocks));
    const BlockStatistics stats = block_statistics(block, row.scale());
    if (lane_index() == 0) workspace.blocks[task] = stats;
  }
}

/// The lowest id with the largest logit that is not NaN; 0 if there is none.
__device__ int64_t argmax_of_row(const RowStatisticsParams& params, const RowRef& row,
                                 const BlockStatistics* blocks, float max) {
  for (int b = 0; b < params.num_blocks(); ++b) {
    if (blocks[b].top.first != max) continue;
    const BlockRef block = block_of(params, row, b);
    int found = kBlockSize;
    for (int r = block.rows() - 1; r >= 0; --r) {
      float x[kOctet];
      load_row(block, r, x);
      for (int j = kOctet - 1; j >= 0; --j) {
        if (x[j] == max) found = r * kNumLanes + lane_index() * kOctet + j;
      }
    }
    found = warp_min(found);
    if (found < block.size) return block.begin + found;
  }
  return 0;
}

/// A warp to a row. Terms are found by the lanes and added in the order of the blocks.
__global__ void __launch_bounds__(kCtaThreads)
    read_rows(int64_t num_ctas, RowStatisticsParams params, RowWorkspace workspace, int64_t num_rows) {
  const int num_blocks = params.num_blocks();
  for (int64_t index = first_warp_task(); index < num_rows; index += num_ctas * kCtaWarps) {
    const RowTask task = row_task(params, index);
    const bool is_draft = index >= params.num_rows;
    if (!task.exists) {
      if (!is_draft && lane_index() == 0) write_no_row(params, index);
      continue;
    }
    const BlockStatistics* blocks = workspace.blocks + index * num_blocks;
    TopTwo top;
    bool non_finite = false;
    for (int block = lane_index(); block < num_blocks; block += kWarpSize) {
      top.offer(blocks[block].top.first);
      top.offer(blocks[block].top.second);
      non_finite |= blocks[block].sum != blocks[block].sum;
    }
    top = warp_top_two(top);
    non_finite = __any_sync(kAllLanes, non_finite);
    const float scale = task.scale();
    RowTotals totals;
    for (int begin = 0; begin < num_blocks; begin += kWarpSize) {
      const int block = begin + lane_index();
      double sum = 0.0, energy = 0.0, weight = 0.0;
      if (block < num_blocks && blocks[block].sum > 0.0f) {
        sum = static_cast<double>(blocks[block].sum);
        energy = block_energy(blocks[block], top.first, scale);
        weight = block_weight(blocks[block], top.first, scale);
      }
      for (int lane = 0; lane < kWarpSize; ++lane) {
        const double next_sum = __shfl_sync(kAllLanes, sum, lane);
        const double next_energy = __shfl_sync(kAllLanes, energy, lane);
        const double next_weight = __shfl_sync(kAllLanes, weight, lane);
        if (next_sum > 0.0) totals.add(next_sum, next_energy, next_weight);
      }
    }
    ReadRow read;
    read.law = row_law_from_total(scale, {top.first, non_finite}, totals.total);
    read.argmax = params.has_draft() && is_greedy(task.temperature)
                      ? argmax_of_row(params, task.row, blocks, top.first)
                      : -1;
    if (lane_index() != 0) continue;
    if (is_draft) {
      read.law = row_law_from_logsumexp(scale, read.law.logsumexp);
    } else {
      write_statistics(params, index, read.law, top, totals);
    }
    workspace.rows[index] = read;
  }
}

/// Whether the overlap of a pair has to be summed over the vocabulary.
__device__ bool is_summed(const ReadRow& target, const ReadRow& draft) {
  return target.argmax < 0 && draft.argmax < 0 && target.law.usable() && draft.law.usable();
}

/// A warp to a block of a pair.
__global__ void __launch_bounds__(kCtaThreads)
    compare_blocks(int64_t num_ctas, RowStatisticsParams params, RowWorkspace workspace, int64_t num_tasks) {
  const int num_blocks = params.num_blocks();
  for (int64_t task = first_warp_task(); task < num_tasks; task += num_ctas * kCtaWarps) {
    const int64_t row = task / num_blocks, draft_row = params.num_rows + row;
    const int b = static_cast<int>(task % num_blocks);
    const RowTask target_task = row_task(params, row), draft_task = row_task(params, draft_row);
    if (!target_task.exists || !is_summed(workspace.rows[row], workspace.rows[draft_row])) continue;
    const auto probs = [&](const RowTask& of, int64_t index) {
      return probs_of_block(block_of(params, of.row, b), nullptr, workspace.rows[index].law,
                            workspace.blocks[index * num_blocks + b].top.first);
    };
    const WeightsOfLogits target = probs(target_task, row), draft = probs(draft_task, draft_row);
    float common[kOctet] = {}, excess[kOctet] = {};
    for (int r = 0; r < target.block.rows(); ++r) {
      float p[kOctet], q[kOctet];
      target.octet(r * kNumLanes + lane_index() * kOctet, p);
      draft.octet(r * kNumLanes + lane_index() * kOctet, q);
      for (int j = 0; j < kOctet; ++j) {
        common[j] = add_ftz(common[j], p[j] < q[j] ? p[j] : q[j]);
        const float rest = sub_ftz(p[j], q[j]);
        excess[j] = add_ftz(excess[j], rest > 0.0f ? rest : 0.0f);
      }
    }
    const float common_sum = tree_sum(common), excess_sum = tree_sum(excess);
    if (lane_index() == 0) workspace.overlaps[task] = make_float2(common_sum, excess_sum);
  }
}

/// A thread to a pair.
__global__ void __launch_bounds__(kCtaThreads)
    write_overlaps(int64_t num_ctas, RowStatisticsParams params, RowWorkspace workspace) {
  for (int64_t row = first_thread_task(); row < params.num_rows; row += num_ctas * kCtaThreads) {
    const RowTask target_task = row_task(params, row), draft_task = row_task(params, params.num_rows + row);
    if (!target_task.exists) continue;
    const ReadRow target = workspace.rows[row], draft = workspace.rows[params.num_rows + row];
    if (!target.law.usable()) {
      write_no_overlap(params, row, /*is_draft=*/false);
    } else if (draft.argmax >= 0 && target.argmax >= 0) {
      write_overlap(params, row, overlap_of_one_hot(draft.argmax == target.argmax));
    } else if (draft.argmax >= 0) {
      const float logit = element(target_task.row, draft.argmax);
      write_overlap(params, row, overlap_of_one_hot(target.law.prob(logit)));
    } else if (!draft.law.usable()) {
      write_no_overlap(params, row, /*is_draft=*/true);
    } else if (target.argmax >= 0) {
      const float logit = element(draft_task.row, target.argmax);
      write_overlap(params, row, overlap_of_one_hot(draft.law.prob(logit)));
    } else {
      Overlap sum;
      for (int block = 0; block < params.num_blocks(); ++block) {
        const float2 part = workspace.overlaps[row * params.num_blocks() + block];
        sum.common = sum.common + static_cast<double>(part.x);
        sum.excess = sum.excess + static_cast<double>(part.y);
      }
      write_overlap(params, row, sum);
    }
  }
}

}  // namespace

int64_t row_statistics_workspace_size(const RowStatisticsParams& params) {
  const int64_t rows = num_rows_read(params), blocks = params.num_blocks();
  return rows * static_cast<int64_t>(sizeof(ReadRow)) +
         rows * blocks * static_cast<int64_t>(sizeof(BlockStatistics)) +
         (params.has_draft() ? params.num_rows * blocks * static_cast<int64_t>(sizeof(float2)) : 0);
}

cudaError_t launch_row_statistics(const RowStatisticsParams& params, void* memory, cudaStream_t stream) {
  const RowWorkspace workspace = workspace_at(memory, params);
  const int64_t rows = num_rows_read(params), blocks = params.num_blocks();
  cudaError_t error = launch(read_blocks, ctas_of_warps(rows * blocks), kCtaThreads, stream, params,
                             workspace, rows * blocks);
  if (error != cudaSuccess) return error;
  error = launch(read_rows, ctas_of_warps(rows), kCtaThreads, stream, params, workspace, rows);
  if (error != cudaSuccess || !params.has_draft()) return error;
  const int64_t pairs = params.num_rows;
  error = launch(compare_blocks, ctas_of_warps(pairs * blocks), kCtaThreads, stream, params, workspace,
                 pairs * blocks);
  if (error != cudaSuccess) return error;
  return launch(write_overlaps, ctas_of_threads(pairs), kCtaThreads, stream, params, workspace);
}

}  // namespace specdec_ops::cuda

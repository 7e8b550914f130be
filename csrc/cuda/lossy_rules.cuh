#pragma once

// Rules that bend the law of what is emitted (docs/rules.md): what accepts_by_lossy_rule and
// csrc/cpu/kernels/lossy_rules.kernel.h do. Included by judge.cuh.

namespace specdec_ops::cuda {

/// The sum of w * log2 w over a block, where w are the weights relative to the block's largest logit. By a
/// warp.
static __device__ __noinline__ float weighted_logs_of_block(BlockRef block, float max, float scale,
                                                            uint4* stage) {
  fetch_block(block, stage);
  const WeightsOfLogits source(block, stage, max, scale, 1.0f);
  float sums[kOctet] = {};
#pragma unroll 1
  for (int row = 0; row < block.rows(); ++row) {
    float weights[kOctet], logits[kOctet];
    const int octet = row * kWarpSize + lane_index();
    source.octet(octet * kOctet, weights);
    staged_octet(stage, block.row.dtype, octet, logits);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      const float term = weights[j] * ((logits[j] - max) * scale);
      sums[j] = sums[j] + (weights[j] > 0.0f ? term : 0.0f);
    }
  }
  return tree_sum(sums);
}

/// Entropy of a row in nats, by the whole CTA; `terms` has room for a number of each block.
static __device__ __noinline__ void find_entropy_of_row(const Plan& plan, RowRef row, const BlockStats* stats,
                                                        const RowLaw& law, uint4* stage, double* terms,
                                                        Scratch& scratch) {
#pragma unroll 1
  for (int block = warp_index(); block < plan.num_blocks; block += num_warps()) {
    const BlockStats of_block = load_stats(stats + block);
    double term = 0.0;
    if (of_block.sum > 0.0f) {
      const double log2_prob = law.log2_prob(of_block.max);
      const float logs =
          weighted_logs_of_block(block_of(plan.params, row, block), of_block.max, law.scale, stage);
      term = exp2_out_of_line(log2_prob) *
             (static_cast<double>(logs) + static_cast<double>(of_block.sum) * log2_prob);
    }
    if (lane_index() == 0) terms[block] = term;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    double bits = 0.0;
    for (int block = 0; block < plan.num_blocks; ++block) bits = bits - terms[block];
    scratch.entropy = bits > 0.0 ? bits * kLn2 : 0.0;
  }
  __syncthreads();
}

/// Whether fewer than `most` logits of a row are larger, by the whole CTA.
static __device__ __noinline__ bool has_fewer_larger(const Plan& plan, RowRef row, const BlockStats* stats,
                                                     float logit, int64_t most, uint4* stage,
                                                     Scratch& scratch) {
  int64_t count = 0;
#pragma unroll 1
  for (int block = warp_index(); block < plan.num_blocks && count < most; block += num_warps()) {
    if (!(load_stats(stats + block).max > logit)) continue;
    const BlockRef ref = block_of(plan.params, row, block);
    fetch_block(ref, stage);
    int larger = 0;
#pragma unroll 1
    for (int r = 0; r < ref.rows(); ++r) {
      float x[kOctet];
      staged_octet(stage, row.dtype, r * kWarpSize + lane_index(), x);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) larger += x[j] > logit ? 1 : 0;
    }
    count += warp_sum(larger);
  }
  if (lane_index() == 0) scratch.counts[warp_index()] = count;
  __syncthreads();
  count = 0;
  for (int warp = 0; warp < num_warps(); ++warp) count += scratch.counts[warp];
  __syncthreads();
  return count < most;
}

/// Leaves the two largest logits of a row behind, by the whole CTA.
static __device__ __noinline__ void find_two_largest(const Plan& plan, RowRef row, const BlockStats* stats,
                                                     uint4* stage, Scratch& scratch) {
  const LargestLogitsOfWarp largest = find_largest(plan, row, stats, 2, stage, scratch);
  __syncthreads();
  if (warp_index() == 0) largest.store(scratch.largest[0]);
  __syncthreads();
}

template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::has_lossy_rule(int i) const {
  return !params_.rule_mask || at(params_.rule_mask, request_.first_draft + begin_ + i);
}

/// Of a valid draft's slot: what stands before p at token level and in the residual.
template <Variant kVariant>
__device__ __forceinline__ double Judge<kVariant>::weight_of_target(int i) const {
  return params_.rule == Rule::kLenience && has_lossy_rule(i) ? 1.0 / params_.rule_parameters[0] : 1.0;
}

/// Changes what the law says of a valid draft, as far as a thread can tell.
template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::bend_verdict(const Draft& draft, Verdict* verdict) const {
  const int i = own_slot();
  const double first = params_.rule_parameters[0], second = params_.rule_parameters[1];
  bool accepted = verdict->outcome == Outcome::kAccepted, asks_row = false;
  switch (params_.rule) {
    case Rule::kLenience:
      // With draws its weight has told.
      accepted = accepted || (request_.greedy && is_within(draft.target, s_.row_max[i].max, first));
      break;
    case Rule::kMargin:
      asks_row = !accepted;
      break;
    case Rule::kThresholds: {
      if (request_.greedy) break;
      const double p = exp2_out_of_line(s_.laws[i].log2_prob(draft.target));
      accepted = p > 0.0 && (p >= first || draft.coin * second < p);
      verdict->status = Status::kOk;
      verdict->final = Final::kTargetWithoutDraft;
      break;
    }
    case Rule::kTypical:
      if (request_.greedy) break;
      accepted = exp2_out_of_line(s_.laws[i].log2_prob(draft.target)) > first;
      asks_row = !accepted;
      verdict->status = Status::kOk;
      break;
    default:  // kTopN
      asks_row = true;
      verdict->status = Status::kOk;
  }
  if (accepted) verdict->token = draft.x;
  verdict->outcome = asks_row          ? Outcome::kAsksRow
                     : accepted        ? Outcome::kAccepted
                     : request_.greedy ? Outcome::kEnds
                                       : Outcome::kDraws;
}

/// Greedy lenience: whether p(x) is no smaller than a part of the largest p.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::is_within(float logit, float largest, double part) const {
  return (static_cast<double>(logit) - static_cast<double>(largest)) * static_cast<double>(request_.scale) >=
         log2_f64(part);
}

/// Asks the rows, up to the first slot that the request ends in.
template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::ask_rows(int count) {
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    const Verdict verdict = s_.verdicts[i];
    if (verdict.outcome == Outcome::kAccepted) continue;
    if (verdict.outcome != Outcome::kAsksRow) return;
    const bool accepted = row_accepts(i, verdict.x);
    Outcome outcome = accepted ? Outcome::kAccepted : Outcome::kDraws;
    int64_t token = verdict.x;
    if (!accepted && (request_.greedy || params_.rule != Rule::kMargin)) {
      // Nothing is drawn: the most probable id.
      outcome = Outcome::kEnds;
      token = request_.greedy ? s_.argmax[i] : argmax_by_first_warp(i);
    }
    __syncthreads();  // everybody has read the verdict
    if (thread() == 0) {
      s_.verdicts[i].outcome = outcome;
      s_.verdicts[i].token = token;
    }
    __syncthreads();
    if (!accepted) return;
  }
}

/// Whether the rule accepts a draft that it asks the row for.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::row_accepts(int i, int64_t x) {
  const RowRef row = target_row(begin_ + i);
  const BlockStats* stats = target_stats(begin_ + i);
  const RowLaw law = s_.laws[i];
  const float logit = element(row, x);
  const double first = params_.rule_parameters[0], second = params_.rule_parameters[1];
  if (params_.rule == Rule::kTypical) {
    find_entropy_of_row(plan_, row, stats, law, stage_, masses_, s_);
    return exp2_out_of_line(law.log2_prob(logit)) > second * exp2_out_of_line(-s_.entropy * kLog2E);
  }
  if (params_.rule == Rule::kTopN) {
    const double gap =
        exp2_out_of_line(law.log2_prob(s_.row_max[i].max)) - exp2_out_of_line(law.log2_prob(logit));
    return logit > kMasked && gap <= second &&
           has_fewer_larger(plan_, row, stats, logit, static_cast<int64_t>(first), stage_, s_);
  }
  find_two_largest(plan_, row, stats, stage_, s_);
  const float largest = s_.largest[0][0], next = s_.largest[0][1];
  return logit >= next && next > 0.0f && static_cast<double>(next) > first * static_cast<double>(largest);
}

template <Variant kVariant>
__device__ __forceinline__ int64_t Judge<kVariant>::argmax_by_first_warp(int i) {
  if (warp_index() == 0) {
    const int64_t id = argmax_of(i, /*stats_stay=*/false);
    if (lane_index() == 0) s_.argmax[i] = id;
  }
  __syncthreads();
  return s_.argmax[i];
}

/// Like draw, from the residual of weighted p; queues it where it must be made first.
template <Variant kVariant>
__device__ __forceinline__ int64_t Judge<kVariant>::draw_weighted(int i, const Verdict& verdict,
                                                                  bool has_residual, Status* status) {
  const double weight = verdict.final == Final::kTarget ? 1.0 : weight_of_target(i);
  const RowLaw law = scale_law(weight, i);
  const int64_t token = draw(i, verdict, has_residual, status);
  if (token < 0) queue_residual(i);
  restore_law(law, i);
  return token;
}

}  // namespace specdec_ops::cuda

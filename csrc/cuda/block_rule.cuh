#pragma once

// Block verification (Sun et al., arXiv 2403.10444) of a request that samples, on a whole CTA: what
// csrc/cpu/kernels/block_rule.kernel.h does. Included by judge.cuh.

namespace specdec_ops::cuda {

/// What block verification finds on its way back through the chain.
struct FoundToken {
  /// -1: none yet.
  int64_t token = -1;
  Status status = Status::kOk;
};

template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::run_block_rule() {
  const int64_t num_drafts = request_.num_drafts;
  for (int64_t slot = thread(); slot < num_drafts && params_.accept_probs != nullptr; slot += num_threads()) {
    params_.accept_probs[request_.first_draft + slot] = __builtin_nanf("");
  }
  wait_for_previous_launch();
  const int end = read_chain();
  FoundToken found;
  int accepted = end;
#pragma unroll 1
  while (accepted > 0 && !wins(accepted - 1, end, &found)) --accepted;
  if (accepted == end) {
    end_chain(end);
    return;
  }
  select(accepted);
  if (found.token < 0 && !recover_in_chain(accepted, &found)) return queue_residual(0);
  if (thread() == 0) emit_with_logprob(0, found.token);
  finish(accepted, found.status);
}

/// The rows of one slot take the place of a wave.
template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::select(int slot) {
  begin_ = slot;
  end_ = slot + 1;
  __syncthreads();
  find_maxima();
  make_laws();
  find_argmaxes();
}

/// Fills in the slots of all drafts up to the first one that does not count, and returns its slot.
template <Variant kVariant>
__device__ __forceinline__ int Judge<kVariant>::read_chain() {
  const int num_drafts = static_cast<int>(request_.num_drafts);
  int end = 0;
  double chance = 1.0;
#pragma unroll 1
  for (begin_ = 0; begin_ < num_drafts; begin_ = end_) {
    end_ = min(num_drafts, begin_ + kLargestWave);
    __syncthreads();
    find_maxima();
    make_laws();
    Draft draft = load_draft();
    if constexpr (kFilters) mask_draft(&draft);
    if (has_slot()) fill_block_slot(draft);
    __syncthreads();
    for (end = begin_; end < end_ && block_slot(end)->x >= 0; ++end) {
      const BlockSlot slot = *block_slot(end);
      chance = next_chance(chance, slot.p, slot.q);
      // Every thread finds the same; this one writes it down.
      if (thread() != end - begin_) continue;
      block_slot(end)->chance = chance;
      if (params_.accept_probs != nullptr) {
        params_.accept_probs[request_.first_draft + end] = static_cast<float>(chance);
      }
    }
    if (end < end_) break;
  }
  __syncthreads();
  return end;
}

/// What a thread makes of its slot. Emits the draft: what is not accepted is written again.
template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::fill_block_slot(const Draft& draft) {
  const int i = own_slot();
  const int64_t slot = begin_ + i;
  if (params_.logsumexp != nullptr) params_.logsumexp[request_.first_row + slot] = s_.laws[i].logsumexp;
  BlockSlot result = {};
  result.x = -1;
  if (draft.valid && row_status(i) == Status::kOk) {
    result.x = draft.x;
    result.coin = draft.coin;
    const double log2_prob = s_.laws[i].log2_prob(draft.target);
    result.p = exp2_out_of_line(log2_prob);
    result.q = request_.has_law ? draft_prob(draft) : 1.0;
    // The one-hot law is exact for every drafter.
    result.is_unusable = result.q != result.q;
    result.one_hot = !request_.has_law || result.is_unusable;
    if (result.one_hot) result.q = 1.0;
    emit(slot, draft.x);
    emit_logprob(slot, log2_prob * kLn2);
  }
  *block_slot(slot) = result;
}

/// Whether the drafts up to this slot are accepted, once those up to a later one are not.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::wins(int s, int end, FoundToken* found) {
  const BlockSlot slot = *block_slot(s);
  if (!(slot.coin < slot.chance)) return false;
  if (s + 1 == end) return true;
  const BlockSlot next = *block_slot(s + 1);
  if (next.one_hot) return block_accepts(slot.coin, slot.chance, slot.chance * rest_of(next.p));
  select(s + 1);
  if (params_.draft_law == DraftLawKind::kSupport) {
    return block_accepts(slot.coin, slot.chance, mass_beyond_support(slot.chance));
  }
  if (params_.accept_uniforms) return passes(slot, slot.coin, final_draw(s + 1, 0), found);
  return thins_in_chain(s, slot, found);
}

template <Variant kVariant>
__device__ __forceinline__ double Judge<kVariant>::block_number(int s, int number) const {
  return uniform_of(words_out_of_line(request_.seed, Stream::kBlock,
                                      int64_t{s} * kBlockNumbersPerSlot + number, request_.position));
}

/// Without a pass over the rows. The attempts are independent: each warp makes one.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::thins_in_chain(int s, const BlockSlot& slot,
                                                                FoundToken* found) {
  find_masses(0, Final::kTarget, -1);
#pragma unroll 1
  for (int first = 0; first < kThinningAttempts; first += num_warps()) {
    const int attempt = first + warp_index();
    const double u = attempt == 0 ? slot.coin : block_number(s, 2 * attempt);
    // That ends without a token decides against the slot.
    Attempt result = {-1, true, false};
    if (u < slot.chance) {
      result.token = pick(0, Final::kTarget, -1, TokenDraw::from(u / slot.chance));
      const double p =
          slot.chance * exp2_out_of_line(s_.laws[0].log2_prob(element(target_row(begin_), result.token)));
      const double q = dense_prob(0, element(draft_row(begin_), result.token));
      result.unusable = !is_finite(q);
      result.kept = result.unusable || block_number(s, 2 * attempt + 1) * p < p - q;
    }
    if (lane_index() == 0) s_.attempts[attempt] = result;
    __syncthreads();
#pragma unroll 1
    for (int a = first; a < first + num_warps(); ++a) {
      if (!s_.attempts[a].kept) continue;
      found->token = s_.attempts[a].token;
      if (s_.attempts[a].unusable) found->status = Status::kUnusableDraftLaw;
      return found->token >= 0;
    }
  }
  return passes(slot, block_number(s, 2 * kThinningAttempts),
                TokenDraw::from(block_number(s, 2 * kThinningAttempts + 1)), found);
}

/// With a pass over the rows: the coin decides by Z, and the token is drawn.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::passes(const BlockSlot& slot, double coin,
                                                        const TokenDraw& token, FoundToken* found) {
  const RowLaw law = scale_law(slot.chance);
  if (thread() == 0) leave_laws(0);
  __syncthreads();
  float* masses = plan_.masses + request_.index * plan_.num_blocks;
  // Each block takes the shared memory of two warps.
  const int warps = num_warps() / 2;
#pragma unroll 1
  for (int block = warp_index(); block < plan_.num_blocks && warp_index() < warps; block += warps) {
    const float mass =
        residual_mass<kFilters>(plan_, request_, begin_, block, stage_, stage_ + warps * plan_.stage_words);
    if (lane_index() == 0) masses[block] = mass;
  }
  __syncthreads();
  Final final = Final::kDenseResidual;
  find_masses(0, final, -1);
  const double z = s_.total;
  // NaN: the draft row is not usable, and its slot counts as the end of the chain.
  const bool accepted = z != z || block_accepts(coin, slot.chance, z);
  if (accepted) {
    if (!(z > 0.0)) {
      if (z != z) found->status = Status::kUnusableDraftLaw;
      final = Final::kTarget;
      __syncthreads();
      find_masses(0, final, -1);
    }
    if (warp_index() == 0) {
      const int64_t chosen = pick(0, final, -1, token);
      if (lane_index() == 0) s_.attempts[0].token = chosen;
    }
    __syncthreads();
    found->token = s_.attempts[0].token;
  }
  restore_law(law);
  return accepted;
}

/// A multiple of p in the place of p in slot begin_ + i; returns p's law.
template <Variant kVariant>
__device__ __forceinline__ RowLaw Judge<kVariant>::scale_law(double factor, int i) {
  const RowLaw law = s_.laws[i];
  __syncthreads();
  if (thread() == 0) s_.laws[i].log2_total = law.log2_total - log2_f64(factor);
  __syncthreads();
  return law;
}

template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::restore_law(const RowLaw& law, int i) {
  __syncthreads();
  if (thread() == 0) s_.laws[i] = law;
  __syncthreads();
}

/// Z of the sparse draft law of the selected slot. A thread finds the terms of an id, the first one adds
/// them.
template <Variant kVariant>
__device__ __forceinline__ double Judge<kVariant>::mass_beyond_support(double chance) {
  const IntView ids = request_.of_drafts(params_.draft_support_ids);
  const RealView logprobs = request_.of_drafts(params_.draft_support_logprobs);
  const int64_t slot = begin_;
  double inside = 0.0, beyond = 0.0;
#pragma unroll 1
  for (int64_t begin = 0; begin < params_.draft_support_size; begin += num_threads()) {
    const int64_t j = begin + thread();
    double p = 0.0, rest = 0.0;
    const int64_t id = j < params_.draft_support_size ? at(ids, slot, j) : -1;
    if (id >= 0 && id < params_.vocab_size) {
      bool is_first = true;
      double q = 0.0;
#pragma unroll 1
      for (int64_t i = 0; i < params_.draft_support_size; ++i) {
        if (at(ids, slot, i) != id) continue;
        is_first = is_first && i >= j;
        q = q + exp2_out_of_line(at(logprobs, slot, i) * kLog2E);
      }
      if (is_first) {
        p = exp2_out_of_line(s_.laws[0].log2_prob(element(target_row(slot), id)));
        rest = chance * p - q;
      }
    }
    s_.terms[thread()][0] = p;
    s_.terms[thread()][1] = rest;
    __syncthreads();
    // A term of 0 changes nothing.
    for (int i = 0; i < num_threads(); ++i) {
      inside = inside + s_.terms[i][0];
      if (s_.terms[i][1] > 0.0) beyond = beyond + s_.terms[i][1];
    }
    __syncthreads();
  }
  return chance * rest_of(inside) + beyond;
}

/// The token after the accepted drafts, in the selected slot; false where the residual must be made first.
template <Variant kVariant>
__device__ __forceinline__ bool Judge<kVariant>::recover_in_chain(int accepted, FoundToken* found) {
  const BlockSlot slot = *block_slot(accepted);
  Verdict verdict = {Outcome::kDraws, Final::kDenseResidual, Status::kOk, 0.0f, slot.x, slot.x};
  double chance = 1.0;
  if (slot.one_hot) {
    verdict.final = Final::kTargetWithoutDraft;
    if (slot.is_unusable) found->status = Status::kUnusableDraftLaw;
  } else if (params_.draft_law == DraftLawKind::kSupport) {
    verdict.final = Final::kSupportResidual;
    if (accepted > 0) chance = block_slot(accepted - 1)->chance;
  }
  const RowLaw law = scale_law(chance);
  found->token = draw(0, verdict, /*has_residual=*/false, &found->status);
  restore_law(law);
  return found->token >= 0;
}

/// Every draft that counts is accepted: a bonus token, or what stands in its place.
template <Variant kVariant>
__device__ __forceinline__ void Judge<kVariant>::end_chain(int end) {
  if (end == request_.num_drafts && params_.bonus_token_ids) {
    end_ = end;
    return end_with_given_bonus();
  }
  select(end);
  const Draft draft = load_draft();
  if (has_slot()) s_.verdicts[own_slot()] = verdict_of(draft);
  __syncthreads();
  if (thread() == 0) write_slot(0, 0);
  end_at(0, s_.verdicts[0], /*has_residual=*/false);
}

}  // namespace specdec_ops::cuda

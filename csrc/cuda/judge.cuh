#pragma once

#include "cuda/gumbel.cuh"
#include "cuda/largest_logits.cuh"
#include "cuda/plan.cuh"

/// What becomes of a request once the rows it waited for are read.
namespace specdec_ops::cuda {

/// What to draw from where no further draft is accepted.
enum class Final : int32_t { kTarget, kTargetWithoutDraft, kSupportResidual, kDenseResidual };

/// kAsksRow: what is not known of the row decides.
enum class Outcome : int32_t { kAccepted, kEnds, kDraws, kUnsure, kAsksRow };

/// What a judge must be able to do. Each is a kernel of its own, so that the others' registers are not its.
/// All but the plain one know that rows may be cut.
enum class Variant {
  kPlain,
  kFilters,
  /// FLy.
  kLooksAhead,
  /// Block verification and exact match, and Gumbel noise.
  kOtherRules,
  /// Rules that bend the law of what is emitted.
  kLossyRules,
};

struct FoundToken;

/// What became of one slot.
struct Verdict {
  Outcome outcome;
  Final final;
  Status status;
  float accept_prob;
  /// The draft, and the token that is emitted unless it is to be drawn.
  int64_t x, token;
};

/// A row's law to five digits: p(v) = 2^((x_v - max) * scale) / total.
struct QuickLaw {
  float max, total;
};

/// A token of p that may become the recovered token.
struct Attempt {
  int64_t token;
  bool kept, unusable;
};

/// Numbers of the blocks of all rows that are judged at once. In the shared memory of the blocks, before any
/// is fetched.
struct StatsOfRows {
  BlockStats stats[kRowsAtOnce][kBlocksAtOnce + 1];
  double weights[kRowsAtOnce][kBlocksAtOnce + 1];
};
static_assert(sizeof(StatsOfRows) <= kFewestJudgingWarps * stage_words(DType::kBFloat16) * sizeof(uint4));

struct Scratch {
  union {
    /// While a token is drawn.
    PickScratch pick[kMostJudgingWarps];
    /// While the largest logits of a row are found.
    float largest[kMostJudgingWarps][kMaxEntropyTopK];
    /// While larger logits are counted.
    int64_t counts[kMostJudgingWarps];
    /// While a token is drawn by noise.
    ScoredId scored[kMostJudgingWarps];
    /// While a sparse draft law is taken away from the target's.
    double terms[kMostJudgingWarps * kWarpSize][2];
  };
  RowMax row_max[kRowsAtOnce];
  /// Of the target's rows, then of the drafts'.
  RowLaw laws[kRowsAtOnce];
  QuickLaw quick_laws[kRowsAtOnce];
  Verdict verdicts[kLargestWave];
  int64_t argmax[kLargestWave];
  double total, entropy;
  Attempt attempts[kThinningAttempts];
};

/// p without the ids of a one-hot or sparse draft law, in a block that holds one of them.
struct SparseResidual {
  WeightsOfLogits target;
  IntView ids;
  RealView logprobs;
  int64_t support_size, vocab_size;
  bool one_hot;
  int64_t slot, x;

  __device__ int size() const { return target.size(); }

  __device__ void octet(int i, float (&weights)[kOctet]) const {
    target.octet(i, weights);
    const int64_t first = target.block.begin + i;
    if (one_hot) {
#pragma unroll
      for (int j = 0; j < kOctet; ++j) weights[j] = x == first + j ? 0.0f : weights[j];
      return;
    }
#pragma unroll 1
    for (int64_t k = 0; k < support_size; ++k) {
      const int64_t id = at(ids, slot, k);
      if (id < first || id >= first + kOctet || id >= vocab_size) continue;
      const float q = static_cast<float>(exp2_out_of_line(at(logprobs, slot, k) * kLog2E));
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        const float rest = weights[j] - q;
        if (id == first + j) weights[j] = rest > 0.0f ? rest : 0.0f;
      }
    }
  }
};

/// Out of line, like exp2_out_of_line: long, and not on the way of the units.
static __device__ __noinline__ PhiloxBlock words_out_of_line(int64_t seed, Stream stream, int64_t slot,
                                                             int64_t position) {
  return random_words(seed, stream, slot, position);
}

/// The largest logits of a row, in the first warp, by the whole CTA: each warp finds those of a part of the
/// blocks.
static __device__ __forceinline__ LargestLogitsOfWarp find_largest(const Plan& plan, const RowRef& row,
                                                                   const BlockStats* stats, int top_k,
                                                                   uint4* stage, Scratch& scratch) {
  LargestLogitsOfWarp maxima(top_k), largest(top_k);
#pragma unroll 1
  for (int first = 0; first < plan.num_blocks; first += kWarpSize) {
    const int block = first + lane_index();
    maxima.offer(block < plan.num_blocks ? load_stats(stats + block).max : kMasked);
  }
  // As many ids as are wanted have logits that are no smaller.
  const float least = maxima.floor();
#pragma unroll 1
  for (int block = warp_index(); block < plan.num_blocks; block += num_warps()) {
    const float max = load_stats(stats + block).max;
    if (max < least || !(max > largest.floor())) continue;
    const BlockRef ref = block_of(plan.params, row, block);
    fetch_block(ref, stage);
    largest.offer_block(stage, ref, least);
  }
  largest.store(scratch.largest[warp_index()]);
  __syncthreads();
  if (warp_index() == 0) {
    for (int warp = 1; warp < num_warps(); ++warp) {
      for (int first = 0; first < kMaxEntropyTopK; first += kWarpSize) {
        largest.offer(scratch.largest[warp][first + lane_index()]);
      }
    }
  }
  return largest;
}

/// Entropy of a row over its most probable ids (entropy_of_largest), by the whole CTA. Out of line, for few
/// calls come this way.
static __device__ __noinline__ void find_entropy(const Plan& plan, RowRef row, const BlockStats* stats,
                                                 const RowLaw& law, uint4* stage, Scratch& scratch) {
  const LargestLogitsOfWarp largest =
      find_largest(plan, row, stats, plan.params.fly_entropy_top_k, stage, scratch);
  if (warp_index() == 0) {
    const double entropy = largest.entropy(law);
    if (lane_index() == 0) scratch.entropy = entropy;
  }
  __syncthreads();
}

/// The mass of max(p - q, 0) in one block by the laws that were left behind, NaN if the draft law is not
/// usable there.
template <bool kFilters>
__device__ __noinline__ float residual_mass(const Plan& plan, const Request& request, int64_t slot, int block,
                                            uint4* stage, uint4* draft_stage) {
  const ChainParams& params = plan.params;
  const int64_t row = request.first_row + slot, draft = request.first_draft + slot;
  RowRef target_row = row_of(params.target, row), draft_row = row_of(request.of_drafts(params.draft), slot);
  if constexpr (kFilters) {
    target_row.threshold = threshold_of_target(plan, row);
    draft_row.threshold = threshold_of_draft(plan, request, slot);
  }
  const BlockRef target_block = block_of(params, target_row, block);
  const BlockRef draft_block = block_of(params, draft_row, block);
  const float target_max = load_stats(plan.target_stats + row * plan.num_blocks + block).max;
  fetch_block(target_block, stage);
  const WeightsOfLogits target =
      probs_of_block(target_block, stage, load_law(plan.laws + 2 * request.index), target_max);
  if (params.draft_law == DraftLawKind::kProbs) {
    return sum_in_lanes(Residual<GivenProbs>{target, {draft_block}}, target_block.rows());
  }
  const float draft_max = plan.reads_draft_rows
                              ? load_stats(plan.draft_stats + draft * plan.num_blocks + block).max
                              : block_max(draft_block);
  fetch_block(draft_block, draft_stage);
  const WeightsOfLogits draft_probs =
      probs_of_block(draft_block, draft_stage, load_law(plan.laws + 2 * request.index + 1), draft_max);
  return sum_in_lanes(Residual<WeightsOfLogits>{target, draft_probs}, target_block.rows());
}

/// The judge of one request, on a whole CTA. Everything but the leaves is inlined into the kernel, where a
/// parameter is an operand of an instruction and not a load through two pointers.
template <Variant kVariant>
class Judge {
 public:
  static constexpr bool kFilters = kVariant != Variant::kPlain;
  static constexpr bool kLooksAhead = kVariant == Variant::kLooksAhead;
  static constexpr bool kHasOtherRules = kVariant == Variant::kOtherRules;
  static constexpr bool kIsLossy = kVariant == Variant::kLossyRules;

  __device__ __forceinline__ Judge(const Plan& plan, const Request& request, uint4* stage, Scratch& scratch,
                                   double* masses)
      : plan_(plan),
        params_(plan.params),
        request_(request),
        stage_(stage),
        s_(scratch),
        of_rows_(*reinterpret_cast<StatsOfRows*>(stage - warp_index() * plan.stage_words)),
        masses_(masses),
        prefixes_(masses + plan.num_blocks) {}

  /// Judges the request once the launch that reads the rows is done. True: its residual must be made first.
  __device__ __forceinline__ bool run() {
    if constexpr (kHasOtherRules) {
      if (params_.rule == Rule::kBlock && !request_.greedy) {
        run_block_rule();
        return needs_residual_;
      }
    }
    end_ = min(num_slots(), kLargestWave);
    const int last = judge();
    if (last >= 0) end_at(last, s_.verdicts[last], /*has_residual=*/false);
    return needs_residual_;
  }

  /// Draws the recovered token of a slot from its residual, which is made.
  __device__ __forceinline__ void run_residual(int slot) {
    begin_ = slot;
    end_ = slot + 1;
    if constexpr (kIsLossy) {
      // What was left behind may be weighted.
      select(slot);
    } else {
      take_laws_of_residual();
    }
    end_at(0, {Outcome::kDraws, Final::kDenseResidual, Status::kOk, __builtin_nanf(""), -1, -1}, true);
  }

 private:
  /// The slot, from begin_ on, that a thread judges. Those of the last warp do: where there are few slots it
  /// has no row to look after.
  __device__ __forceinline__ static int own_slot() { return thread() - (num_warps() - 1) * kWarpSize; }
  __device__ __forceinline__ bool has_slot() const { return own_slot() >= 0 && own_slot() < end_ - begin_; }

  /// What a thread has loaded for its slot, before there are laws to hold it against.
  struct Draft {
    int64_t x = -1;
    bool is_draft = false, valid = false;
    /// Of Rule::kSynthetic: whether its coin is below the rate of the slot.
    bool wins = false;
    float target = 0.0f, draft = 0.0f;
    double coin = 1.0;
  };

  /// Ends the request in slot begin_ + last.
  __device__ __forceinline__ void end_at(int last, const Verdict verdict, bool has_residual) {
    Status status = verdict.status;
    if (verdict.outcome == Outcome::kDraws) {
      int64_t token;
      if constexpr (kIsLossy) {
        token = draw_weighted(last, verdict, has_residual, &status);
      } else {
        token = draw(last, verdict, has_residual, &status);
        if (token < 0) queue_residual(last);
      }
      if (token < 0) return;
      if (thread() == 0) emit_with_logprob(last, token);
    }
    finish(begin_ + last, status);
  }

  __device__ __forceinline__ static int thread() { return static_cast<int>(threadIdx.x); }

  __device__ __forceinline__ int num_slots() const { return static_cast<int>(request_.num_slots(params_)); }

  __device__ __forceinline__ RowRef whole_target_row(int64_t slot) const {
    return row_of(params_.target, request_.first_row + slot);
  }
  __device__ __forceinline__ RowRef whole_draft_row(int64_t slot) const {
    return row_of(request_.of_drafts(params_.draft), slot);
  }
  __device__ __forceinline__ RowRef target_row(int64_t slot) const {
    RowRef row = whole_target_row(slot);
    if constexpr (kFilters) row.threshold = threshold_of_target(plan_, request_.first_row + slot);
    return row;
  }
  __device__ __forceinline__ RowRef draft_row(int64_t slot) const {
    RowRef row = whole_draft_row(slot);
    if constexpr (kFilters) row.threshold = threshold_of_draft(plan_, request_, slot);
    return row;
  }
  __device__ __forceinline__ double draft_logsumexp(int64_t slot) const {
    return at(request_.of_drafts(params_.draft_logsumexp), slot);
  }
  __device__ __forceinline__ const BlockStats* target_stats(int64_t slot) const {
    return plan_.target_stats + (request_.first_row + slot) * plan_.num_blocks;
  }
  __device__ __forceinline__ const BlockStats* draft_stats(int64_t slot) const {
    return plan_.draft_stats + (request_.first_draft + slot) * plan_.num_blocks;
  }

  __device__ __forceinline__ Draft load_draft() const {
    Draft draft;
    const int64_t slot = begin_ + own_slot();
    draft.is_draft = has_slot() && slot < request_.num_drafts;
    if (!draft.is_draft) return draft;
    draft.x = at(params_.draft_token_ids, request_.first_draft + slot);
    const bool is_synthetic = params_.rule == Rule::kSynthetic;
    // The coin is found while the draft is on its way.
    if (is_synthetic || (!request_.greedy &&
                         (kIsLossy || params_.rule == (kHasOtherRules ? Rule::kBlock : Rule::kTokenLevel)))) {
      draft.coin =
          params_.accept_uniforms
              ? at(params_.accept_uniforms, request_.first_draft + slot)
              : uniform_of(words_out_of_line(request_.seed, Stream::kAccept, slot, request_.position));
      if (is_synthetic) draft.wins = draft.coin < at(params_.accept_rates, slot);
    }
    draft.valid = draft.x >= 0 && draft.x < params_.vocab_size;
    if (!draft.valid) draft.wins = false;
    if (draft.valid && (kIsLossy || !request_.greedy)) {
      draft.target = element(whole_target_row(slot), draft.x);
      if (request_.has_law && plan_.has_dense_law) draft.draft = element(whole_draft_row(slot), draft.x);
    }
    return draft;
  }

  /// Once thresholds are known.
  __device__ __forceinline__ void mask_draft(Draft* draft) const {
    if (!draft->valid || request_.greedy) return;
    const int64_t slot = begin_ + own_slot();
    if (draft->target < target_row(slot).threshold) draft->target = kMasked;
    if (request_.has_law && plan_.has_dense_law && draft->draft < draft_row(slot).threshold) {
      draft->draft = kMasked;
    }
  }

  // ---- Laws ----

  /// Rows of the scratch memory that have numbers in this wave, a bit to a row, the target's first.
  __device__ __forceinline__ uint32_t present_rows() const {
    const uint32_t targets = (1u << (end_ - begin_)) - 1;
    if (!plan_.reads_draft_rows || !request_.has_law || request_.greedy) return targets;
    const int64_t end = min(int64_t{end_}, request_.num_drafts);
    const int num_drafts = static_cast<int>(max(end - begin_, int64_t{0}));
    return targets | ((1u << num_drafts) - 1) << kLargestWave;
  }

  __device__ __forceinline__ float scale_of(int row) const {
    return row < kLargestWave ? request_.scale : request_.draft_scale;
  }

  /// Sixteen rows by eight threads; further threads have none.
  static constexpr int kThreadsPerRow = kFewestJudgingWarps * kWarpSize / kRowsAtOnce;
  __device__ __forceinline__ static int own_row() { return min(thread() / kThreadsPerRow, kRowsAtOnce - 1); }
  __device__ __forceinline__ static bool has_row() { return thread() < kRowsAtOnce * kThreadsPerRow; }

  __device__ __forceinline__ void load_stats_of_row(bool present, int first_block, int count) {
    if (present) {
      const int row = own_row();
      const int64_t slot = begin_ + row % kLargestWave;
      const BlockStats* stats = (row < kLargestWave ? target_stats(slot) : draft_stats(slot)) + first_block;
#pragma unroll
      for (int i = 0; i < kBlocksAtOnce / kThreadsPerRow; ++i) {
        const int block = thread() % kThreadsPerRow + i * kThreadsPerRow;
        if (block < count) of_rows_.stats[row][block] = load_stats(stats + block);
      }
    }
    __syncthreads();
  }

  __device__ __forceinline__ int num_groups() const {
    return (plan_.num_blocks + kBlocksAtOnce - 1) / kBlocksAtOnce;
  }

  /// The largest logits of all rows of the wave. Leaves the numbers of a row in shared memory if all fit.
  __device__ __forceinline__ void find_maxima() {
    const int row = own_row(), within = thread() % kThreadsPerRow;
    const bool is_present = has_row() && (present_rows() >> row & 1) != 0;
    RowMax row_max = {kMasked, false};
#pragma unroll 1
    for (int group = 0; group < num_groups(); ++group) {
      const int first = group * kBlocksAtOnce, count = min(plan_.num_blocks - first, kBlocksAtOnce);
      load_stats_of_row(is_present, first, count);
      for (int block = within; block < count && is_present; block += kThreadsPerRow) {
        row_max.max = fmaxf(row_max.max, of_rows_.stats[row][block].max);
        row_max.non_finite |= of_rows_.stats[row][block].sum != of_rows_.stats[row][block].sum;
      }
      if (num_groups() > 1) __syncthreads();
    }
    int non_finite = row_max.non_finite;
#pragma unroll
    for (int distance = kThreadsPerRow / 2; distance >= 1; distance /= 2) {
      row_max.max = fmaxf(row_max.max, __shfl_xor_sync(kAllLanes, row_max.max, distance));
      non_finite |= __shfl_xor_sync(kAllLanes, non_finite, distance);
    }
    row_max.non_finite = non_finite != 0;
    if (has_row() && within == 0) s_.row_max[row] = row_max;
    __syncthreads();
  }

  /// The laws that were left behind when the residual was queued.
  __device__ __forceinline__ void take_laws_of_residual() {
    if (thread() == 0) {
      s_.laws[0] = load_law(plan_.laws + 2 * request_.index);
      s_.laws[kLargestWave] = load_law(plan_.laws + 2 * request_.index + 1);
      s_.row_max[0] = {s_.laws[0].reference, false};
    }
    __syncthreads();
  }

  /// The laws of all rows of the wave where they are needed.
  __device__ __forceinline__ void make_laws() {
    const int row = own_row(), within = thread() % kThreadsPerRow;
    const bool is_present = has_row() && (present_rows() >> row & 1) != 0;
    const RowMax row_max = s_.row_max[row];
    double* block_weights = of_rows_.weights[row];
    if (needs_law(params_, request_)) {
      const float scale = scale_of(row);
      double total = 0.0;
#pragma unroll 1
      for (int group = 0; group < num_groups(); ++group) {
        const int first = group * kBlocksAtOnce, count = min(plan_.num_blocks - first, kBlocksAtOnce);
        if (num_groups() > 1) load_stats_of_row(is_present, first, count);
#pragma unroll 1
        for (int block = within; block < count && is_present; block += kThreadsPerRow) {
          const BlockStats stats = of_rows_.stats[row][block];
          const double distance = (static_cast<double>(stats.max) - static_cast<double>(row_max.max)) *
                                  static_cast<double>(scale);
          block_weights[block] = stats.sum > 0.0f ? exp2_out_of_line(distance) : 0.0;
        }
        __syncwarp();
        // A block that does not count has the weight 0, and adding 0 changes nothing. Where a sum is NaN, so
        // is the total, which such a row does not need.
        constexpr int kInStep = 8;
        for (int block = 0; block < count && is_present; block += kInStep) {
          double sums[kInStep], weights[kInStep];
#pragma unroll
          for (int j = 0; j < kInStep; ++j) {
            const bool inside = block + j < count;
            sums[j] = inside ? static_cast<double>(of_rows_.stats[row][block + j].sum) : 0.0;
            weights[j] = inside ? block_weights[block + j] : 0.0;
          }
#pragma unroll
          for (int j = 0; j < kInStep; ++j) total = fma64(sums[j], weights[j], total);
        }
        if (num_groups() > 1) __syncthreads();
      }
      if (is_present && within == 0) {
        RowLaw law = row_law_from_total(scale, row_max, total);
        if (row >= kLargestWave) law = row_law_from_logsumexp(scale, law.logsumexp);
        s_.laws[row] = law;
      }
    }
    if (params_.draft_logsumexp && thread() < kLargestWave &&
        begin_ + thread() < min(int64_t{end_}, request_.num_drafts)) {
      s_.laws[kLargestWave + thread()] =
          row_law_from_logsumexp(request_.draft_scale, draft_logsumexp(begin_ + thread()));
    }
    __syncthreads();
  }

  __device__ __forceinline__ Status row_status(int i) const {
    if (s_.row_max[i].non_finite) return Status::kNonFiniteTarget;
    return s_.row_max[i].max > kMasked ? Status::kOk : Status::kMaskedTarget;
  }

  // ---- The quick way ----
  //
  // What is decided is a comparison of numbers that float32 and the special function unit find to five digits
  // in a fraction of the time. Where those digits settle every comparison the result is the definition's.
  // Where one is too near to call, which is seldom, nothing has been given away: the definition is followed
  // step by step.

  /// Relative distance within which two probabilities, the smaller of them given, are too near to call.
  __device__ __forceinline__ static float quick_margin(float p) {
    const int halvings = 127 - static_cast<int>(__float_as_uint(p) >> 23);
    return 2e-5f + 4e-7f * static_cast<float>(halvings);
  }
  static constexpr float kSmallestQuick = 0x1p-100f;
  /// How far masses of blocks from quick sums, added up, can be off, relative to the row's; and twice a
  /// rounding of the weights of a chunk.
  static constexpr double kQuickSumMargin = 6e-6, kSumMargin = 1e-12, kScaledIdMargin = 1e-6;

  __device__ __forceinline__ bool may_be_quick() const {
    return !kLooksAhead && !kHasOtherRules && !kIsLossy && plan_.may_be_quick && !request_.greedy;
  }

  __device__ __forceinline__ float quick_prob(const QuickLaw& law, float scale, float x) const {
    return __fdividef(quick_exp2((x - law.max) * scale), law.total);
  }

  /// q of an id of slot begin_ + i with this entry in the draft row; NaN where it takes care.
  __device__ __forceinline__ float quick_draft_prob(int i, float entry) const {
    if (!(entry < -kMasked)) return __builtin_nanf("");
    if (!params_.draft_logsumexp)
      return quick_prob(s_.quick_laws[kLargestWave + i], request_.draft_scale, entry);
    const double logsumexp = draft_logsumexp(begin_ + i);
    if (!(logsumexp > -0x1p25 && logsumexp < 0x1p25)) return __builtin_nanf("");
    return quick_exp2(static_cast<float>(fma64(entry, request_.draft_scale, -logsumexp * kLog2E)));
  }

  static constexpr int kIsDone = -1, kAllAccepted = -2;

  /// The slot, from begin_ on, where a comparison is too near to call, those before it being accepted; or one
  /// of the constants above.
  __device__ __forceinline__ int run_quickly(const Draft& draft) {
    const int row = own_row(), within = thread() % kThreadsPerRow;
    const bool is_present = has_row() && (present_rows() >> row & 1) != 0;
    const RowMax row_max = s_.row_max[row];
    float total = 0.0f;
    for (int block = within; block < plan_.num_blocks && is_present; block += kThreadsPerRow) {
      const BlockStats stats = of_rows_.stats[row][block];
      if (stats.sum > 0.0f) total += stats.sum * quick_exp2((stats.max - row_max.max) * scale_of(row));
    }
#pragma unroll
    for (int distance = kThreadsPerRow / 2; distance >= 1; distance /= 2) {
      total += __shfl_xor_sync(kAllLanes, total, distance);
    }
    if (has_row() && within == 0) s_.quick_laws[row] = {row_max.max, total};
    const bool is_plain = !row_max.non_finite && fabsf(row_max.max * scale_of(row)) < 0x1p25f;
    if (__syncthreads_or(is_present && !is_plain)) return 0;

    const int count = end_ - begin_;
    if (has_slot()) s_.verdicts[own_slot()] = quick_verdict_of(draft);
    __syncthreads();
    int last = 0;
    while (last < count && s_.verdicts[last].outcome == Outcome::kAccepted) ++last;
    if (thread() < last) emit(begin_ + thread(), s_.verdicts[thread()].token);
    if (last == count) return kAllAccepted;
    draw_is_unsure_ = false;
    const Verdict verdict = s_.verdicts[last];
    if (verdict.outcome == Outcome::kUnsure) return last;
    const int64_t token = draw_quickly(last, verdict);
    draw_is_unsure_ = token < 0 && !thinned_;
    if (token < 0) return last;
    if (thread() == 0) emit(begin_ + last, token);
    finish(begin_ + last, verdict.status);
    return kIsDone;
  }

  __device__ __forceinline__ Verdict quick_verdict_of(const Draft& draft) const {
    const int i = own_slot();
    Verdict verdict = {Outcome::kDraws, Final::kTarget, Status::kOk, 0.0f, draft.x, draft.x};
    if (draft.is_draft && draft.x != -1 && !draft.valid) verdict.status = Status::kInvalidDraftId;
    if (!draft.valid) return verdict;
    if (draft.wins) {
      verdict.outcome = Outcome::kAccepted;
      return verdict;
    }
    const float p = quick_prob(s_.quick_laws[i], request_.scale, draft.target);
    const float coin = static_cast<float>(draft.coin);
    const bool may_accept = params_.rule == Rule::kTokenLevel;
    const bool is_masked = draft.target == kMasked;
    if (!is_masked && p < kSmallestQuick) {
      verdict.outcome = Outcome::kUnsure;
      return verdict;
    }
    if (may_accept && !is_masked && fabsf(coin - p) <= quick_margin(p) * p) {
      verdict.outcome = Outcome::kUnsure;
      return verdict;
    }
    if (may_accept && coin < p) {
      verdict.outcome = Outcome::kAccepted;
      return verdict;
    }
    verdict.final = Final::kTargetWithoutDraft;
    if (!request_.has_law) return verdict;
    const float q = quick_draft_prob(i, draft.draft);
    if (!(q > kSmallestQuick && q < 2.0f) ||
        (may_accept && !is_masked && fabsf(coin * q - p) <= quick_margin(fminf(p, q)) * p)) {
      verdict.outcome = Outcome::kUnsure;
      return verdict;
    }
    verdict.final = Final::kDenseResidual;
    if (may_accept && coin * q < p) verdict.outcome = Outcome::kAccepted;
    return verdict;
  }

  /// Replaces the quick sums of a row.
  __device__ __forceinline__ void find_defined_stats(const RowRef& row, float scale, BlockStats* stats) {
    __syncthreads();  // the blocks' numbers lay where blocks are fetched
#pragma unroll 1
    for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
      const BlockRef ref = block_of(params_, row, block);
      fetch_block(ref, stage_);
      const BlockStats defined = defined_block_stats(ref, scale, stage_);
      if (lane_index() == 0) stats[block] = defined;
    }
    __syncthreads();
  }
  __device__ __forceinline__ void find_defined_target_stats() {
    if (has_defined_target_) return;
    find_defined_stats(target_row(begin_), request_.scale,
                       plan_.target_stats + (request_.first_row + begin_) * plan_.num_blocks);
    has_defined_target_ = true;
  }
  __device__ __forceinline__ void find_defined_draft_stats() {
    if (!plan_.reads_draft_rows || !request_.has_law || begin_ >= request_.num_drafts) return;
    find_defined_stats(draft_row(begin_), request_.draft_scale,
                       plan_.draft_stats + (request_.first_draft + begin_) * plan_.num_blocks);
  }

  /// Like draw; -1 where it takes care, or a residual.
  __device__ __forceinline__ int64_t draw_quickly(int i, const Verdict& verdict) {
    const int64_t slot = begin_ + i;
    const bool thins = verdict.final == Final::kDenseResidual;
    const bool without_draft = verdict.final == Final::kTargetWithoutDraft;
    const QuickLaw law = s_.quick_laws[i];
    // Two neighbouring blocks a lane. In float64: a rounding of the row's mass would be many ids of a small
    // block.
    double mass[2];
    float block_max[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int block = 2 * lane_index() + j;
      const BlockStats stats =
          block < plan_.num_blocks ? of_rows_.stats[i][block] : BlockStats{kMasked, 0.0f};
      block_max[j] = stats.max;
      const double weight = exp2_out_of_line((static_cast<double>(stats.max) - law.max) * request_.scale);
      mass[j] = stats.sum > 0.0f ? static_cast<double>(stats.sum) * weight : 0.0;
      if (without_draft && verdict.x / kBlockSize == block) {
        const double x = element(target_row(slot), verdict.x);
        mass[j] = mass[j] - exp2_out_of_line((x - law.max) * request_.scale);
      }
    }
    double prefix = mass[0] + mass[1];
#pragma unroll
    for (int distance = 1; distance < kWarpSize; distance *= 2) {
      const double before = __shfl_up_sync(kAllLanes, prefix, distance);
      if (lane_index() >= distance) prefix += before;
    }
    const double total = __shfl_sync(kAllLanes, prefix, kWarpSize - 1);
    double before = __shfl_up_sync(kAllLanes, prefix, 1);
    if (lane_index() == 0) before = 0.0;
    // The sum of the block that loses the draft was rounded when the draft was in it.
    const bool has_sharp_sums = has_defined_target_ && !without_draft;
    const double margin = (has_sharp_sums ? kSumMargin : kQuickSumMargin) * static_cast<double>(law.total);
    // The numbers of all attempts of the warp: of an attempt's token, and of whether it is kept.
    const int own_attempt = lane_index() / 2 * num_warps() + warp_index();
    const TokenDraw numbers =
        TokenDraw::from(final_words(slot, thins ? 2 * own_attempt + lane_index() % 2 : 0));
    static_assert(2 * kThinningAttempts / kFewestJudgingWarps <= kWarpSize, "a lane holds each");
    __syncthreads();  // what picks write lies where the blocks' numbers were

    const int num_attempts = thins ? kThinningAttempts : num_warps();
#pragma unroll 1
    for (int first = 0; first < num_attempts; first += num_warps()) {
      const int attempt = first + warp_index();
      Attempt result = {-1, false, false};
      if (thins || attempt == 0) {
        const int holder = 2 * first / num_warps();
        const double threshold = __shfl_sync(kAllLanes, numbers.block, holder) * total;
        const int hit = first_lane(prefix > threshold);
        const bool is_second = before + mass[0] <= threshold;
        const double own_before = is_second ? before + mass[0] : before,
                     own_mass = is_second ? mass[1] : mass[0];
        const bool clear = own_before + own_mass > threshold + margin && own_before < threshold - margin;
        result.unusable = hit < 0 || !__shfl_sync(kAllLanes, clear, max(hit, 0));
        if (!result.unusable) {
          const int chosen = 2 * hit + __shfl_sync(kAllLanes, static_cast<int>(is_second), hit);
          const TokenDraw token = {0.0, __shfl_sync(kAllLanes, numbers.chunk, holder),
                                   __shfl_sync(kAllLanes, numbers.id, holder)};
          const float max = __shfl_sync(kAllLanes, is_second ? block_max[1] : block_max[0], hit);
          const BlockRef block = block_of(params_, target_row(slot), chosen);
          fetch_block(block, stage_);
          // The definition scales the weights of the block that loses the draft, which rounds them.
          const bool is_touched = without_draft && verdict.x / kBlockSize == chosen;
          if (is_touched) mask_staged(block, verdict.x - block.begin);
          const WeightsOfLogits weights(block, stage_, max, request_.scale, 1.0f);
          int found = quick_pick(weights, token, is_touched ? kScaledIdMargin : kIdMargin);
          if (found < 0 && !is_touched) {
            found = pick_step_by_step(weights, token.chunk, token.id, s_.pick + warp_index());
          }
          result.unusable = found < 0;
          result.token = block.begin + found;
          result.kept = true;
        }
        if (thins && !result.unusable) {
          const float entry = element(draft_row(slot), result.token);
          const double u = __shfl_sync(kAllLanes, numbers.id, 2 * first / num_warps() + 1);
          const float rest_of_u = 1.0f - static_cast<float>(u);
          const float p = quick_prob(law, request_.scale, element(target_row(slot), result.token));
          const float q = entry == kMasked ? 0.0f : quick_draft_prob(i, entry);
          const float difference = rest_of_u * p - q;
          result.kept = difference > 0.0f;
          result.unusable = p < kSmallestQuick || !(fabsf(difference) > quick_margin(fminf(p, q)) * (p + q));
        }
      }
      if (lane_index() == 0) s_.attempts[attempt] = result;
      __syncthreads();
#pragma unroll 1
      for (int a = first; a < first + num_warps(); ++a) {
        if (s_.attempts[a].unusable) return -1;
        if (s_.attempts[a].kept) return s_.attempts[a].token;
      }
    }
    thinned_ = thins;
    return -1;
  }

  /// Masks one id of a block that the warp has fetched.
  __device__ __forceinline__ void mask_staged(const BlockRef& block, int64_t id) const {
    const int i = static_cast<int>(id);
    if (lane_index() == 0) {
      if (block.row.dtype == DType::kFloat32) {
        const int octet = i / kOctet,
                  word = octet / kWarpSize * 2 * kWarpSize + i % kOctet / 4 * kWarpSize + octet % kWarpSize;
        reinterpret_cast<float*>(stage_ + word)[i % 4] = kMasked;
      } else {
        reinterpret_cast<uint16_t*>(stage_)[i] = block.row.dtype == DType::kBFloat16 ? 0xFF80 : 0xFC00;
      }
    }
    __syncwarp();
  }

  /// The lowest ids with the largest logit that is not NaN, a warp to a slot, where they are emitted.
  __device__ __forceinline__ void find_argmaxes() {
    bool any = request_.greedy, any_non_finite = false;
    for (int i = 0; i < end_ - begin_; ++i) {
      any |= row_status(i) != Status::kOk;
      any_non_finite |= s_.row_max[i].non_finite;
    }
    if (!any) return;
    // Where blocks have their indices in place of sums, nobody fetches a block to where their numbers are.
    const bool stats_stay = num_groups() == 1 && !any_non_finite && !needs_law(params_, request_);
#pragma unroll 1
    for (int i = warp_index(); i < end_ - begin_; i += num_warps()) {
      const int64_t id = argmax_of(i, stats_stay);
      if (lane_index() == 0) s_.argmax[i] = id;
    }
    __syncthreads();
  }

  __device__ __forceinline__ int64_t argmax_of(int i, bool stats_stay) const {
    const int64_t slot = begin_ + i;
    const BlockStats* stats = target_stats(slot);
    const float max = s_.row_max[i].max;
    const bool has_index = !needs_law(params_, request_) && !s_.row_max[i].non_finite;
#pragma unroll 1
    for (int first = 0; first < plan_.num_blocks; first += kWarpSize) {
      const int block = first + lane_index();
      BlockStats of_block = {max, 0.0f};
      if (block < plan_.num_blocks) {
        of_block = stats_stay ? of_rows_.stats[i][block] : load_stats(stats + block);
      }
      const bool holds = block < plan_.num_blocks && of_block.max == max;
      if (const int holder = first_lane(holds); has_index && holder >= 0) {
        const auto index = static_cast<int64_t>(__shfl_sync(kAllLanes, of_block.sum, holder));
        return (first + holder) * int64_t{kBlockSize} + index;
      }
#pragma unroll 1
      for (unsigned rest = __ballot_sync(kAllLanes, holds); rest != 0; rest &= rest - 1) {
        const int candidate = first + __ffs(static_cast<int>(rest)) - 1;
        const BlockRef ref = block_of(params_, target_row(slot), candidate);
        const int found = find_equal(ref, stage_, max);
        if (found >= 0) return ref.begin + found;
      }
    }
    return 0;
  }

  // ---- Verdicts ----

  /// What a thread makes of its slot.
  __device__ __forceinline__ Verdict verdict_of(const Draft& draft) const {
    const int i = own_slot();
    Verdict verdict = {Outcome::kEnds, Final::kTarget, row_status(i), __builtin_nanf(""), -1, -1};
    if (verdict.status != Status::kOk) {
      verdict.token = s_.argmax[i];
      return verdict;
    }
    verdict.x = verdict.token = draft.x;
    if (draft.is_draft && draft.x != -1 && !draft.valid) verdict.status = Status::kInvalidDraftId;
    if (request_.greedy) {
      const bool equal = s_.argmax[i] == draft.x;
      if (draft.valid) verdict.accept_prob = equal ? 1.0f : 0.0f;
      if (draft.valid && accepts(draft, equal)) {
        verdict.outcome = Outcome::kAccepted;
      } else {
        verdict.token = s_.argmax[i];
      }
      if (kIsLossy && draft.valid && has_lossy_rule(i)) bend_verdict(draft, &verdict);
      return verdict;
    }
    verdict.outcome = Outcome::kDraws;
    if (kHasOtherRules) {
      // Exact match: what is drawn decides.
      if (draft.valid) {
        verdict.accept_prob = static_cast<float>(exp2_out_of_line(s_.laws[i].log2_prob(draft.target)));
      }
      return verdict;
    }
    if (draft.valid) judge_draft(draft, &verdict);
    if (kIsLossy && draft.valid && has_lossy_rule(i)) bend_verdict(draft, &verdict);
    return verdict;
  }

  /// Whether a valid draft is accepted, which `by_law` says where the target's law decides.
  __device__ __forceinline__ bool accepts(const Draft& draft, bool by_law) const {
    if (kHasOtherRules || kIsLossy) return by_law;
    return draft.wins || (params_.rule == Rule::kTokenLevel && by_law);
  }

  /// Whether the valid draft of a sampled request is accepted; otherwise what to draw from.
  __device__ __forceinline__ void judge_draft(const Draft& draft, Verdict* verdict) const {
    const int i = own_slot();
    const double p = exp2_out_of_line(s_.laws[i].log2_prob(draft.target));
    double weighted = p;
    if constexpr (kIsLossy) weighted = p * weight_of_target(i);
    // No q is above 1: a coin below p accepts whatever q is.
    const bool accepted = accepts(draft, draft.coin < weighted);
    if (accepted) verdict->outcome = Outcome::kAccepted;
    if (!request_.has_law) {
      verdict->final = Final::kTargetWithoutDraft;
      verdict->accept_prob = static_cast<float>(p);
      return;
    }
    if (accepted && params_.accept_probs == nullptr) return;
    const double q = draft_prob(draft);
    if (q != q) {
      // The one-hot law is exact for every drafter.
      verdict->final = Final::kTargetWithoutDraft;
      if (!accepted) verdict->status = Status::kUnusableDraftLaw;
      return;
    }
    verdict->final =
        params_.draft_law == DraftLawKind::kSupport ? Final::kSupportResidual : Final::kDenseResidual;
    verdict->accept_prob = static_cast<float>(p < q ? p / q : 1.0);
    if ((kIsLossy || params_.rule == Rule::kTokenLevel) && draft.coin * q < weighted) {
      verdict->outcome = Outcome::kAccepted;
    }
  }

  /// q(x) of a draft that has a law; NaN where that law is not usable or cannot have produced x.
  __device__ __forceinline__ double draft_prob(const Draft& draft) const {
    double q = 0.0;
    if (params_.draft_law == DraftLawKind::kSupport) {
      const IntView ids = request_.of_drafts(params_.draft_support_ids);
      const RealView logprobs = request_.of_drafts(params_.draft_support_logprobs);
      const int64_t slot = begin_ + own_slot();
#pragma unroll 1
      for (int64_t j = 0; j < params_.draft_support_size; ++j) {
        const int64_t id = at(ids, slot, j);
        if (id < 0 || id >= params_.vocab_size) continue;
        const double prob = exp2_out_of_line(at(logprobs, slot, j) * kLog2E);
        if (!is_finite(prob)) return __builtin_nan("");
        if (id == draft.x) q = q + prob;
      }
    } else {
      if (params_.draft_law == DraftLawKind::kLogits && !s_.laws[kLargestWave + own_slot()].usable())
        return __builtin_nan("");
      q = dense_prob(own_slot(), draft.draft);
    }
    return q > 0.0 && is_finite(q) ? q : __builtin_nan("");
  }

  /// The probability of an id with this entry in the draft row, not finite where the row is not usable.
  __device__ __forceinline__ double dense_prob(int i, float entry) const {
    if (params_.draft_law == DraftLawKind::kLogits) {
      return exp2_out_of_line(s_.laws[kLargestWave + i].log2_prob(entry));
    }
    return is_finite(static_cast<double>(entry)) && entry < 0.0f ? 0.0 : static_cast<double>(entry);
  }

  // ---- The slots in order ----

  /// Judges the slots that are read. Returns the index, in this wave, of the one where the request ends; -1
  /// where there is nothing left to do, or other rows are waited for.
  __device__ __forceinline__ int judge() {
    const int64_t window = kLooksAhead ? params_.fly_window_size : 0;
    bool is_quick = may_be_quick();
    // FLy: the rejected draft whose window is being looked at, or -1.
    int deferred = -1;
    bool may_defer = kLooksAhead;
    // While rows are still read.
    Draft draft = load_draft();
    wait_for_previous_launch();
#pragma unroll 1
    for (;;) {
      if constexpr (kFilters) mask_draft(&draft);
      find_maxima();
      if (is_quick) {
        const int unsure = run_quickly(draft);
        if (unsure == kIsDone) return -1;
        if (unsure == kAllAccepted) {
          if (!next_slots()) return -1;
        } else {
          begin_ += unsure;
          end_ = begin_ + 1;
          // A draw is tried once more, with the definition's sums of the target's row. Where that is no
          // better, and where a verdict is in doubt, the definition decides this slot.
          is_quick = draw_is_unsure_ && !has_defined_target_;
          find_defined_target_stats();
          if (!is_quick) find_defined_draft_stats();
        }
        draft = load_draft();
        continue;
      }
      make_laws();
      if (thinned_) {
        queue_residual(0);
        return -1;
      }
      find_argmaxes();
      const int count = end_ - begin_;
      if (has_slot()) s_.verdicts[own_slot()] = verdict_of(draft);
      __syncthreads();
      if constexpr (kHasOtherRules) match_slots(count);
      if constexpr (kIsLossy) ask_rows(count);

      int last = 0;
#pragma unroll 1
      for (; last < count; ++last) {
        const bool accepted = s_.verdicts[last].outcome == Outcome::kAccepted;
        if (accepted && deferred >= 0 && begin_ + last == deferred + window) deferred = -1;
        if (accepted) continue;
        if (deferred >= 0 || !may_defer || !is_deferrable(last)) break;
        deferred = begin_ + last;
        if (thread() == 0) accept_deferred(&s_.verdicts[last]);
        __syncthreads();
      }
      if (thread() < count) write_slot(thread(), last);
      if (last < count && deferred >= 0) {
        // Rejected in the window: the request ends at the deferred draft. What was written for it and for
        // later slots is written again.
        begin_ = deferred;
        end_ = begin_ + 1;
        deferred = -1;
        may_defer = false;
        draft = load_draft();
        continue;
      }
      if (last < count) return last;
      if (!next_slots()) return -1;
      is_quick = may_be_quick();
      draft = load_draft();
    }
  }

  /// Goes on behind the slots that were judged, all of them accepted; false where there are none.
  __device__ __forceinline__ bool next_slots() {
    if (end_ == num_slots()) {
      end_with_given_bonus();
      return false;
    }
    __syncthreads();  // everybody has read the verdicts
    begin_ = end_;
    end_ = min(num_slots(), begin_ + kLargestWave);
    has_defined_target_ = false;
    return true;
  }

  /// FLy: whether the rejected draft of a slot is accepted if the drafts of the window after it are.
  __device__ __forceinline__ bool is_deferrable(int i) {
    const int64_t x = s_.verdicts[i].x;
    if (x < 0 || x >= params_.vocab_size) return false;
    if (params_.fly_window_size >= request_.num_drafts - (begin_ + i)) return false;
    if (!(element(target_row(begin_ + i), x) > kMasked)) return false;
    find_entropy(plan_, target_row(begin_ + i), target_stats(begin_ + i), s_.laws[i], stage_, s_);
    return s_.entropy >= params_.fly_entropy_threshold;
  }

  __device__ __forceinline__ static void accept_deferred(Verdict* verdict) {
    verdict->outcome = Outcome::kAccepted;
    verdict->token = verdict->x;
  }

  /// Exact match: a token of p is drawn in each slot up to the first that it ends in.
  __device__ __forceinline__ void match_slots(int count) {
    if (params_.rule != Rule::kExactMatch) return;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const Verdict verdict = s_.verdicts[i];
      if (verdict.outcome == Outcome::kEnds) return;
      if (verdict.outcome == Outcome::kAccepted) continue;  // of a greedy request
      Status status = verdict.status;
      const int64_t token = draw(i, verdict, /*has_residual=*/false, &status);
      const bool accepted = token == verdict.x && token >= 0;
      if (thread() == 0) {
        s_.verdicts[i].outcome = accepted ? Outcome::kAccepted : Outcome::kEnds;
        s_.verdicts[i].token = token;
      }
      __syncthreads();
      if (!accepted) return;
    }
  }

  // ---- Block verification, in block_rule.cuh ----

  __device__ void run_block_rule();
  __device__ void select(int slot);
  __device__ int read_chain();
  __device__ void fill_block_slot(const Draft& draft);
  __device__ bool wins(int s, int end, FoundToken* found);
  __device__ double block_number(int s, int number) const;
  __device__ bool thins_in_chain(int s, const BlockSlot& slot, FoundToken* found);
  __device__ bool passes(const BlockSlot& slot, double coin, const TokenDraw& token, FoundToken* found);
  __device__ RowLaw scale_law(double factor, int i = 0);
  __device__ void restore_law(const RowLaw& law, int i = 0);
  __device__ double mass_beyond_support(double chance);
  __device__ bool recover_in_chain(int accepted, FoundToken* found);
  __device__ void end_chain(int end);
  __device__ __forceinline__ BlockSlot* block_slot(int64_t slot) const {
    return plan_.block_slots + request_.first_draft + slot;
  }

  // ---- Lossy rules, in lossy_rules.cuh ----

  __device__ bool has_lossy_rule(int i) const;
  __device__ double weight_of_target(int i) const;
  __device__ void bend_verdict(const Draft& draft, Verdict* verdict) const;
  __device__ bool is_within(float logit, float largest, double part) const;
  __device__ void ask_rows(int count);
  __device__ bool row_accepts(int i, int64_t x);
  __device__ int64_t argmax_by_first_warp(int i);
  __device__ int64_t draw_weighted(int i, const Verdict& verdict, bool has_residual, Status* status);

  // ---- Drawing ----

  /// Number `draw` of those at the position of the slot.
  __device__ __forceinline__ PhiloxBlock final_words(int64_t slot, int64_t draw) const {
    const bool is_draft = params_.final_stream == Stream::kDraft;
    return words_out_of_line(request_.seed, is_draft ? Stream::kDraft : Stream::kTarget,
                             is_draft ? request_.final_slot : draw,
                             is_draft ? request_.position : request_.position + slot);
  }
  /// The same, or the given uniform.
  __device__ __forceinline__ TokenDraw final_draw(int64_t slot, int64_t draw) const {
    if (kHasOtherRules && params_.rule == Rule::kExactMatch && params_.accept_uniforms &&
        slot < request_.num_drafts) {
      return TokenDraw::from(at(params_.accept_uniforms, request_.first_draft + slot));
    }
    return params_.final_uniforms ? TokenDraw::from(at(params_.final_uniforms, request_.index))
                                  : TokenDraw::from(final_words(slot, draw));
  }

  /// The recovered, bonus or sampled token; -1 where the residual must be made first.
  ///
  /// With a dense draft law and seeds a token of p is kept with probability max(p - q, 0) / p, which gives
  /// the law of the residual without a pass over the rows. The attempts are independent: each warp makes one.
  __device__ __forceinline__ int64_t draw(int i, const Verdict& verdict, bool has_residual, Status* status) {
    if constexpr (kHasOtherRules) {
      if (params_.sampler == Sampler::kGumbel) return draw_by_noise(i);
    }
    const int64_t slot = begin_ + i;
    Final final = verdict.final;
    const bool thins = final == Final::kDenseResidual && !has_residual;
    if (thins && params_.final_uniforms) return -1;
    if (thins) final = Final::kTarget;
#pragma unroll 1
    for (;;) {
      find_masses(i, final, verdict.x);
      if (thins || s_.total > 0.0) break;
      // NaN: the draft row is not usable. Otherwise p and q agree but for rounding. Either way: p.
      if (s_.total != s_.total) *status = Status::kUnusableDraftLaw;
      final = Final::kTarget;
      __syncthreads();
    }
    const int64_t draw_number = has_residual && !params_.final_uniforms ? 2 * kThinningAttempts : 0;
    const int num_attempts = thins ? kThinningAttempts : num_warps();
#pragma unroll 1
    for (int first = 0; first < num_attempts; first += num_warps()) {
      const int attempt = first + warp_index();
      int64_t y = -1;
      bool kept = false, unusable = false;
      if (thins || attempt == 0) {
        y = pick(i, final, verdict.x, final_draw(slot, thins ? 2 * attempt : draw_number));
        kept = true;
      }
      if (thins) {
        const double u = uniform_of(final_words(slot, 2 * attempt + 1));
        const double p = exp2_out_of_line(s_.laws[i].log2_prob(element(target_row(slot), y)));
        const double q = dense_prob(i, element(draft_row(slot), y));
        unusable = !is_finite(q);
        kept = unusable || u * p < p - q;
      }
      if (lane_index() == 0) s_.attempts[attempt] = {y, kept, unusable};
      __syncthreads();
#pragma unroll 1
      for (int a = first; a < first + num_warps(); ++a) {
        if (!s_.attempts[a].kept) continue;
        if (s_.attempts[a].unusable) *status = Status::kUnusableDraftLaw;
        return s_.attempts[a].token;
      }
    }
    return -1;
  }

  /// A token of p by Gumbel noise, that of its position: what a draft in the same place met.
  __device__ __forceinline__ int64_t draw_by_noise(int i) {
    const int64_t slot = begin_ + i;
    const int64_t place = params_.final_stream == Stream::kDraft ? request_.final_slot : slot;
    const NoiseKey noise = noise_key(request_.seed, request_.position + place);
    const ScoredId best = best_score(target_row(slot), params_.vocab_size, s_.row_max[i].max, request_.scale,
                                     noise, warp_index(), num_warps());
    __syncthreads();
    if (lane_index() == 0) s_.scored[warp_index()] = best;
    __syncthreads();
    ScoredId result = s_.scored[0];
    for (int warp = 1; warp < num_warps(); ++warp) result = ScoredId::better(result, s_.scored[warp]);
    return result.id;
  }

  /// Masses by block, and their sums in the order of the blocks: before each block, and of all.
  __device__ __forceinline__ void find_masses(int i, Final final, int64_t x) {
    const int64_t slot = begin_ + i;
    const BlockStats* stats = target_stats(slot);
    const float* residual = plan_.masses + request_.index * plan_.num_blocks;
#pragma unroll 1
    for (int block = thread(); block < plan_.num_blocks; block += num_threads()) {
      double mass = 0.0;
      if (final == Final::kDenseResidual) {
        mass = static_cast<double>(__ldcg(residual + block));
      } else if (const BlockStats of_block = load_stats(stats + block); of_block.sum > 0.0f) {
        mass = static_cast<double>(of_block.sum) * exp2_out_of_line(s_.laws[i].log2_prob(of_block.max));
      }
      masses_[block] = mass;
    }
    __syncthreads();
    if (final == Final::kTargetWithoutDraft || final == Final::kSupportResidual) {
#pragma unroll 1
      for (int block = warp_index(); block < plan_.num_blocks; block += num_warps()) {
        if (!touches(final, slot, x, block)) continue;
        const double mass = chunk_sums(sparse_residual(i, final, x, block), s_.pick + warp_index());
        if (lane_index() == 0) masses_[block] = mass;
      }
      __syncthreads();
    }
    if (thread() == 0) {
      double total = 0.0;
      constexpr int kInStep = 8;
#pragma unroll 1
      for (int first = 0; first < plan_.num_blocks; first += kInStep) {
        double masses[kInStep];
#pragma unroll
        for (int j = 0; j < kInStep; ++j) masses[j] = first + j < plan_.num_blocks ? masses_[first + j] : 0.0;
#pragma unroll
        for (int j = 0; j < kInStep; ++j) {
          if (first + j < plan_.num_blocks) prefixes_[first + j] = total;
          total = total + masses[j];
        }
      }
      s_.total = total;
    }
    __syncthreads();
  }

  /// The token that a draw chooses from the masses by block, found by one warp.
  __device__ __forceinline__ int64_t pick(int i, Final final, int64_t x, const TokenDraw& token) {
    const double threshold = token.block * s_.total;
    int chosen = -1, last = 0;
#pragma unroll 1
    for (int first = 0; first < plan_.num_blocks && chosen < 0; first += kWarpSize) {
      const int block = first + lane_index();
      const double mass = block < plan_.num_blocks ? masses_[block] : 0.0;
      const int hit = first_lane(mass > 0.0 && prefixes_[block] + mass > threshold);
      if (hit >= 0) chosen = first + hit;
      const int weighty = last_lane(mass > 0.0);
      if (weighty >= 0) last = first + weighty;
    }
    // If rounding leaves no block, the last one with mass is chosen.
    const double remainder = chosen >= 0 ? (threshold - prefixes_[chosen]) / masses_[chosen] : 1.0;
    if (chosen < 0) chosen = last;
    const double chunk_number = number_or_remainder(token.chunk, remainder);

    const int64_t slot = begin_ + i;
    const BlockRef block = block_of(params_, target_row(slot), chosen);
    const float max = load_stats(target_stats(slot) + chosen).max;
    PickScratch* scratch = s_.pick + warp_index();
    int found;
    if (final == Final::kDenseResidual) {
      fetch_block(block, stage_);
      const WeightsOfLogits target = probs_of_block(block, stage_, s_.laws[i], max);
      const BlockRef draft_block = block_of(params_, draft_row(slot), chosen);
      // The next warp has nothing to do: only thinning takes several.
      uint4* draft_stage = stage_ + plan_.stage_words;
      if (params_.draft_law == DraftLawKind::kProbs) {
        found =
            pick_step_by_step(Residual<GivenProbs>{target, {draft_block}}, chunk_number, token.id, scratch);
      } else {
        const float draft_max =
            plan_.reads_draft_rows ? load_stats(draft_stats(slot) + chosen).max : block_max(draft_block);
        fetch_block(draft_block, draft_stage);
        const WeightsOfLogits draft =
            probs_of_block(draft_block, draft_stage, s_.laws[kLargestWave + i], draft_max);
        found = pick_step_by_step(Residual<WeightsOfLogits>{target, draft}, chunk_number, token.id, scratch);
      }
    } else if (touches(final, slot, x, chosen)) {
      found = pick_step_by_step(sparse_residual(i, final, x, chosen), chunk_number, token.id, scratch);
    } else {
      // Unscaled weights: a block far below the row's maximum loses none of them to rounding.
      fetch_block(block, stage_);
      const WeightsOfLogits weights(block, stage_, max, request_.scale, 1.0f);
      found = token.chunk >= 0.0 ? quick_pick_out_of_line(weights, token, kIdMargin) : -1;
      if (found < 0) found = pick_step_by_step(weights, chunk_number, token.id, scratch);
    }
    return block.begin + found;
  }

  __device__ __forceinline__ SparseResidual sparse_residual(int i, Final final, int64_t x, int block) const {
    const int64_t slot = begin_ + i;
    const BlockRef ref = block_of(params_, target_row(slot), block);
    fetch_block(ref, stage_);
    const float max = load_stats(target_stats(slot) + block).max;
    return {probs_of_block(ref, stage_, s_.laws[i], max),
            request_.of_drafts(params_.draft_support_ids),
            request_.of_drafts(params_.draft_support_logprobs),
            params_.draft_support_size,
            params_.vocab_size,
            final == Final::kTargetWithoutDraft,
            slot,
            x};
  }

  /// Whether a block holds an id that a one-hot or sparse draft law takes something away from.
  __device__ __forceinline__ bool touches(Final final, int64_t slot, int64_t x, int block) const {
    if (final == Final::kTargetWithoutDraft) return x / kBlockSize == block;
    if (final != Final::kSupportResidual) return false;
    const IntView ids = request_.of_drafts(params_.draft_support_ids);
    bool touched = false;
    for (int64_t j = lane_index(); j < params_.draft_support_size; j += kWarpSize) {
      const int64_t id = at(ids, slot, j);
      touched |= id >= 0 && id < params_.vocab_size && id / kBlockSize == block;
    }
    return __any_sync(kAllLanes, touched);
  }

  // ---- Results ----

  __device__ __forceinline__ void emit(int64_t slot, int64_t token) const {
    const int64_t i = request_.index * params_.width + slot;
    if (params_.token_ids_are_int64) {
      static_cast<int64_t*>(params_.token_ids)[i] = token;
    } else {
      static_cast<int32_t*>(params_.token_ids)[i] = static_cast<int32_t>(token);
    }
  }

  __device__ __forceinline__ void emit_logprob(int64_t slot, double logprob) const {
    if (params_.logprobs != nullptr) {
      params_.logprobs[request_.index * params_.width + slot] = static_cast<float>(logprob);
    }
  }

  __device__ __forceinline__ void emit_with_logprob(int i, int64_t token) const {
    emit(begin_ + i, token);
    if (params_.logprobs == nullptr) return;
    const bool has_prob = row_status(i) == Status::kOk;
    emit_logprob(begin_ + i, has_prob ? s_.laws[i].log2_prob(element(target_row(begin_ + i), token)) * kLn2
                                      : __builtin_nan(""));
  }

  /// What slot begin_ + i leaves behind, where `last` is the first that was not accepted.
  __device__ __forceinline__ void write_slot(int i, int last) const {
    if (i > last) return;
    const int64_t slot = begin_ + i;
    const Verdict& verdict = s_.verdicts[i];
    if (params_.logsumexp != nullptr) params_.logsumexp[request_.first_row + slot] = s_.laws[i].logsumexp;
    if (params_.thresholds != nullptr) {
      params_.thresholds[request_.first_row + slot] = target_row(slot).threshold;
    }
    if (params_.accept_probs != nullptr && slot < request_.num_drafts) {
      params_.accept_probs[request_.first_draft + slot] = verdict.accept_prob;
    }
    if (verdict.outcome == Outcome::kAccepted || verdict.outcome == Outcome::kEnds) {
      emit_with_logprob(i, verdict.token);
    }
  }

  __device__ __forceinline__ void finish(int64_t num_accepted, Status status) const {
    for (int64_t slot = num_accepted + 1 + thread(); slot < params_.width; slot += num_threads()) {
      emit(slot, -1);
      emit_logprob(slot, __builtin_nan(""));
    }
    const int64_t num_slots = request_.num_slots(params_);
    for (int64_t slot = num_accepted + 1 + thread(); slot < num_slots; slot += num_threads()) {
      if (params_.logsumexp != nullptr) params_.logsumexp[request_.first_row + slot] = __builtin_nan("");
      // Block verification has judged drafts behind the end.
      const bool is_judged = kHasOtherRules && params_.rule == Rule::kBlock && !request_.greedy;
      if (params_.accept_probs != nullptr && slot < request_.num_drafts && !is_judged) {
        params_.accept_probs[request_.first_draft + slot] = __builtin_nanf("");
      }
    }
    if (thread() == 0) {
      if (params_.num_accepted != nullptr) {
        params_.num_accepted[request_.index] = static_cast<int32_t>(num_accepted);
      }
      params_.status[request_.index] = static_cast<int32_t>(status);
      atomicAdd(&plan_.counters->num_finished, 1u);
    }
  }

  /// Where every slot is accepted.
  __device__ __forceinline__ void end_with_given_bonus() const {
    // Without a row of its own the bonus token is a given one.
    const int64_t token = at(params_.bonus_token_ids, request_.index);
    const bool valid = token >= 0 && token < params_.vocab_size;
    if (thread() == 0) {
      emit(end_, valid ? token : -1);
      emit_logprob(end_, __builtin_nan(""));
    }
    finish(end_, valid || token == -1 ? Status::kOk : Status::kInvalidDraftId);
  }

  /// For residual_mass. By one thread.
  __device__ __forceinline__ void leave_laws(int i) const {
    plan_.laws[2 * request_.index] = s_.laws[i];
    plan_.laws[2 * request_.index + 1] = s_.laws[kLargestWave + i];
  }

  /// Every CTA of the device may help to make it.
  __device__ __forceinline__ void queue_residual(int i) {
    needs_residual_ = true;
    if (thread() != 0) return;
    plan_.residuals[request_.index].slot = begin_ + i;
    leave_laws(i);
    const uint32_t place = atomicAdd(&plan_.counters->num_queued, 1u);
    store_release(&plan_.residuals[place].queued, static_cast<uint32_t>(request_.index) + 1);
  }

  const Plan& plan_;
  const ChainParams& params_;
  const Request& request_;
  /// The warp's own.
  uint4* stage_;
  Scratch& s_;
  StatsOfRows& of_rows_;
  double* masses_;
  double* prefixes_;
  /// The slots that are judged.
  int begin_ = 0, end_ = 0;
  /// Every attempt at a recovered token has failed, and none was too near to call.
  bool thinned_ = false;
  bool needs_residual_ = false;
  /// Why run_quickly could not finish: a draw, not a verdict, was too near to call.
  bool draw_is_unsure_ = false;
  /// The sums of the target's row of the slot that is judged are the definition's.
  bool has_defined_target_ = false;
};

}  // namespace specdec_ops::cuda

#include "cuda/block_rule.cuh"
#include "cuda/lossy_rules.cuh"

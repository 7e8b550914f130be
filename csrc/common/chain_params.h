#pragma once

#include <cstdint>

#include "common/filters.h"
#include "common/philox.h"
#include "common/row_law.h"
#include "common/spans.h"
#include "common/views.h"

/// What the chain program is asked to do: verification of draft chains, sampling and recovered tokens.
namespace specdec_ops {

enum class Rule : int32_t {
  /// Accept a draft if u * q < p (Leviathan et al., arXiv 2211.17192).
  kTokenLevel,
  /// Reject every draft: what is left is the draw of a recovered token.
  kRejectAll,
  /// Accept the draft of a slot with the probability given for the slot, whatever p and q are.
  kSynthetic,
  /// Judge a chain as a whole, from its last draft (Sun et al., arXiv 2403.10444).
  kBlock,
  /// Draw a token from p in each slot, and accept a draft that equals it.
  kExactMatch,
  // Lossy rules; their parameters are in ChainParams::rule_parameters.
  /// At token level with p / leniency in the place of p (Leviathan et al., appendix A.5).
  kLenience,
  /// Accept what is above a bar that falls with the entropy of p (Medusa, arXiv 2401.10774): epsilon, delta.
  kTypical,
  /// Accept the most probable ids (relaxed acceptance of TensorRT-LLM): N, delta.
  kTopN,
  /// Without a draft law, with p / acc in the place of p, and everything above a bar (SGLang): single, acc.
  kThresholds,
  /// At token level, and the first two ids where their logits are close (MARS, arXiv 2601.15498): theta.
  kMargin,
};

SPECDEC_HOST_DEVICE bool is_lossy(Rule rule) { return rule >= Rule::kLenience; }

/// How a token is drawn from a row.
enum class Sampler : int32_t { kInverseCdf, kGumbel };

enum class DraftLawKind : int32_t {
  kOneHot,
  kLogits,
  kProbs,
  /// K ids and log-probabilities a draft.
  kSupport,
};

/// What each draft has one of: draft after draft, or slot after slot in the entry of its request.
template <class View>
struct DraftView {
  View view;
  /// In elements; 0 where it lies in entries.
  int64_t draft_stride = 0;
  /// In elements; 0 where it lies by draft.
  int64_t entry_stride = 0;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return view.data != nullptr; }
  /// That of one request, from its slot 0 on.
  SPECDEC_HOST_DEVICE View of(int64_t first_draft, int64_t entry) const {
    return advanced(view, first_draft * draft_stride + entry * entry_stride);
  }
};

/// The arguments of one call. Views may be empty where a comment says so.
struct ChainParams {
  Rule rule = Rule::kTokenLevel;
  int64_t batch = 0;
  int64_t num_drafts = 0;
  int64_t vocab_size = 0;

  /// Request r has the rows cu[r] + r * bonus_rows + i; an empty cu means `drafts_per_request`.
  RowsView target;
  IntView cu_num_draft_tokens;
  int64_t drafts_per_request = 0;
  bool has_bonus_rows = true;
  /// May be empty; where it is not, there are no bonus rows.
  IntView bonus_token_ids;
  /// May be empty where there are no drafts.
  IntView draft_token_ids;

  /// Which entry of what engines keep for each request is that of request r: of has_draft_law, temperature,
  /// draft_temperature, seeds and draft laws that lie in entries. May be empty: entry r.
  IntView request_indices;
  int64_t num_entries = 0;

  DraftLawKind draft_law = DraftLawKind::kOneHot;
  /// Logits or probabilities.
  DraftView<RowsView> draft;
  /// May be empty.
  DraftView<RealView> draft_logsumexp;
  /// draft_support_size of them a draft.
  DraftView<IntView> draft_support_ids;
  DraftView<RealView> draft_support_logprobs;
  int64_t draft_support_size = 0;
  /// May be empty: every request has the law.
  BoolView has_draft_law;

  double rule_parameters[2] = {};
  /// [drafts]; may be empty. Where it is false, a lossy rule gives way to token level.
  BoolView rule_mask;
  /// [slots], of kSynthetic.
  RealView accept_rates;
  /// How many drafts after a rejected one must be accepted for it to be accepted too (FLy); 0: it never is.
  int64_t fly_window_size = 0;
  double fly_entropy_threshold = 0.0;
  int fly_entropy_top_k = 1;

  RealView temperature;
  /// May be empty: the target's.
  RealView draft_temperature;

  /// What masks ids of the laws before anything is drawn or compared; greedy requests have none.
  FilterViews filters;
  /// Of draft logits.
  FilterViews draft_filters;
  /// Top-p of the whole row, not of what the other filters leave.
  bool joint_filters = false;
  /// Where draft logits below are masked. May be empty.
  DraftView<RealView> draft_thresholds;

  /// Either seeds and positions, or uniforms; neither where every request is greedy.
  IntView seeds;
  IntView positions;
  RealView accept_uniforms;
  RealView final_uniforms;
  /// The stream and slot of the recovered, bonus or sampled token. In kDraft the position is that
  /// of slot 0.
  Stream final_stream = Stream::kTarget;
  Sampler sampler = Sampler::kInverseCdf;
  int64_t final_slot = 0;
  /// Tokens are drawn from this many ids at most; 0: from all that filters keep. Of `sample` alone.
  int64_t law_size = 0;
  /// By request. May be empty: final_slot for all.
  IntView final_slots;

  /// [batch, width], all of it written; ids as in draft_token_ids.
  void* token_ids = nullptr;
  bool token_ids_are_int64 = false;
  int64_t width = 1;
  int32_t* status = nullptr;
  /// These may be null.
  int32_t* num_accepted = nullptr;
  double* logsumexp = nullptr;    ///< [rows]
  float* logprobs = nullptr;      ///< [batch, width]
  float* accept_probs = nullptr;  ///< [drafts]
  float* thresholds = nullptr;    ///< [rows]
  // Where there is a law_size:
  MutableIntView law_ids;         ///< [batch, law_size]
  float* law_logprobs = nullptr;  ///< [batch, law_size]
};

/// The entry of a request; -1: it has none and is greedy. Where nobody has checked the indices, none leads
/// out of the tensors.
SPECDEC_HOST_DEVICE int64_t entry_of(const ChainParams& params, int64_t request) {
  if (!params.request_indices) return request;
  return clamped(at(params.request_indices, request), -1, params.num_entries - 1);
}

}  // namespace specdec_ops

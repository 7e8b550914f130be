#pragma once

#include "common/allocate.h"
#include "common/chain_params.h"
#include "common/checks.h"
#include "common/fly.h"
#include "common/tensor_views.h"

/// From tensors to the parameters of the chain program: what verify_chain, sample and
/// sample_recovered have in common.
namespace specdec_ops {

/// The draft-law arguments of an op.
struct DraftLawArguments {
  const OptionalTensor& logits;
  const OptionalTensor& probs;
  const OptionalTensor& logsumexp;
  const OptionalTensor& support_ids;
  const OptionalTensor& support_logprobs;
  const OptionalTensor& temperature;
  const OptionalTensor& has_law;
};

inline void set_temperature(const Checks& checks, const Tensor& temperature, const char* shape,
                            ChainParams* params) {
  checks.dtype(temperature, "temperature", {ScalarType::Float}, "float32");
  checks.vector(temperature, "temperature", shape, params->batch);
  params->temperature = real_view(temperature);
}

inline void set_draft_law(const Checks& checks, const DraftLawArguments& law, const char* request_shape,
                          int64_t num_drafts, ChainParams* params) {
  checks.require(law.logits.has_value() + law.probs.has_value() + law.support_ids.has_value() <= 1,
                 "draft_logits, draft_probs and draft_support_ids must be at most one, got several");
  checks.require(!law.logsumexp || law.logits,
                 "draft_logsumexp must be given with draft_logits, got it alone");
  checks.require(law.support_ids.has_value() == law.support_logprobs.has_value(),
                 "draft_support_ids and draft_support_logprobs must be given together, got one");
  if (law.logits || law.probs) {
    const Tensor& rows = law.logits ? *law.logits : *law.probs;
    const char* name = law.logits ? "draft_logits" : "draft_probs";
    checks.rows(rows, name, "[num_drafts, width]", num_drafts);
    checks.require(rows.size(1) >= params->vocab_size || num_drafts == 0, name,
                   " must have at least vocab_size = ", params->vocab_size, " columns, got ", rows.size(1));
    params->draft_law = law.logits ? DraftLawKind::kLogits : DraftLawKind::kProbs;
    params->draft = rows_view(rows);
  }
  if (law.logsumexp) {
    checks.real(*law.logsumexp, "draft_logsumexp");
    checks.vector(*law.logsumexp, "draft_logsumexp", "[num_drafts]", num_drafts);
    params->draft_logsumexp = real_view(*law.logsumexp);
  }
  if (law.support_ids) {
    const Tensor& ids = *law.support_ids;
    const Tensor& logprobs = *law.support_logprobs;
    checks.integer(ids, "draft_support_ids");
    checks.dtype(logprobs, "draft_support_logprobs", {ScalarType::Float}, "float32");
    checks.require(ids.dim() == 2 && ids.size(0) == num_drafts,
                   "draft_support_ids must be [num_drafts, support] with ", num_drafts, " rows, got ",
                   shape_of(ids));
    checks.require(logprobs.dim() == 2 && logprobs.size(0) == num_drafts && logprobs.size(1) == ids.size(1),
                   "draft_support_logprobs must have the shape of draft_support_ids, ", shape_of(ids),
                   ", got ", shape_of(logprobs));
    params->draft_law = DraftLawKind::kSupport;
    params->draft_support_ids = int_view(ids);
    params->draft_support_logprobs = real_view(logprobs);
    params->draft_support_size = ids.size(1);
  }
  if (law.temperature) {
    checks.dtype(*law.temperature, "draft_temperature", {ScalarType::Float}, "float32");
    checks.vector(*law.temperature, "draft_temperature", request_shape, params->batch);
    params->draft_temperature = real_view(*law.temperature);
  }
  if (law.has_law) {
    checks.boolean(*law.has_law, "has_draft_law");
    checks.vector(*law.has_law, "has_draft_law", request_shape, params->batch);
    params->has_draft_law = bool_view(*law.has_law);
  }
}

/// Of a batch in host memory: without random numbers every request must be greedy.
inline void require_greedy(const Checks& checks, const ChainParams& params, const char* needed) {
  for (int64_t r = 0; r < params.batch; ++r) {
    checks.require(is_greedy(static_cast<float>(at(params.temperature, r))), needed, ", got neither");
  }
}

inline void set_seeds(const Checks& checks, const OptionalTensor& seeds, const OptionalTensor& positions,
                      const char* shape, ChainParams* params) {
  checks.require(seeds.has_value() == positions.has_value(),
                 "seeds and positions must be given together, got one");
  if (!seeds) return;
  checks.dtype(*seeds, "seeds", {ScalarType::Long}, "int64");
  checks.vector(*seeds, "seeds", shape, params->batch);
  checks.integer(*positions, "positions");
  checks.vector(*positions, "positions", shape, params->batch);
  params->seeds = int_view(*seeds);
  params->positions = int_view(*positions);
}

inline void set_uniforms(const Checks& checks, const Tensor& uniforms, const char* name, const char* shape,
                         int64_t size, RealView* view) {
  checks.real(uniforms, name);
  checks.vector(uniforms, name, shape, size);
  *view = real_view(uniforms);
}

/// Of uniforms in host memory.
inline void require_uniforms(const Checks& checks, const RealView& view, const char* name, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const double u = at(view, i);
    checks.require(u >= 0.0 && u < 1.0, name, " must be in [0, 1), got ", u, " at index ", i);
  }
}

/// Synthetic acceptance: a rate for each slot.
inline void set_accept_rates(const Checks& checks, const Tensor& rates, int64_t max_num_draft_tokens,
                             ChainParams* params) {
  checks.real(rates, "accept_rates");
  checks.require(rates.dim() == 1 && rates.size(0) >= max_num_draft_tokens,
                 "accept_rates must be [slots] with at least max_num_draft_tokens = ", max_num_draft_tokens,
                 max_num_draft_tokens == 1 ? " element" : " elements", ", got ", shape_of(rates));
  params->rule = Rule::kSynthetic;
  params->accept_rates = real_view(rates);
}

/// Of rates in host memory.
inline void require_accept_rates(const Checks& checks, const ChainParams& params, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const double rate = at(params.accept_rates, i);
    checks.require(rate >= 0.0 && rate <= 1.0, "accept_rates must be in [0, 1], got ", rate, " at index ", i);
  }
}

inline void set_fly(const Checks& checks, int64_t window_size, double entropy_threshold,
                    int64_t entropy_top_k, ChainParams* params) {
  checks.require(window_size >= 1, "fly_window_size must be at least 1, got ", window_size);
  checks.require(entropy_threshold >= 0.0, "fly_entropy_threshold must be at least 0, got ",
                 entropy_threshold);
  checks.require(entropy_top_k >= 1 && entropy_top_k <= kMaxEntropyTopK, "fly_entropy_top_k must be in [1, ",
                 kMaxEntropyTopK, "], got ", entropy_top_k);
  params->fly_window_size = window_size;
  params->fly_entropy_threshold = entropy_threshold;
  params->fly_entropy_top_k = static_cast<int>(entropy_top_k);
}

}  // namespace specdec_ops

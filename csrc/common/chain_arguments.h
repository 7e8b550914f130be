#pragma once

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "common/allocate.h"
#include "common/chain_params.h"
#include "common/checks.h"
#include "common/fly.h"
#include "common/support_law.h"
#include "common/tensor_views.h"

/// From tensors to the parameters of the chain program: what verify_chain, sample and
/// sample_recovered have in common.
namespace specdec_ops {

/// Sizes of an op's arguments, and what messages call them.
struct ChainShapes {
  /// Of temperatures, seeds and the like.
  const char* entries;
  int64_t num_entries;
  int64_t num_drafts;
  /// The most drafts of a request, of ops where draft laws may lie in entries; else -1.
  int64_t num_slots = -1;
};

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

/// Top-k, top-p and min-p of an op, for the target or the drafts.
struct FilterArguments {
  const OptionalTensor& top_k;
  const OptionalTensor& top_p;
  const OptionalTensor& min_p;
};

/// Returns how temperatures, seeds and the like are laid out; `by_request` spells it out where requests have
/// no indices.
inline ChainShapes set_request_indices(const Checks& checks, const OptionalTensor& indices,
                                       const Tensor& temperature, const char* by_request,
                                       ChainParams* params) {
  if (!indices) return {by_request, params->batch, params->batch};
  checks.integer(*indices, "request_indices");
  checks.vector(*indices, "request_indices", by_request, params->batch);
  checks.require(temperature.dim() == 1 && (temperature.size(0) > 0 || params->batch == 0),
                 "temperature must be [max_requests] with at least one element, got ", shape_of(temperature));
  params->request_indices = int_view(*indices);
  params->num_entries = temperature.size(0);
  return {"[max_requests]", params->num_entries, params->batch};
}

/// Of indices in host memory. `request`: what an index belongs to.
inline void require_request_indices(const Checks& checks, const ChainParams& params, int64_t least,
                                    const char* request) {
  if (!params.request_indices) return;
  for (int64_t r = 0; r < params.batch; ++r) {
    const int64_t index = at(params.request_indices, r);
    checks.require(index >= least && index < params.num_entries, "request_indices must be in [", least, ", ",
                   params.num_entries, "), got ", index, " for ", request, " ", r);
  }
}

inline void set_temperature(const Checks& checks, const Tensor& temperature, const ChainShapes& shapes,
                            ChainParams* params) {
  checks.dtype(temperature, "temperature", {ScalarType::Float}, "float32");
  checks.vector(temperature, "temperature", shapes.entries, shapes.num_entries);
  params->temperature = real_view(temperature);
}

/// Whether what drafts have `dims` dimensions of lies in entries, where it then has enough slots.
inline bool lies_in_entries(const Checks& checks, const Tensor& tensor, const char* name, int64_t dims,
                            const char* shape, const ChainShapes& shapes) {
  if (shapes.num_slots < 0 || tensor.dim() != dims + 2) return false;
  checks.require(tensor.size(0) == shapes.num_entries && tensor.size(1) >= shapes.num_slots, name,
                 " must be ", shape, " with max_requests = ", shapes.num_entries,
                 " and k at least max_num_draft_tokens = ", shapes.num_slots, ", got ", shape_of(tensor));
  return true;
}

template <class View>
DraftView<View> draft_view(const Tensor& tensor, const View& view, bool in_entries) {
  return {view, in_entries ? 0 : tensor.stride(0), in_entries ? tensor.stride(0) : 0};
}

inline void set_draft_law(const Checks& checks, const DraftLawArguments& law, const ChainShapes& shapes,
                          ChainParams* params) {
  const int64_t num_drafts = shapes.num_drafts;
  checks.require(law.logits.has_value() + law.probs.has_value() + law.support_ids.has_value() <= 1,
                 "draft_logits, draft_probs and draft_support_ids must be at most one, got several");
  checks.require(!law.logsumexp || law.logits,
                 "draft_logsumexp must be given with draft_logits, got it alone");
  checks.require(law.support_ids.has_value() == law.support_logprobs.has_value(),
                 "draft_support_ids and draft_support_logprobs must be given together, got one");
  if (law.logits || law.probs) {
    const Tensor& rows = law.logits ? *law.logits : *law.probs;
    const char* name = law.logits ? "draft_logits" : "draft_probs";
    const bool in_entries = lies_in_entries(checks, rows, name, 1, "[max_requests, k, width]", shapes);
    if (in_entries) {
      checks.row_dtype(rows, name);
      checks.contiguous_rows(rows, name);
    } else {
      checks.rows(rows, name, "[num_drafts, width]", num_drafts);
    }
    const int64_t width = rows.size(rows.dim() - 1);
    checks.require(width >= params->vocab_size || num_drafts == 0, name,
                   " must have at least vocab_size = ", params->vocab_size, " columns, got ", width);
    params->draft_law = law.logits ? DraftLawKind::kLogits : DraftLawKind::kProbs;
    params->draft = draft_view(rows, rows_view(rows), in_entries);
  }
  if (law.logsumexp) {
    checks.real(*law.logsumexp, "draft_logsumexp");
    const bool in_entries =
        lies_in_entries(checks, *law.logsumexp, "draft_logsumexp", 0, "[max_requests, k]", shapes);
    if (!in_entries) checks.vector(*law.logsumexp, "draft_logsumexp", "[num_drafts]", num_drafts);
    params->draft_logsumexp = draft_view(*law.logsumexp, real_view(*law.logsumexp), in_entries);
  }
  if (law.support_ids) {
    const Tensor& ids = *law.support_ids;
    const Tensor& logprobs = *law.support_logprobs;
    checks.integer(ids, "draft_support_ids");
    checks.dtype(logprobs, "draft_support_logprobs", {ScalarType::Float}, "float32");
    const bool in_entries =
        lies_in_entries(checks, ids, "draft_support_ids", 1, "[max_requests, k, support]", shapes);
    checks.require(in_entries || (ids.dim() == 2 && ids.size(0) == num_drafts),
                   "draft_support_ids must be [num_drafts, support] with ", num_drafts, " rows, got ",
                   shape_of(ids));
    checks.require(same_shape(logprobs, ids),
                   "draft_support_logprobs must have the shape of draft_support_ids, ", shape_of(ids),
                   ", got ", shape_of(logprobs));
    params->draft_law = DraftLawKind::kSupport;
    params->draft_support_ids = draft_view(ids, int_view(ids), in_entries);
    params->draft_support_logprobs = draft_view(logprobs, real_view(logprobs), in_entries);
    params->draft_support_size = ids.size(ids.dim() - 1);
  }
  if (law.temperature) {
    checks.dtype(*law.temperature, "draft_temperature", {ScalarType::Float}, "float32");
    checks.vector(*law.temperature, "draft_temperature", shapes.entries, shapes.num_entries);
    params->draft_temperature = real_view(*law.temperature);
  }
  if (law.has_law) {
    checks.boolean(*law.has_law, "has_draft_law");
    checks.vector(*law.has_law, "has_draft_law", shapes.entries, shapes.num_entries);
    params->has_draft_law = bool_view(*law.has_law);
  }
}

/// `names` of top_k, top_p and min_p. What a value out of range means is in filters_from.
inline void set_filters(const Checks& checks, const FilterArguments& filters, const char* const (&names)[3],
                        const ChainShapes& shapes, FilterViews* views) {
  if (filters.top_k) {
    checks.integer(*filters.top_k, names[0]);
    checks.vector(*filters.top_k, names[0], shapes.entries, shapes.num_entries);
    views->top_k = int_view(*filters.top_k);
  }
  const auto set_real = [&](const OptionalTensor& tensor, const char* name, RealView* view) {
    if (!tensor) return;
    checks.dtype(*tensor, name, {ScalarType::Float}, "float32");
    checks.vector(*tensor, name, shapes.entries, shapes.num_entries);
    *view = real_view(*tensor);
  };
  set_real(filters.top_p, names[1], &views->top_p);
  set_real(filters.min_p, names[2], &views->min_p);
}

/// What masks draft logits: thresholds that are known, or filters that they are found by.
inline void set_draft_filters(const Checks& checks, const FilterArguments& filters,
                              const OptionalTensor& thresholds, const ChainShapes& shapes,
                              ChainParams* params) {
  constexpr const char* kNames[] = {"draft_top_k", "draft_top_p", "draft_min_p"};
  set_filters(checks, filters, kNames, shapes, &params->draft_filters);
  const char* first = filters.top_k ? kNames[0] : filters.top_p ? kNames[1] : kNames[2];
  checks.require(!params->draft_filters || params->draft_law == DraftLawKind::kLogits, first,
                 " must be given with draft_logits, got it without");
  checks.require(!params->draft_filters || !params->draft_logsumexp,
                 "draft_logsumexp of filtered rows must be given with draft_thresholds, got ", first);
  if (!thresholds) return;
  checks.require(params->draft_law == DraftLawKind::kLogits,
                 "draft_thresholds must be given with draft_logits, got it without");
  checks.require(!params->draft_filters, "draft_thresholds and ", first, " must be at most one, got both");
  checks.dtype(*thresholds, "draft_thresholds", {ScalarType::Float}, "float32");
  const bool in_entries =
      lies_in_entries(checks, *thresholds, "draft_thresholds", 0, "[max_requests, k]", shapes);
  if (!in_entries) checks.vector(*thresholds, "draft_thresholds", "[num_drafts]", shapes.num_drafts);
  params->draft_thresholds = draft_view(*thresholds, real_view(*thresholds), in_entries);
}

/// Of a batch in host memory: without random numbers every request must be greedy.
inline void require_greedy(const Checks& checks, const ChainParams& params, const char* needed) {
  for (int64_t r = 0; r < params.batch; ++r) {
    const int64_t entry = entry_of(params, r);
    checks.require(entry < 0 || is_greedy(static_cast<float>(at(params.temperature, entry))), needed,
                   ", got neither");
  }
}

inline void set_seeds(const Checks& checks, const OptionalTensor& seeds, const OptionalTensor& positions,
                      const ChainShapes& shapes, const char* by_request, ChainParams* params) {
  checks.require(seeds.has_value() == positions.has_value(),
                 "seeds and positions must be given together, got one");
  if (!seeds) return;
  checks.dtype(*seeds, "seeds", {ScalarType::Long}, "int64");
  checks.vector(*seeds, "seeds", shapes.entries, shapes.num_entries);
  checks.integer(*positions, "positions");
  checks.vector(*positions, "positions", by_request, params->batch);
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

/// A rule, its parameters, and the range of each.
struct RuleName {
  struct Parameter {
    const char* name;
    double least, most;
  };

  const char* name;
  Rule rule;
  int num_parameters;
  Parameter parameters[2];
};

constexpr RuleName kRuleNames[] = {
    {"token", Rule::kTokenLevel, 0, {}},
    {"block", Rule::kBlock, 0, {}},
    {"exact_match", Rule::kExactMatch, 0, {}},
    {"lenience", Rule::kLenience, 1, {{"factor", 0x1p-20, 1.0}, {}}},
    {"typical", Rule::kTypical, 2, {{"epsilon", 0.0, 1.0}, {"delta", 0.0, 1.0}}},
    {"top_n", Rule::kTopN, 2, {{"n", 1.0, 0x1p30}, {"delta", 0.0, 1.0}}},
    {"thresholds", Rule::kThresholds, 2, {{"single", 0.0, 1.0}, {"acc", 0x1p-20, 1.0}}},
    {"margin", Rule::kMargin, 1, {{"theta", 0.0, 1.0}, {}}},
};

/// The rule by its name, where no other argument replaces it.
inline void set_rule(const Checks& checks, const std::string& name, const std::vector<double>& values,
                     const OptionalTensor& mask, ChainParams* params) {
  const RuleName* rule = std::find_if(std::begin(kRuleNames), std::end(kRuleNames),
                                      [&](const RuleName& each) { return name == each.name; });
  checks.require(rule != std::end(kRuleNames),
                 "rule must be 'token', 'block', 'exact_match' or one of specdec_ops.rules, got '", name,
                 "'");
  const int64_t num_values = static_cast<int64_t>(values.size());
  checks.require(num_values == rule->num_parameters, "rule_parameters must have ", rule->num_parameters,
                 " elements for rule '", name, "', got ", num_values);
  for (int i = 0; i < rule->num_parameters; ++i) {
    const RuleName::Parameter& parameter = rule->parameters[i];
    checks.require(values[i] >= parameter.least && values[i] <= parameter.most, "rule must have its ",
                   parameter.name, " in [", parameter.least, ", ", parameter.most, "], got ", values[i]);
    params->rule_parameters[i] = values[i];
  }
  if (rule->rule != Rule::kTokenLevel) params->rule = rule->rule;
  if (!mask) return;
  checks.require(is_lossy(rule->rule), "rule_mask must be given with a lossy rule alone, got it with '", name,
                 "'");
  checks.boolean(*mask, "rule_mask");
  checks.vector(*mask, "rule_mask", "[num_drafts]", params->num_drafts);
  params->rule_mask = bool_view(*mask);
}

/// Gumbel noise needs a number for each id.
inline void set_sampler(const Checks& checks, const std::string& sampler, bool has_uniforms,
                        ChainParams* params) {
  if (sampler == "inverse_cdf") return;
  checks.require(sampler == "gumbel", "sampler must be 'inverse_cdf' or 'gumbel', got '", sampler, "'");
  checks.require(!has_uniforms, "sampler must be 'inverse_cdf' with uniforms, got 'gumbel'");
  params->sampler = Sampler::kGumbel;
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

/// Slots of drafts that are drawn, by row or one for all of them.
inline void set_draft_slots(const Checks& checks, const Tensor& slots, ChainParams* params) {
  checks.integer(slots, "draft_slot");
  const bool is_one = slots.dim() == 0;
  if (!is_one) checks.vector(slots, "draft_slot", "one integer or [batch]", params->batch);
  params->final_slots = {slots.const_data_ptr(), is_one ? 0 : slots.stride(0),
                         dtype_of(slots) == ScalarType::Long};
}

/// Of slots in host memory. Those of rows that belong to no request are not looked at.
inline void require_draft_slots(const Checks& checks, const ChainParams& params) {
  for (int64_t r = 0; r < params.batch && params.final_slots; ++r) {
    const int64_t slot = at(params.final_slots, r);
    checks.require((slot >= 0 && slot <= INT32_MAX) || entry_of(params, r) < 0,
                   "draft_slot must be in [0, 2^31), got ", slot, " for row ", r);
  }
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

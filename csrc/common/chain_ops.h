#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/chain_arguments.h"

/// The ops of the chain program. A Backend says whether the values in tensors can be read here
/// (kValuesOnHost), names the checks of an op (checks), and runs the program (run).
namespace specdec_ops {

/// Of cu_num_draft_tokens in host memory.
inline void require_draft_counts(const Checks& checks, const ChainParams& params,
                                 int64_t max_num_draft_tokens) {
  checks.require(at(params.cu_num_draft_tokens, 0) == 0, "cu_num_draft_tokens must start with 0, got ",
                 at(params.cu_num_draft_tokens, 0));
  for (int64_t r = 0; r < params.batch; ++r) {
    const int64_t count = at(params.cu_num_draft_tokens, r + 1) - at(params.cu_num_draft_tokens, r);
    checks.require(count >= 0, "cu_num_draft_tokens must not decrease, got ",
                   at(params.cu_num_draft_tokens, r), " before ", at(params.cu_num_draft_tokens, r + 1),
                   " at index ", r + 1);
    checks.require(count <= max_num_draft_tokens,
                   "max_num_draft_tokens must be at least the largest count, got ", max_num_draft_tokens,
                   " for a request with ", count, " drafts");
  }
  checks.require(at(params.cu_num_draft_tokens, params.batch) == params.num_drafts,
                 "cu_num_draft_tokens must end with num_drafts = ", params.num_drafts, ", got ",
                 at(params.cu_num_draft_tokens, params.batch));
}

/// Whether the results depend on draft laws, so that somebody must read them.
inline bool looks_at_draft_laws(const ChainParams& params, bool returns_accept_probs) {
  switch (params.rule) {
    case Rule::kExactMatch:
      return false;
    case Rule::kTypical:
    case Rule::kTopN:
    case Rule::kThresholds:
      return params.rule_mask || returns_accept_probs;
    default:
      return true;
  }
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> verify_chain(
    const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& cu_num_draft_tokens,
    const Tensor& temperature, int64_t max_num_draft_tokens, const OptionalTensor& draft_logits,
    const OptionalTensor& draft_probs, const OptionalTensor& draft_logsumexp,
    const OptionalTensor& draft_support_ids, const OptionalTensor& draft_support_logprobs,
    const OptionalTensor& draft_temperature, const OptionalTensor& has_draft_law, const OptionalTensor& seeds,
    const OptionalTensor& positions, const OptionalTensor& request_indices,
    const OptionalTensor& accept_uniforms, const OptionalTensor& recovered_uniforms,
    const OptionalTensor& bonus_token_ids, const OptionalTensor& accept_rates,
    std::optional<int64_t> fly_window_size, double fly_entropy_threshold, int64_t fly_entropy_top_k,
    const OptionalTensor& top_k, const OptionalTensor& top_p, const OptionalTensor& min_p,
    const OptionalTensor& draft_top_k, const OptionalTensor& draft_top_p, const OptionalTensor& draft_min_p,
    const OptionalTensor& draft_thresholds, bool joint_filters, std::optional<int64_t> vocab_size,
    bool return_logsumexp, bool return_logprobs, bool return_accept_probs, const std::string& rule,
    const std::vector<double>& rule_parameters, const OptionalTensor& rule_mask, const std::string& sampler) {
  const Checks checks = Backend::checks("verify_chain", target_logits);
  ChainParams params;
  checks.integer(cu_num_draft_tokens, "cu_num_draft_tokens");
  checks.require(cu_num_draft_tokens.dim() == 1 && cu_num_draft_tokens.size(0) >= 1,
                 "cu_num_draft_tokens must be [batch + 1], got ", shape_of(cu_num_draft_tokens));
  params.batch = cu_num_draft_tokens.size(0) - 1;
  params.cu_num_draft_tokens = int_view(cu_num_draft_tokens);

  checks.integer(draft_token_ids, "draft_token_ids");
  checks.require(draft_token_ids.dim() == 1, "draft_token_ids must be [num_drafts], got ",
                 shape_of(draft_token_ids));
  const int64_t num_drafts = draft_token_ids.size(0);
  params.num_drafts = num_drafts;
  params.draft_token_ids = int_view(draft_token_ids);

  params.has_bonus_rows = !bonus_token_ids;
  const int64_t num_rows = num_drafts + (params.has_bonus_rows ? params.batch : 0);
  checks.rows(target_logits, "target_logits",
              params.has_bonus_rows ? "[num_drafts + batch, width]" : "[num_drafts, width]", num_rows);
  params.target = rows_view(target_logits);
  params.vocab_size = checks.vocab_size(vocab_size, target_logits, "target_logits");

  checks.require(max_num_draft_tokens >= 0 && max_num_draft_tokens < INT32_MAX,
                 "max_num_draft_tokens must be in [0, 2^31 - 1), got ", max_num_draft_tokens);
  if constexpr (Backend::kValuesOnHost) require_draft_counts(checks, params, max_num_draft_tokens);

  if (bonus_token_ids) {
    checks.integer(*bonus_token_ids, "bonus_token_ids");
    checks.vector(*bonus_token_ids, "bonus_token_ids", "[batch]", params.batch);
    params.bonus_token_ids = int_view(*bonus_token_ids);
  }
  checks.require(!accept_rates || !fly_window_size,
                 "accept_rates and fly_window_size must be at most one, got both");
  checks.require(rule == "token" || (!accept_rates && !fly_window_size),
                 "rule must be 'token' with accept_rates or fly_window_size, got '", rule, "'");
  set_rule(checks, rule, rule_parameters, rule_mask, &params);
  set_sampler(checks, sampler, accept_uniforms.has_value(), &params);
  checks.require(params.sampler == Sampler::kInverseCdf || params.rule == Rule::kExactMatch,
                 "sampler must be 'inverse_cdf' unless rule is 'exact_match', got '", sampler, "'");
  if (accept_rates) {
    set_accept_rates(checks, *accept_rates, max_num_draft_tokens, &params);
    if constexpr (Backend::kValuesOnHost) require_accept_rates(checks, params, accept_rates->size(0));
  }
  if (fly_window_size) {
    set_fly(checks, *fly_window_size, fly_entropy_threshold, fly_entropy_top_k, &params);
  }

  ChainShapes shapes = set_request_indices(checks, request_indices, temperature, "[batch]", &params);
  shapes.num_drafts = num_drafts;
  shapes.num_slots = max_num_draft_tokens;
  if constexpr (Backend::kValuesOnHost) require_request_indices(checks, params, 0, "request");
  set_temperature(checks, temperature, shapes, &params);
  set_draft_law(checks,
                {draft_logits, draft_probs, draft_logsumexp, draft_support_ids, draft_support_logprobs,
                 draft_temperature, has_draft_law},
                shapes, &params);
  set_filters(checks, {top_k, top_p, min_p}, {"top_k", "top_p", "min_p"}, shapes, &params.filters);
  set_draft_filters(checks, {draft_top_k, draft_top_p, draft_min_p}, draft_thresholds, shapes, &params);
  params.joint_filters = joint_filters;
  if (!looks_at_draft_laws(params, return_accept_probs)) {
    params.draft_law = DraftLawKind::kOneHot;
    params.draft_logsumexp = {};
    params.draft_filters = {};
    params.draft_thresholds = {};
  }
  set_seeds(checks, seeds, positions, shapes, "[batch]", &params);
  checks.require(accept_uniforms.has_value() == recovered_uniforms.has_value(),
                 "accept_uniforms and recovered_uniforms must be given together, got one");
  checks.require(!seeds || !accept_uniforms, "seeds and accept_uniforms must be at most one, got both");
  if (accept_uniforms) {
    set_uniforms(checks, *accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts,
                 &params.accept_uniforms);
    set_uniforms(checks, *recovered_uniforms, "recovered_uniforms", "[batch]", params.batch,
                 &params.final_uniforms);
    if constexpr (Backend::kValuesOnHost) {
      require_uniforms(checks, params.accept_uniforms, "accept_uniforms", num_drafts);
      require_uniforms(checks, params.final_uniforms, "recovered_uniforms", params.batch);
    }
  }
  if (Backend::kValuesOnHost && !seeds && !accept_uniforms) {
    require_greedy(
        checks, params,
        "seeds and positions, or accept_uniforms and recovered_uniforms, must be given unless every "
        "request is greedy");
  }
  checks.require(seeds || accept_uniforms || !accept_rates || num_drafts == 0,
                 "seeds and positions, or accept_uniforms and recovered_uniforms, must be given with "
                 "accept_rates, got neither");

  params.width = max_num_draft_tokens + 1;
  Tensor token_ids = empty_beside(draft_token_ids, {params.batch, params.width}, dtype_of(draft_token_ids));
  Tensor num_accepted = empty_beside(draft_token_ids, {params.batch}, ScalarType::Int);
  Tensor status = empty_beside(draft_token_ids, {params.batch}, ScalarType::Int);
  params.token_ids = token_ids.mutable_data_ptr();
  params.token_ids_are_int64 = dtype_of(draft_token_ids) == ScalarType::Long;
  params.num_accepted = static_cast<int32_t*>(num_accepted.mutable_data_ptr());
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  std::vector<Tensor> extras;
  const auto add_extra = [&](std::initializer_list<int64_t> shape, ScalarType dtype) {
    return extras.emplace_back(empty_beside(target_logits, shape, dtype)).mutable_data_ptr();
  };
  if (return_logsumexp) {
    params.logsumexp = static_cast<double*>(add_extra({num_rows}, ScalarType::Double));
  }
  if (return_logprobs) {
    params.logprobs = static_cast<float*>(add_extra({params.batch, params.width}, ScalarType::Float));
  }
  if (return_accept_probs) {
    params.accept_probs = static_cast<float*>(add_extra({num_drafts}, ScalarType::Float));
  }
  if (params.batch > 0) Backend::run(checks, params, target_logits);
  return {std::move(token_ids), std::move(num_accepted), std::move(status), std::move(extras)};
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>> sample(
    const Tensor& logits, const Tensor& temperature, const OptionalTensor& seeds,
    const OptionalTensor& positions, const OptionalTensor& request_indices, std::optional<int64_t> draft_slot,
    const OptionalTensor& draft_slots, const OptionalTensor& uniforms, const OptionalTensor& top_k,
    const OptionalTensor& top_p, const OptionalTensor& min_p, bool joint_filters,
    std::optional<int64_t> vocab_size, ScalarType token_dtype, const std::string& sampler,
    std::optional<int64_t> law_size) {
  const Checks checks = Backend::checks("sample", logits);
  ChainParams params;
  checks.require(logits.dim() == 2, "logits must be [batch, width], got ", shape_of(logits));
  params.batch = logits.size(0);
  checks.rows(logits, "logits", "[batch, width]", params.batch);
  params.target = rows_view(logits);
  params.vocab_size = checks.vocab_size(vocab_size, logits, "logits");
  const ChainShapes shapes = set_request_indices(checks, request_indices, temperature, "[batch]", &params);
  // Rows of no request are padding.
  if constexpr (Backend::kValuesOnHost) require_request_indices(checks, params, -1, "row");
  set_temperature(checks, temperature, shapes, &params);
  set_filters(checks, {top_k, top_p, min_p}, {"top_k", "top_p", "min_p"}, shapes, &params.filters);
  params.joint_filters = joint_filters;
  set_seeds(checks, seeds, positions, shapes, "[batch]", &params);
  checks.require(!seeds || !uniforms, "seeds and uniforms must be at most one, got both");
  if (uniforms) {
    set_uniforms(checks, *uniforms, "uniforms", "[batch]", params.batch, &params.final_uniforms);
    if constexpr (Backend::kValuesOnHost)
      require_uniforms(checks, params.final_uniforms, "uniforms", params.batch);
  }
  if (Backend::kValuesOnHost && !seeds && !uniforms) {
    require_greedy(checks, params,
                   "seeds and positions, or uniforms, must be given unless every row is greedy");
  }
  set_sampler(checks, sampler, uniforms.has_value(), &params);
  if (draft_slot || draft_slots) {
    checks.require(!uniforms, "draft_slot and uniforms must be at most one, got both");
    params.final_stream = Stream::kDraft;
  }
  if (draft_slots) {
    set_draft_slots(checks, *draft_slots, &params);
    if constexpr (Backend::kValuesOnHost) require_draft_slots(checks, params);
  }
  if (draft_slot) {
    checks.require(*draft_slot >= 0 && *draft_slot <= INT32_MAX, "draft_slot must be in [0, 2^31), got ",
                   *draft_slot);
    params.final_slot = *draft_slot;
  }
  checks.require(token_dtype == ScalarType::Int || token_dtype == ScalarType::Long,
                 "token_dtype must be int32 or int64, got ", name_of(token_dtype));
  if (law_size) {
    checks.require(*law_size >= 1 && *law_size <= kLargestLawSize, "law_size must be in [1, ",
                   kLargestLawSize, "], got ", *law_size);
    checks.require(params.sampler == Sampler::kInverseCdf,
                   "sampler must be 'inverse_cdf' with law_size, got '", sampler, "'");
  }

  Tensor token_ids = empty_beside(logits, {params.batch}, token_dtype);
  Tensor logprobs = empty_beside(logits, {params.batch}, ScalarType::Float);
  Tensor logsumexp = empty_beside(logits, {params.batch}, ScalarType::Double);
  Tensor status = empty_beside(logits, {params.batch}, ScalarType::Int);
  Tensor thresholds = empty_beside(logits, {params.batch}, ScalarType::Float);
  params.token_ids = token_ids.mutable_data_ptr();
  params.token_ids_are_int64 = token_dtype == ScalarType::Long;
  params.logprobs = static_cast<float*>(logprobs.mutable_data_ptr());
  params.logsumexp = static_cast<double*>(logsumexp.mutable_data_ptr());
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  params.thresholds = static_cast<float*>(thresholds.mutable_data_ptr());
  std::vector<Tensor> law;
  if (law_size) {
    law.push_back(empty_beside(logits, {params.batch, *law_size}, token_dtype));
    law.push_back(empty_beside(logits, {params.batch, *law_size}, ScalarType::Float));
    params.law_size = *law_size;
    params.law_ids = {law[0].mutable_data_ptr(), 1, params.token_ids_are_int64, *law_size};
    params.law_logprobs = static_cast<float*>(law[1].mutable_data_ptr());
  }
  if (params.batch > 0) Backend::run(checks, params, logits);
  return {std::move(token_ids), std::move(logprobs),   std::move(logsumexp),
          std::move(status),    std::move(thresholds), std::move(law)};
}

template <class Backend>
std::tuple<Tensor, Tensor> sample_recovered(
    const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& temperature,
    const OptionalTensor& draft_logits, const OptionalTensor& draft_probs,
    const OptionalTensor& draft_logsumexp, const OptionalTensor& draft_support_ids,
    const OptionalTensor& draft_support_logprobs, const OptionalTensor& draft_temperature,
    const OptionalTensor& has_draft_law, const OptionalTensor& seeds, const OptionalTensor& positions,
    const OptionalTensor& uniforms, const OptionalTensor& top_k, const OptionalTensor& top_p,
    const OptionalTensor& min_p, const OptionalTensor& draft_top_k, const OptionalTensor& draft_top_p,
    const OptionalTensor& draft_min_p, const OptionalTensor& draft_thresholds, bool joint_filters,
    std::optional<int64_t> vocab_size) {
  const Checks checks = Backend::checks("sample_recovered", target_logits);
  ChainParams params;
  params.rule = Rule::kRejectAll;
  params.drafts_per_request = 1;
  params.has_bonus_rows = false;
  checks.integer(draft_token_ids, "draft_token_ids");
  checks.require(draft_token_ids.dim() == 1, "draft_token_ids must be [num_drafts], got ",
                 shape_of(draft_token_ids));
  params.batch = draft_token_ids.size(0);
  params.num_drafts = params.batch;
  params.draft_token_ids = int_view(draft_token_ids);
  checks.rows(target_logits, "target_logits", "[num_drafts, width]", params.batch);
  params.target = rows_view(target_logits);
  params.vocab_size = checks.vocab_size(vocab_size, target_logits, "target_logits");
  const ChainShapes shapes = {"[num_drafts]", params.batch, params.batch};
  set_temperature(checks, temperature, shapes, &params);
  set_draft_law(checks,
                {draft_logits, draft_probs, draft_logsumexp, draft_support_ids, draft_support_logprobs,
                 draft_temperature, has_draft_law},
                shapes, &params);
  set_filters(checks, {top_k, top_p, min_p}, {"top_k", "top_p", "min_p"}, shapes, &params.filters);
  set_draft_filters(checks, {draft_top_k, draft_top_p, draft_min_p}, draft_thresholds, shapes, &params);
  params.joint_filters = joint_filters;
  set_seeds(checks, seeds, positions, shapes, "[num_drafts]", &params);
  checks.require(!seeds || !uniforms, "seeds and uniforms must be at most one, got both");
  if (uniforms) {
    set_uniforms(checks, *uniforms, "uniforms", "[num_drafts]", params.batch, &params.final_uniforms);
    if constexpr (Backend::kValuesOnHost)
      require_uniforms(checks, params.final_uniforms, "uniforms", params.batch);
  }
  if (Backend::kValuesOnHost && !seeds && !uniforms) {
    require_greedy(checks, params,
                   "seeds and positions, or uniforms, must be given unless every row is greedy");
  }

  Tensor token_ids = empty_beside(draft_token_ids, {params.batch}, dtype_of(draft_token_ids));
  Tensor status = empty_beside(draft_token_ids, {params.batch}, ScalarType::Int);
  params.token_ids = token_ids.mutable_data_ptr();
  params.token_ids_are_int64 = dtype_of(draft_token_ids) == ScalarType::Long;
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  if (params.batch > 0) Backend::run(checks, params, target_logits);
  return {std::move(token_ids), std::move(status)};
}

}  // namespace specdec_ops

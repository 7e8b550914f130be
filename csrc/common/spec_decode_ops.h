#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/draft_counts_checks.h"
#include "common/recovered_probs_params.h"
#include "common/spec_decode_utils.h"
#include "common/tensor_views.h"

/// The ops between probabilities or argmaxes and what a step emits. A Backend says whether the values in
/// tensors can be read here (kValuesOnHost), names the checks of an op (checks), calls a body for each
/// request (for_each_request), and draws recovered tokens (sample_recovered_probs).
namespace specdec_ops {

/// Buffers of a runner are longer than the batch: what lies beyond it is left alone.
inline void at_least(const Checks& checks, const Tensor& tensor, const char* name, const char* shape,
                     int64_t size) {
  checks.require(tensor.dim() == 1 && tensor.size(0) >= size, name, " must be ", shape, " with at least ",
                 size, size == 1 ? " element" : " elements", ", got ", shape_of(tensor));
}

inline IntView int_vector(const Checks& checks, const Tensor& tensor, const char* name, const char* shape,
                          int64_t size) {
  checks.integer(tensor, name);
  at_least(checks, tensor, name, shape, size);
  return int_view(tensor);
}

inline MutableIntView mutable_int_vector(const Checks& checks, const Tensor& tensor, const char* name,
                                         const char* shape, int64_t size) {
  checks.integer(tensor, name);
  at_least(checks, tensor, name, shape, size);
  return mutable_int_view(tensor);
}

inline RealView real_vector(const Checks& checks, const Tensor& tensor, const char* name, const char* shape,
                            int64_t size) {
  checks.real(tensor, name);
  at_least(checks, tensor, name, shape, size);
  return real_view(tensor);
}

inline BoolView bool_vector(const Checks& checks, const Tensor& tensor, const char* name, const char* shape,
                            int64_t size) {
  checks.boolean(tensor, name);
  at_least(checks, tensor, name, shape, size);
  return bool_view(tensor);
}

inline FloatRowsView float_rows(const Checks& checks, const Tensor& tensor, const char* name,
                                const char* shape, int64_t num_rows) {
  checks.same_device(tensor, name);
  FloatRowsView view;
  switch (dtype_of(tensor)) {
    case ScalarType::Double:
      view.dtype = FloatType::kFloat64;
      break;
    case ScalarType::Float:
      view.dtype = FloatType::kFloat32;
      break;
    case ScalarType::BFloat16:
      view.dtype = FloatType::kBFloat16;
      break;
    case ScalarType::Half:
      view.dtype = FloatType::kFloat16;
      break;
    default:
      checks.require(false, name, " must be float64, float32, bfloat16 or float16, got ",
                     name_of(dtype_of(tensor)));
  }
  checks.require(tensor.dim() == 2 && tensor.size(0) >= num_rows, name, " must be ", shape, " with at least ",
                 num_rows, num_rows == 1 ? " row" : " rows", ", got ", shape_of(tensor));
  view.data = tensor.const_data_ptr();
  view.row_stride = tensor.stride(0);
  view.stride = tensor.stride(1);
  return view;
}

inline void contiguous_rows(const Checks& checks, const Tensor& tensor, const char* name) {
  checks.require(tensor.size(1) <= 1 || tensor.size(0) == 0 || tensor.stride(1) == 1, name,
                 " must have a contiguous last dimension, got stride ", tensor.stride(1));
}

/// Of [batch] or [batch, 1], either way the ids of the batch in a row.
inline IntView bonus_view(const Checks& checks, const Tensor& bonus_token_ids) {
  checks.integer(bonus_token_ids, "bonus_token_ids");
  const int64_t dims = bonus_token_ids.dim();
  checks.require(dims == 1 || (dims == 2 && bonus_token_ids.size(1) == 1),
                 "bonus_token_ids must be [batch] or [batch, 1], got ", shape_of(bonus_token_ids));
  IntView view = int_view(bonus_token_ids);
  view.stride = bonus_token_ids.stride(0);
  return view;
}

inline int64_t num_drafts_of(const Checks& checks, const Tensor& draft_token_ids) {
  checks.integer(draft_token_ids, "draft_token_ids");
  checks.require(draft_token_ids.dim() == 1, "draft_token_ids must be [num_drafts], got ",
                 shape_of(draft_token_ids));
  return draft_token_ids.size(0);
}

/// What the two ways to verify have in common: the rows written to, the counts, and accept_rates.
template <class Backend, class Verify>
void set_verified_rows(const Checks& checks, const Tensor& cu_num_draft_tokens, int64_t batch,
                       int64_t num_drafts, const OptionalTensor& is_greedy,
                       const OptionalTensor& accept_rates, const Tensor& token_ids, Verify* verify) {
  checks.integer(token_ids, "token_ids");
  checks.require(token_ids.dim() == 2 && token_ids.size(0) >= batch,
                 "token_ids must be [batch, k + 1] with at least ", batch, batch == 1 ? " row" : " rows",
                 ", got ", shape_of(token_ids));
  verify->token_ids = mutable_int_view(token_ids);
  verify->drafts = draft_counts(checks, cu_num_draft_tokens, batch, num_drafts);
  const int64_t largest =
      Backend::kValuesOnHost ? largest_draft_count(checks, cu_num_draft_tokens, verify->drafts, batch) : 0;
  checks.require(largest < token_ids.size(1) || batch == 0,
                 "token_ids must have a column for each draft of a request and one more, got ",
                 shape_of(token_ids), " for a request with ", largest, largest == 1 ? " draft" : " drafts");
  verify->max_num_drafts = token_ids.size(1) - 1;
  if (is_greedy) verify->is_greedy = bool_vector(checks, *is_greedy, "is_greedy", "[batch]", batch);
  if (accept_rates) {
    checks.real(*accept_rates, "accept_rates");
    checks.require(accept_rates->dim() == 1 && accept_rates->size(0) >= largest,
                   "accept_rates must be [k] with a rate for each draft of a request, got ",
                   shape_of(*accept_rates), " for a request with ", largest,
                   largest == 1 ? " draft" : " drafts");
    verify->accept_rates = real_view(*accept_rates);
    verify->max_num_drafts = std::min(verify->max_num_drafts, accept_rates->size(0));
  }
}

template <class Backend>
void verify_argmax_(const Tensor& target_argmax, const Tensor& draft_token_ids,
                    const Tensor& cu_num_draft_tokens, const Tensor& bonus_token_ids,
                    const OptionalTensor& is_greedy, const OptionalTensor& accept_rates,
                    const OptionalTensor& accept_uniforms, const Tensor& token_ids) {
  const Checks checks = Backend::checks("verify_argmax_", target_argmax);
  VerifyArgmax verify;
  const int64_t batch = bonus_token_ids.dim() > 0 ? bonus_token_ids.size(0) : 0;
  const int64_t num_drafts = num_drafts_of(checks, draft_token_ids);
  verify.draft_token_ids = int_view(draft_token_ids);
  verify.bonus_token_ids = bonus_view(checks, bonus_token_ids);
  verify.target_argmax = int_vector(checks, target_argmax, "target_argmax", "[num_drafts]", num_drafts);
  checks.require(!accept_rates || accept_uniforms,
                 "accept_uniforms must be given with accept_rates, got accept_rates alone");
  set_verified_rows<Backend>(checks, cu_num_draft_tokens, batch, num_drafts, is_greedy, accept_rates,
                             token_ids, &verify);
  if (accept_rates) {
    verify.accept_uniforms =
        real_vector(checks, *accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts);
  } else if (accept_uniforms) {
    checks.same_device(*accept_uniforms, "accept_uniforms");
  }
  Backend::for_each_request(checks, target_argmax, batch, verify);
}

template <class Backend>
void verify_probs_(const Tensor& target_probs, const Tensor& draft_token_ids,
                   const Tensor& cu_num_draft_tokens, const Tensor& recovered_token_ids,
                   const Tensor& bonus_token_ids, const Tensor& accept_uniforms,
                   const OptionalTensor& draft_probs, const OptionalTensor& is_greedy,
                   const OptionalTensor& accept_rates, std::optional<int64_t> vocab_size,
                   const Tensor& token_ids) {
  const Checks checks = Backend::checks("verify_probs_", target_probs);
  VerifyProbs verify;
  const int64_t batch = bonus_token_ids.dim() > 0 ? bonus_token_ids.size(0) : 0;
  const int64_t num_drafts = num_drafts_of(checks, draft_token_ids);
  verify.draft_token_ids = int_view(draft_token_ids);
  verify.bonus_token_ids = bonus_view(checks, bonus_token_ids);
  verify.target_probs = float_rows(checks, target_probs, "target_probs", "[num_drafts, width]", num_drafts);
  verify.vocab_size = checks.vocab_size(vocab_size, target_probs, "target_probs");
  if (draft_probs) {
    verify.draft_probs = float_rows(checks, *draft_probs, "draft_probs", "[num_drafts, width]", num_drafts);
    checks.require(draft_probs->size(1) >= verify.vocab_size,
                   "draft_probs must have at least vocab_size = ", verify.vocab_size, " columns, got ",
                   draft_probs->size(1));
  }
  verify.recovered_token_ids =
      int_vector(checks, recovered_token_ids, "recovered_token_ids", "[num_drafts]", num_drafts);
  verify.accept_uniforms =
      real_vector(checks, accept_uniforms, "accept_uniforms", "[num_drafts]", num_drafts);
  set_verified_rows<Backend>(checks, cu_num_draft_tokens, batch, num_drafts, is_greedy, accept_rates,
                             token_ids, &verify);
  Backend::for_each_request(checks, target_probs, batch, verify);
}

template <class Backend>
void sample_recovered_probs_(const Tensor& target_probs, const Tensor& draft_token_ids,
                             const Tensor& cu_num_draft_tokens, const Tensor& inverse_noise,
                             const OptionalTensor& draft_probs, std::optional<int64_t> vocab_size,
                             const Tensor& token_ids) {
  const Checks checks = Backend::checks("sample_recovered_probs_", target_probs);
  RecoveredProbsParams params;
  const int64_t num_drafts = num_drafts_of(checks, draft_token_ids);
  params.draft_token_ids = int_view(draft_token_ids);
  params.target_probs = float_rows(checks, target_probs, "target_probs", "[num_drafts, width]", num_drafts);
  contiguous_rows(checks, target_probs, "target_probs");
  params.vocab_size = checks.vocab_size(vocab_size, target_probs, "target_probs");
  const auto wide_enough = [&](const Tensor& tensor, const char* name) {
    checks.require(tensor.size(1) >= params.vocab_size, name,
                   " must have at least vocab_size = ", params.vocab_size, " columns, got ", tensor.size(1));
    contiguous_rows(checks, tensor, name);
  };
  checks.real(inverse_noise, "inverse_noise");
  params.inverse_noise = float_rows(checks, inverse_noise, "inverse_noise", "[batch, width]", 0);
  wide_enough(inverse_noise, "inverse_noise");
  params.batch = inverse_noise.size(0);
  if (draft_probs) {
    params.draft_probs = float_rows(checks, *draft_probs, "draft_probs", "[num_drafts, width]", num_drafts);
    wide_enough(*draft_probs, "draft_probs");
  }
  params.drafts = draft_counts(checks, cu_num_draft_tokens, params.batch, num_drafts);
  if constexpr (Backend::kValuesOnHost) {
    largest_draft_count(checks, cu_num_draft_tokens, params.drafts, params.batch);
  }
  params.token_ids = mutable_int_vector(checks, token_ids, "token_ids", "[num_drafts]", num_drafts);
  if (num_drafts > 0) Backend::sample_recovered_probs(checks, params, target_probs);
}

/// A number as a T, which must hold it where T is an integer or bool.
template <class T>
T number_as(const Checks& checks, const Tensor& values, double number, const char* name) {
  if constexpr (std::is_integral_v<T>) {
    // 2^63 is the first float64 that int64 does not hold.
    const bool fits = std::is_same_v<T, bool> ? number == 0.0 || number == 1.0
                      : sizeof(T) == 4        ? number >= -0x1p31 && number < 0x1p31
                                              : number >= -0x1p63 && number < 0x1p63;
    checks.require(fits && number == static_cast<double>(static_cast<int64_t>(number)), name,
                   " must be a number that ", name_of(dtype_of(values)), " holds, got ", number);
    return static_cast<T>(number);
  } else if constexpr (std::is_same_v<T, double>) {
    return number;
  } else {
    return static_cast<T>(static_cast<float>(number));
  }
}

template <class Backend, class T>
void expand_values(const Checks& checks, const Tensor& values, const DraftCounts& drafts,
                   std::optional<double> replace_from, std::optional<double> replace_to,
                   const Tensor& expanded) {
  ExpandToDrafts<T> expand;
  expand.drafts = drafts;
  expand.values = static_cast<const T*>(values.const_data_ptr());
  expand.values_stride = values.stride(0);
  if (replace_from) {
    expand.replaces = true;
    expand.replace_from = number_as<T>(checks, values, *replace_from, "replace_from");
    expand.replace_to = number_as<T>(checks, values, *replace_to, "replace_to");
  }
  expand.expanded = static_cast<T*>(expanded.mutable_data_ptr());
  expand.expanded_stride = expanded.stride(0);
  Backend::for_each_request(checks, values, values.size(0), expand);
}

template <class Backend>
void expand_to_drafts_(const Tensor& values, const Tensor& cu_num_draft_tokens,
                       std::optional<double> replace_from, std::optional<double> replace_to,
                       const Tensor& expanded) {
  const Checks checks = Backend::checks("expand_to_drafts_", values);
  checks.same_device(values, "values");
  checks.same_device(expanded, "expanded");
  checks.require(values.dim() == 1, "values must be [batch], got ", shape_of(values));
  checks.require(expanded.dim() == 1, "expanded must be [num_drafts], got ", shape_of(expanded));
  checks.require(dtype_of(expanded) == dtype_of(values), "expanded must be ", name_of(dtype_of(values)),
                 " like values, got ", name_of(dtype_of(expanded)));
  checks.require(replace_from.has_value() == replace_to.has_value(),
                 "replace_from and replace_to must be given together, got one");
  const DraftCounts drafts = draft_counts(checks, cu_num_draft_tokens, values.size(0), expanded.size(0));
  if constexpr (Backend::kValuesOnHost) {
    largest_draft_count(checks, cu_num_draft_tokens, drafts, values.size(0));
  }
  const auto expand = [&](auto* expand_values_of_dtype) {
    expand_values_of_dtype(checks, values, drafts, replace_from, replace_to, expanded);
  };
  switch (dtype_of(values)) {
    case ScalarType::Double:
      return expand(expand_values<Backend, double>);
    case ScalarType::Float:
      return expand(expand_values<Backend, float>);
    case ScalarType::BFloat16:
      return expand(expand_values<Backend, torch::headeronly::BFloat16>);
    case ScalarType::Half:
      return expand(expand_values<Backend, torch::headeronly::Half>);
    case ScalarType::Long:
      return expand(expand_values<Backend, int64_t>);
    case ScalarType::Int:
      return expand(expand_values<Backend, int32_t>);
    case ScalarType::Bool:
      return expand(expand_values<Backend, bool>);
    default:
      checks.require(false, "values must be float64, float32, bfloat16, float16, int64, int32 or bool, got ",
                     name_of(dtype_of(values)));
  }
}

template <class Backend>
void prepare_padded_draft_inputs_(const Tensor& cu_num_draft_tokens, const Tensor& num_sampled,
                                  const Tensor& query_start_loc, const Tensor& token_indices,
                                  const Tensor& num_rejected) {
  const Checks checks = Backend::checks("prepare_padded_draft_inputs_", cu_num_draft_tokens);
  PreparePaddedDraftInputs prepare;
  checks.require(token_indices.dim() == 1, "token_indices must be [batch], got ", shape_of(token_indices));
  const int64_t batch = token_indices.size(0);
  prepare.token_indices = mutable_int_vector(checks, token_indices, "token_indices", "[batch]", batch);
  prepare.num_rejected = mutable_int_vector(checks, num_rejected, "num_rejected", "[batch]", batch);
  prepare.num_sampled = int_vector(checks, num_sampled, "num_sampled", "[batch]", batch);
  prepare.query_start_loc = int_vector(checks, query_start_loc, "query_start_loc", "[batch + 1]", batch + 1);
  prepare.drafts = draft_counts(checks, cu_num_draft_tokens, batch, INT64_MAX);
  if constexpr (Backend::kValuesOnHost) {
    largest_draft_count(checks, cu_num_draft_tokens, prepare.drafts, batch);
  }
  Backend::for_each_request(checks, cu_num_draft_tokens, batch, prepare);
}

template <class Backend>
void prepare_next_tokens_(const Tensor& token_ids, const Tensor& discard_request_mask,
                          const Tensor& backup_token_ids, int64_t vocab_size, const Tensor& next_token_ids,
                          const Tensor& num_sampled) {
  const Checks checks = Backend::checks("prepare_next_tokens_", token_ids);
  PrepareNextTokens prepare;
  checks.integer(token_ids, "token_ids");
  checks.require(token_ids.dim() == 2, "token_ids must be [batch, k + 1], got ", shape_of(token_ids));
  checks.require(vocab_size >= 1, "vocab_size must be at least 1, got ", vocab_size);
  const int64_t batch = token_ids.size(0);
  prepare.token_ids = int_view(token_ids);
  prepare.width = token_ids.size(1);
  prepare.vocab_size = vocab_size;
  prepare.discard_request_mask =
      bool_vector(checks, discard_request_mask, "discard_request_mask", "[batch]", batch);
  prepare.backup_token_ids = int_vector(checks, backup_token_ids, "backup_token_ids", "[batch]", batch);
  prepare.next_token_ids = mutable_int_vector(checks, next_token_ids, "next_token_ids", "[batch]", batch);
  prepare.num_sampled = mutable_int_vector(checks, num_sampled, "num_sampled", "[batch]", batch);
  Backend::for_each_request(checks, token_ids, batch, prepare);
}

template <class Backend>
std::tuple<Tensor, Tensor> count_accepted(const Tensor& token_ids, std::optional<int64_t> vocab_size) {
  const Checks checks = Backend::checks("count_accepted", token_ids);
  checks.integer(token_ids, "token_ids");
  checks.require(token_ids.dim() == 2, "token_ids must be [batch, k + 1], got ", shape_of(token_ids));
  checks.require(vocab_size.value_or(1) >= 1, "vocab_size must be at least 1, got ", vocab_size.value_or(1));
  const int64_t batch = token_ids.size(0);
  Tensor num_accepted = empty_beside(token_ids, {batch}, ScalarType::Int);
  Tensor num_emitted = empty_beside(token_ids, {batch}, ScalarType::Int);
  CountAccepted count;
  count.token_ids = int_view(token_ids);
  count.width = token_ids.size(1);
  count.vocab_size = vocab_size.value_or(INT64_MAX);
  count.num_accepted = static_cast<int32_t*>(num_accepted.mutable_data_ptr());
  count.num_emitted = static_cast<int32_t*>(num_emitted.mutable_data_ptr());
  Backend::for_each_request(checks, token_ids, batch, count);
  return {std::move(num_accepted), std::move(num_emitted)};
}

}  // namespace specdec_ops

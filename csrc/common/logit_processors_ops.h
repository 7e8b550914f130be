#pragma once

#include <optional>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/draft_counts_checks.h"
#include "common/logit_processors.h"
#include "common/numerics.h"
#include "common/tensor_views.h"

/// A Backend says whether the values in tensors can be read here (kValuesOnHost), names the checks of the op
/// (checks), and changes the rows (apply_logit_processors).
namespace specdec_ops {

inline IdLists id_lists(const Checks& checks, const OptionalTensor& lists, const char* name, int64_t batch) {
  if (!lists) return {};
  checks.integer(*lists, name);
  checks.require(lists->dim() == 2 && lists->size(0) == batch, name, " must be [batch, n] with ", batch,
                 batch == 1 ? " row" : " rows", ", got ", shape_of(*lists));
  return {int_view(*lists), lists->size(1)};
}

inline IntView ints_of_requests(const Checks& checks, const Tensor& values, const char* name, int64_t batch) {
  checks.integer(values, name);
  checks.vector(values, name, "[batch]", batch);
  return int_view(values);
}

/// Of lengths in host memory.
inline void require_lengths(const Checks& checks, const IntView& lens, const char* name, int64_t batch,
                            int64_t width) {
  for (int64_t r = 0; r < batch; ++r) {
    checks.require(at(lens, r) >= 0 && at(lens, r) <= width, name, " must be in [0, ", width, "], got ",
                   at(lens, r), " for request ", r);
  }
}

/// A penalty of each request, which in host memory must be finite, and above 0 where `is_positive`.
template <class Backend>
RealView penalty_of_requests(const Checks& checks, const Tensor& values, const char* name, int64_t batch,
                             bool is_positive) {
  checks.dtype(values, name, {ScalarType::Float}, "float32");
  checks.vector(values, name, "[batch]", batch);
  const RealView view = real_view(values);
  for (int64_t r = 0; Backend::kValuesOnHost && r < batch; ++r) {
    const double value = at(view, r);
    checks.require(is_finite(value) && (!is_positive || value > 0.0), name, " must be ",
                   is_positive ? "positive and finite" : "finite", ", got ", value, " for request ", r);
  }
  return view;
}

template <class Backend>
void apply_logit_processors_(const Tensor& logits, const OptionalTensor& draft_token_ids,
                             const OptionalTensor& cu_num_draft_tokens, const OptionalTensor& logit_bias_ids,
                             const OptionalTensor& logit_bias, const OptionalTensor& repetition_penalty,
                             const OptionalTensor& frequency_penalty, const OptionalTensor& presence_penalty,
                             const OptionalTensor& prompt_token_ids, const OptionalTensor& prompt_lens,
                             const OptionalTensor& output_token_ids, const OptionalTensor& output_lens,
                             const OptionalTensor& bad_words, int64_t bad_word_width,
                             const OptionalTensor& min_tokens, const OptionalTensor& stop_token_ids,
                             const OptionalTensor& allowed_token_ids, const OptionalTensor& grammar_bitmask,
                             std::optional<int64_t> vocab_size) {
  const Checks checks = Backend::checks("apply_logit_processors_", logits);
  LogitProcessors apply;
  checks.row_dtype(logits, "logits");
  checks.require(logits.dim() == 2, "logits must be [num_drafts + batch, width], got ", shape_of(logits));
  checks.contiguous_rows(logits, "logits");
  apply.num_rows = apply.batch = logits.size(0);
  const RowsView rows = rows_view(logits);
  apply.logits = logits.mutable_data_ptr();
  apply.logits_stride = rows.stride;
  apply.dtype = rows.dtype;
  apply.vocab_size = checks.vocab_size(vocab_size, logits, "logits");

  checks.require(draft_token_ids.has_value() == cu_num_draft_tokens.has_value(),
                 "draft_token_ids and cu_num_draft_tokens must be given together, got one");
  if (draft_token_ids) {
    checks.integer(*draft_token_ids, "draft_token_ids");
    checks.require(draft_token_ids->dim() == 1 && draft_token_ids->size(0) <= apply.num_rows,
                   "draft_token_ids must be [num_drafts] with at most ", apply.num_rows,
                   apply.num_rows == 1 ? " element" : " elements", ", got ", shape_of(*draft_token_ids));
    const int64_t num_drafts = draft_token_ids->size(0);
    apply.batch = apply.num_rows - num_drafts;
    apply.draft_token_ids = int_view(*draft_token_ids);
    apply.drafts = draft_counts(checks, *cu_num_draft_tokens, apply.batch, num_drafts);
    if constexpr (Backend::kValuesOnHost) {
      largest_draft_count(checks, *cu_num_draft_tokens, apply.drafts, apply.batch);
    }
  }
  const int64_t batch = apply.batch;

  checks.require(logit_bias_ids.has_value() == logit_bias.has_value(),
                 "logit_bias_ids and logit_bias must be given together, got one");
  apply.bias_ids = id_lists(checks, logit_bias_ids, "logit_bias_ids", batch);
  if (logit_bias) {
    checks.dtype(*logit_bias, "logit_bias", {ScalarType::Float}, "float32");
    checks.require(same_shape(*logit_bias, *logit_bias_ids),
                   "logit_bias must have the shape of logit_bias_ids, ", shape_of(*logit_bias_ids), ", got ",
                   shape_of(*logit_bias));
    apply.bias = real_view(*logit_bias);
  }

  checks.require(prompt_token_ids.has_value() == prompt_lens.has_value(),
                 "prompt_token_ids and prompt_lens must be given together, got one");
  checks.require(!output_token_ids || output_lens,
                 "output_lens must be given with output_token_ids, got output_token_ids alone");
  const auto set_tokens = [&](const OptionalTensor& ids, const char* name, const OptionalTensor& lens,
                              const char* lens_name, TokenLists* tokens) {
    if (lens) tokens->lens = ints_of_requests(checks, *lens, lens_name, batch);
    if (!ids) return;
    const IdLists lists = id_lists(checks, ids, name, batch);
    tokens->ids = lists.ids;
    tokens->width = lists.width;
    if constexpr (Backend::kValuesOnHost)
      require_lengths(checks, tokens->lens, lens_name, batch, lists.width);
  };
  set_tokens(prompt_token_ids, "prompt_token_ids", prompt_lens, "prompt_lens", &apply.prompt);
  set_tokens(output_token_ids, "output_token_ids", output_lens, "output_lens", &apply.output);
  apply.output_lens = apply.output.lens;

  apply.has_penalties = repetition_penalty.has_value();
  checks.require(
      repetition_penalty.has_value() == frequency_penalty.has_value() &&
          repetition_penalty.has_value() == presence_penalty.has_value(),
      "repetition_penalty, frequency_penalty and presence_penalty must be given together, got some");
  if (repetition_penalty) {
    apply.repetition_penalty =
        penalty_of_requests<Backend>(checks, *repetition_penalty, "repetition_penalty", batch, true);
    apply.frequency_penalty =
        penalty_of_requests<Backend>(checks, *frequency_penalty, "frequency_penalty", batch, false);
    apply.presence_penalty =
        penalty_of_requests<Backend>(checks, *presence_penalty, "presence_penalty", batch, false);
  }

  checks.require(min_tokens.has_value() == stop_token_ids.has_value(),
                 "min_tokens and stop_token_ids must be given together, got one");
  checks.require(!min_tokens || output_lens,
                 "output_lens must be given with min_tokens, got min_tokens alone");
  apply.stops = id_lists(checks, stop_token_ids, "stop_token_ids", batch);
  if (min_tokens) apply.min_tokens = ints_of_requests(checks, *min_tokens, "min_tokens", batch);
  apply.allowed = id_lists(checks, allowed_token_ids, "allowed_token_ids", batch);

  if (bad_words) {
    const IdLists words = id_lists(checks, bad_words, "bad_words", batch);
    checks.require(bad_word_width >= 1 && words.width % bad_word_width == 0,
                   "bad_words must have rows of whole words of ", bad_word_width, ", got ",
                   shape_of(*bad_words));
    apply.bad_words = words.ids;
    apply.bad_word_width = bad_word_width;
    apply.num_bad_words = words.width / bad_word_width;
  }
  if (grammar_bitmask) {
    checks.dtype(*grammar_bitmask, "grammar_bitmask", {ScalarType::Int}, "int32");
    checks.require(grammar_bitmask->dim() == 2 && grammar_bitmask->size(0) == apply.num_rows &&
                       grammar_bitmask->size(1) >= apply.num_words(),
                   "grammar_bitmask must be [num_drafts + batch, words] with ", apply.num_rows,
                   apply.num_rows == 1 ? " row" : " rows", " of at least ", apply.num_words(),
                   apply.num_words() == 1 ? " word" : " words", ", got ", shape_of(*grammar_bitmask));
    apply.grammar_bitmask = static_cast<const int32_t*>(grammar_bitmask->const_data_ptr());
    apply.grammar_row_stride = grammar_bitmask->stride(0);
    apply.grammar_stride = grammar_bitmask->stride(1);
  }
  if (apply.num_rows > 0) Backend::apply_logit_processors(checks, apply, logits);
}

}  // namespace specdec_ops

#pragma once

#include <type_traits>

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/draft_vocabulary.h"
#include "common/tensor_views.h"

/// A Backend says whether the values in tensors can be read here (kValuesOnHost), names the checks of an op
/// (checks), maps ids (map_draft_tokens), and expands rows (expand_draft_logits).
namespace specdec_ops {

inline DraftVocabulary draft_vocabulary(const Checks& checks, const Tensor& d2t, bool offsets) {
  checks.integer(d2t, "d2t");
  checks.require(d2t.dim() == 1, "d2t must be [draft_vocab_size], got ", shape_of(d2t));
  checks.require(d2t.size(0) <= INT32_MAX, "d2t must have fewer than 2^31 elements, got ", d2t.size(0));
  return {int_view(d2t), d2t.size(0), offsets};
}

template <class Backend>
Tensor map_draft_tokens(const Tensor& draft_token_ids, const Tensor& d2t, bool offsets) {
  const Checks checks = Backend::checks("map_draft_tokens", draft_token_ids);
  MapDraftTokens map;
  checks.integer(draft_token_ids, "draft_token_ids");
  checks.require(draft_token_ids.dim() == 1, "draft_token_ids must be [num_ids], got ",
                 shape_of(draft_token_ids));
  map.draft_token_ids = int_view(draft_token_ids);
  map.num_ids = draft_token_ids.size(0);
  map.vocabulary = draft_vocabulary(checks, d2t, offsets);
  Tensor token_ids = empty_beside(draft_token_ids, {map.num_ids}, dtype_of(draft_token_ids));
  map.token_ids = mutable_int_view(token_ids);
  if (map.num_ids > 0) Backend::map_draft_tokens(checks, map, draft_token_ids);
  return token_ids;
}

/// Calls visit with a null pointer to the type of a row's elements.
template <class Visit>
auto visit_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(static_cast<torch::headeronly::BFloat16*>(nullptr));
    case DType::kFloat16:
      return visit(static_cast<torch::headeronly::Half*>(nullptr));
    default:
      return visit(static_cast<float*>(nullptr));
  }
}

template <class Backend>
void expand_draft_logits_(const Tensor& draft_logits, const Tensor& d2t, const Tensor& temperature,
                          bool offsets, const Tensor& expanded) {
  const Checks checks = Backend::checks("expand_draft_logits_", draft_logits);
  ExpandDraftLogits expand;
  checks.row_dtype(draft_logits, "draft_logits");
  checks.require(draft_logits.dim() == 2, "draft_logits must be [rows, draft_vocab_size], got ",
                 shape_of(draft_logits));
  checks.contiguous_rows(draft_logits, "draft_logits");
  expand.num_rows = draft_logits.size(0);
  expand.draft = rows_view(draft_logits);
  expand.vocabulary = draft_vocabulary(checks, d2t, offsets);
  checks.require(expand.vocabulary.size <= draft_logits.size(1),
                 "d2t must have at most one element for each column of draft_logits, ", draft_logits.size(1),
                 ", got ", expand.vocabulary.size);
  checks.rows(expanded, "expanded", "[rows, vocab_size]", expand.num_rows);
  expand.vocab_size = expanded.size(1);
  checks.require(expand.vocab_size <= INT32_MAX, "expanded must have fewer than 2^31 columns, got ",
                 expand.vocab_size);
  expand.expanded = expanded.mutable_data_ptr();
  expand.expanded_stride = expanded.stride(0);
  checks.dtype(temperature, "temperature", {ScalarType::Float}, "float32");
  checks.vector(temperature, "temperature", "[rows]", expand.num_rows);
  expand.temperature = real_view(temperature);
  for (int64_t id = 0; Backend::kValuesOnHost && id < expand.vocabulary.size; ++id) {
    const int64_t target = at(expand.vocabulary.targets, id) + (offsets ? id : 0);
    checks.require(target >= 0 && target < expand.vocab_size, "d2t must lead into [0, ", expand.vocab_size,
                   "), got ", target, " for draft id ", id);
  }
  if (expand.num_rows > 0 && expand.vocab_size > 0) {
    Backend::expand_draft_logits(checks, expand, rows_view(expanded).dtype, draft_logits);
  }
}

}  // namespace specdec_ops

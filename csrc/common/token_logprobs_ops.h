#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/draft_counts_checks.h"
#include "common/tensor_views.h"
#include "common/token_logprobs.h"

/// A Backend says whether the values in tensors can be read here (kValuesOnHost), names the checks of the op
/// (checks), and reads the rows (token_logprobs).
namespace specdec_ops {

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>> token_logprobs(
    const Tensor& logits, const Tensor& token_ids, const Tensor& temperature, int64_t top_n,
    const OptionalTensor& cu_num_draft_tokens, std::optional<int64_t> vocab_size) {
  const Checks checks = Backend::checks("token_logprobs", logits);
  TokenLogprobsParams params;
  checks.integer(token_ids, "token_ids");
  params.token_ids = int_view(token_ids);
  if (cu_num_draft_tokens) {
    checks.require(token_ids.dim() == 2, "token_ids must be [batch, k + 1] with cu_num_draft_tokens, got ",
                   shape_of(token_ids));
    params.is_verified = true;
    params.batch = token_ids.size(0);
    params.width = token_ids.size(1);
    checks.require(logits.dim() == 2 && logits.size(0) >= params.batch,
                   "logits must be [num_drafts + batch, width] with at least ", params.batch,
                   params.batch == 1 ? " row" : " rows", ", got ", shape_of(logits));
    params.num_rows = logits.size(0);
    const int64_t num_drafts = params.num_rows - params.batch;
    params.drafts = draft_counts(checks, *cu_num_draft_tokens, params.batch, num_drafts);
    if constexpr (Backend::kValuesOnHost) {
      const int64_t largest = largest_draft_count(checks, *cu_num_draft_tokens, params.drafts, params.batch);
      checks.require(params.batch == 0 || largest < params.width,
                     "token_ids must have a column for each draft of a request and one more, got ",
                     shape_of(token_ids), " for a request with ", largest,
                     largest == 1 ? " draft" : " drafts");
    }
  } else {
    checks.require(token_ids.dim() == 1, "token_ids must be [rows], got ", shape_of(token_ids));
    params.num_rows = token_ids.size(0);
  }
  checks.rows(logits, "logits", params.is_verified ? "[num_drafts + batch, width]" : "[rows, width]",
              params.num_rows);
  params.logits = rows_view(logits);
  params.vocab_size = checks.vocab_size(vocab_size, logits, "logits");
  const int64_t num_entries = params.is_verified ? params.batch : params.num_rows;
  checks.dtype(temperature, "temperature", {ScalarType::Float}, "float32");
  checks.vector(temperature, "temperature", params.is_verified ? "[batch]" : "[rows]", num_entries);
  params.temperature = real_view(temperature);
  checks.require(top_n >= 0 && top_n <= kMaxTopN, "top_n must be in [0, ", kMaxTopN, "], got ", top_n);
  checks.require(top_n <= params.vocab_size, "top_n must be at most vocab_size = ", params.vocab_size,
                 ", got ", top_n);
  params.top_n = static_cast<int>(top_n);

  Tensor ids = empty_beside(logits, {params.num_rows, 1 + top_n}, dtype_of(token_ids));
  Tensor logprobs = empty_beside(logits, {params.num_rows, 1 + top_n}, ScalarType::Float);
  Tensor ranks = empty_beside(logits, {params.num_rows}, ScalarType::Long);
  Tensor status = empty_beside(logits, {params.num_rows}, ScalarType::Int);
  params.out_token_ids = mutable_int_view(ids);
  params.logprobs = static_cast<float*>(logprobs.mutable_data_ptr());
  params.ranks = static_cast<int64_t*>(ranks.mutable_data_ptr());
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  std::vector<Tensor> totals;
  if (params.is_verified) {
    totals.push_back(empty_beside(logits, {params.batch + 1}, ScalarType::Int));
    params.cu_num_tokens = static_cast<int32_t*>(totals[0].mutable_data_ptr());
  }
  if (params.num_rows > 0 || params.is_verified) Backend::token_logprobs(checks, params, logits);
  return {std::move(ids), std::move(logprobs), std::move(ranks), std::move(status), std::move(totals)};
}

}  // namespace specdec_ops

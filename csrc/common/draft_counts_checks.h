#pragma once

#include "common/checks.h"
#include "common/draft_counts.h"
#include "common/tensor_views.h"

namespace specdec_ops {

/// Reads nothing: the length of `cu_num_draft_tokens` tells which of its two forms it has.
inline DraftCounts draft_counts(const Checks& checks, const Tensor& cu_num_draft_tokens, int64_t batch,
                                int64_t num_drafts) {
  checks.integer(cu_num_draft_tokens, "cu_num_draft_tokens");
  const int64_t size = cu_num_draft_tokens.dim() == 1 ? cu_num_draft_tokens.size(0) : -1;
  checks.require(size == batch || size == batch + 1,
                 "cu_num_draft_tokens must be [batch + 1] or [batch] with ", batch,
                 batch == 1 ? " request" : " requests", ", got ", shape_of(cu_num_draft_tokens));
  IntView ends = int_view(cu_num_draft_tokens);
  if (size == batch + 1) {
    const int64_t item_size = ends.is_int64 ? 8 : 4;
    ends.data = static_cast<const char*>(ends.data) + ends.stride * item_size;
  }
  return {ends, num_drafts};
}

/// Checks the totals themselves, in host memory; returns the largest count, 0 for an empty batch.
inline int64_t largest_draft_count(const Checks& checks, const Tensor& cu_num_draft_tokens,
                                   const DraftCounts& counts, int64_t batch) {
  const bool has_zero = cu_num_draft_tokens.size(0) > batch;
  if (has_zero) {
    const int64_t first = at(int_view(cu_num_draft_tokens), 0);
    checks.require(first == 0, "cu_num_draft_tokens must start with 0, got ", first);
  }
  int64_t begin = 0, largest = 0;
  for (int64_t r = 0; r < batch; ++r) {
    const int64_t end = at(counts.ends, r);
    checks.require(end >= begin, "cu_num_draft_tokens must not decrease, got ", begin, " before ", end,
                   " at index ", r + has_zero);
    largest = end - begin > largest ? end - begin : largest;
    begin = end;
  }
  checks.require(begin <= counts.num_drafts,
                 "cu_num_draft_tokens must end with at most num_drafts = ", counts.num_drafts, ", got ",
                 begin);
  return largest;
}

}  // namespace specdec_ops

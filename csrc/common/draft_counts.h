#pragma once

#include "common/spans.h"
#include "common/views.h"

namespace specdec_ops {

/// Where each request's drafts lie among those of the batch, made from cu_num_draft_tokens in either
/// of its forms: [batch + 1] that starts with 0, or [batch] without the 0.
struct DraftCounts {
  /// One past the last draft of each request.
  IntView ends;
  /// Drafts of the batch: no totals lead past them.
  int64_t num_drafts = 0;

  SPECDEC_HOST_DEVICE Span of(int64_t request) const {
    const int64_t begin = request == 0 ? 0 : clamped(at(ends, request - 1), 0, num_drafts);
    return {begin, clamped(at(ends, request), begin, num_drafts)};
  }
};

}  // namespace specdec_ops

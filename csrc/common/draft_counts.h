#pragma once

#include "common/views.h"

namespace specdec_ops {

/// Where each request's drafts lie among those of the batch, made from cu_num_draft_tokens in either
/// of its forms: [batch + 1] that starts with 0, or [batch] without the 0.
struct DraftCounts {
  /// One past the last draft of each request.
  IntView ends;

  SPECDEC_HOST_DEVICE int64_t begin(int64_t request) const {
    return request == 0 ? 0 : at(ends, request - 1);
  }
  SPECDEC_HOST_DEVICE int64_t end(int64_t request) const { return at(ends, request); }
};

}  // namespace specdec_ops

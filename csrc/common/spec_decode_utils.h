#pragma once

#include "common/views.h"

/// The bookkeeping ops of one request. On the CPU a call has one lane; on a GPU the threads of a
/// block are the lanes, and what a lane does depends on nothing that another one wrote.
namespace specdec_ops {

/// Emitted and accepted tokens of a verified row.
struct CountAccepted {
  IntView token_ids;
  int64_t width = 0;
  int64_t vocab_size = INT64_MAX;
  int32_t* num_accepted = nullptr;
  int32_t* num_emitted = nullptr;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    if (lane != 0) return;
    int32_t count = 0;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t id = at(token_ids, request, i);
      count += id >= 0 && id < vocab_size;
    }
    num_emitted[request] = count;
    num_accepted[request] = count > 0 ? count - 1 : 0;
  }
};

}  // namespace specdec_ops

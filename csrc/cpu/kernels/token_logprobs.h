#pragma once

#include "common/token_logprobs.h"

namespace specdec_ops::cpu {

/// Rows that repay waking another thread.
int64_t token_logprobs_grain(const TokenLogprobsParams& params);
/// Writes rows [begin, end) of the outputs, which are about tokens[begin, end).
void run_token_logprobs(const TokenLogprobsParams& params, const TokenRow* tokens, int64_t begin,
                        int64_t end);

}  // namespace specdec_ops::cpu

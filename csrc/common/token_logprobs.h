#pragma once

#include <cstdint>
#include <cstring>

#include "common/draft_counts.h"
#include "common/row_law.h"
#include "common/views.h"

/// Log-probabilities of given tokens, their ranks, and the likeliest ids beside them.
namespace specdec_ops {

/// The most ids that may be listed for a row: two a lane of a warp.
constexpr int kMaxTopN = 64;

struct TokenLogprobsParams {
  /// Of the outputs.
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  RowsView logits;
  /// [num_rows], or with `drafts` [batch, width].
  IntView token_ids;
  RealView temperature;
  int top_n = 0;

  // Of tokens as verification emits them:
  bool is_verified = false;
  int64_t batch = 0;
  int64_t width = 0;
  DraftCounts drafts;
  int32_t* cu_num_tokens = nullptr;

  /// [num_rows, 1 + top_n], contiguous, as the next.
  MutableIntView out_token_ids;
  float* logprobs = nullptr;
  int64_t* ranks = nullptr;
  int32_t* status = nullptr;

  SPECDEC_HOST_DEVICE int num_blocks() const {
    return static_cast<int>((vocab_size + kBlockSize - 1) / kBlockSize);
  }
  SPECDEC_HOST_DEVICE int block_length(int block) const {
    const int64_t rest = vocab_size - static_cast<int64_t>(block) * kBlockSize;
    return rest < kBlockSize ? static_cast<int>(rest) : kBlockSize;
  }
  /// How many tokens a request emitted: those before the first that is none.
  SPECDEC_HOST_DEVICE int64_t num_emitted(int64_t request) const {
    const int64_t room = drafts.of(request).size() + 1;
    int64_t count = 0;
    while (count < room && count < width && at(token_ids, request, count) >= 0) ++count;
    return count;
  }
};

/// What a row of the outputs is about.
struct TokenRow {
  /// -1: nothing.
  int64_t logits_row;
  int64_t token;
  /// Whose temperature it has.
  int64_t entry;
};

/// The token in a slot of a request.
SPECDEC_HOST_DEVICE TokenRow emitted_token(const TokenLogprobsParams& params, int64_t request, int64_t slot) {
  return {params.drafts.of(request).begin + request + slot, at(params.token_ids, request, slot), request};
}

SPECDEC_HOST_DEVICE TokenRow given_token(const TokenLogprobsParams& params, int64_t row) {
  const int64_t token = at(params.token_ids, row);
  return {token == -1 ? -1 : row, token, row};
}

/// An id of a row as a number that is the larger the earlier the id is listed: by falling logit, NaN last,
/// and lower ids first. No two ids have the same, none has 0.
SPECDEC_HOST_DEVICE uint64_t listing_key(float logit, int64_t id) {
  uint32_t bits;
  // Adding 0 makes -0 a 0.
  const float value = logit + 0.0f;
  memcpy(&bits, &value, sizeof bits);
  bits = logit != logit ? 0 : (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(bits) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}
SPECDEC_HOST_DEVICE int64_t id_of_key(uint64_t key) {
  return static_cast<int64_t>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}
/// NaN of a key that was made of one.
SPECDEC_HOST_DEVICE float logit_of_key(uint64_t key) {
  const auto high = static_cast<uint32_t>(key >> 32);
  if (high == 0) return __builtin_nanf("");
  const uint32_t bits = (high & 0x80000000u) != 0 ? high & 0x7FFFFFFFu : ~high;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/// Writes column `column` of a row of the outputs.
SPECDEC_HOST_DEVICE void write_token(const TokenLogprobsParams& params, int64_t row, int64_t column,
                                     int64_t id, const RowLaw& law, float logit) {
  put(params.out_token_ids, row, column, id);
  params.logprobs[row * (1 + params.top_n) + column] =
      law.usable() ? static_cast<float>(law.log2_prob(logit) * kLn2) : __builtin_nanf("");
}

/// Writes what is known of the row's own token. `logit` is NaN where the token is no id.
SPECDEC_HOST_DEVICE void write_own_token(const TokenLogprobsParams& params, int64_t row,
                                         const TokenRow& token, const RowLaw& law, float logit,
                                         int64_t rank) {
  write_token(params, row, 0, token.token, law, logit);
  params.ranks[row] = rank;
  Status status = Status::kOk;
  if (law.logsumexp != law.logsumexp) {
    status = Status::kNonFiniteTarget;
  } else if (!law.usable()) {
    status = Status::kMaskedTarget;
  } else if (token.token < 0 || token.token >= params.vocab_size) {
    status = Status::kInvalidDraftId;
  }
  params.status[row] = static_cast<int32_t>(status);
}

SPECDEC_HOST_DEVICE void write_nothing(const TokenLogprobsParams& params, int64_t row) {
  for (int64_t column = 0; column <= params.top_n; ++column) {
    put(params.out_token_ids, row, column, -1);
    params.logprobs[row * (1 + params.top_n) + column] = __builtin_nanf("");
  }
  params.ranks[row] = 0;
  params.status[row] = static_cast<int32_t>(Status::kOk);
}

}  // namespace specdec_ops

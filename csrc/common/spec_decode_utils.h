#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "common/draft_counts.h"
#include "common/float_rows.h"
#include "common/views.h"

/// The bookkeeping ops of one request. On the CPU a call has one lane; on a GPU kLanes threads are the
/// lanes, and what a lane does depends on nothing that another one wrote. Totals are clamped: wherever
/// they lead, no access leaves a tensor.
namespace specdec_ops {

/// The value, which float64 holds exactly whatever the dtype.
SPECDEC_HOST_DEVICE double at(const FloatRowsView& view, int64_t row, int64_t column) {
  const int64_t offset = row * view.row_stride + column * view.stride;
  switch (view.dtype) {
    case FloatType::kFloat64:
      return static_cast<const double*>(view.data)[offset];
    case FloatType::kFloat32:
      return static_cast<const float*>(view.data)[offset];
    case FloatType::kBFloat16:
      return static_cast<float>(static_cast<const torch::headeronly::BFloat16*>(view.data)[offset]);
    default:
      return static_cast<float>(static_cast<const torch::headeronly::Half*>(view.data)[offset]);
  }
}

/// Emitted and accepted tokens of a verified row.
struct CountAccepted {
  static constexpr int kLanes = 1;

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

/// Where verified tokens go. Each lane walks all of a request's drafts and writes its share.
struct EmittedTokens {
  MutableIntView token_ids;
  int64_t request, lane, num_lanes;

  SPECDEC_HOST_DEVICE void emit(int64_t slot, int64_t token) const {
    if (slot % num_lanes == lane) put(token_ids, request, slot, token);
  }
};

struct VerifyArgmax {
  static constexpr int kLanes = 1;

  DraftCounts drafts;
  IntView target_argmax;
  IntView draft_token_ids;
  IntView bonus_token_ids;
  /// May be empty: every request is greedy.
  BoolView is_greedy;
  /// Both or neither: drafts are accepted at these rates, whatever the target says.
  RealView accept_rates;
  RealView accept_uniforms;
  MutableIntView token_ids;
  /// Drafts of a request that token_ids and accept_rates have room for.
  int64_t max_num_drafts = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    if (is_greedy && !at(is_greedy, request)) return;
    const EmittedTokens out{token_ids, request, lane, num_lanes};
    const Span span = drafts.of(request);
    const int64_t begin = span.begin, count = span.size() < max_num_drafts ? span.size() : max_num_drafts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t draft = at(draft_token_ids, begin + i);
      const int64_t best = at(target_argmax, begin + i);
      const bool accepted =
          accept_rates ? draft >= 0 && at(accept_uniforms, begin + i) < at(accept_rates, i) : draft == best;
      out.emit(i, accepted ? draft : best);
      if (!accepted) return;
    }
    out.emit(count, at(bonus_token_ids, request));
  }
};

struct VerifyProbs {
  static constexpr int kLanes = 1;

  DraftCounts drafts;
  FloatRowsView target_probs;
  /// May be empty: the draft law is one-hot.
  FloatRowsView draft_probs;
  IntView draft_token_ids;
  IntView recovered_token_ids;
  IntView bonus_token_ids;
  RealView accept_uniforms;
  /// May be empty: no request is greedy.
  BoolView is_greedy;
  /// May be empty: probabilities decide.
  RealView accept_rates;
  int64_t vocab_size = 0;
  MutableIntView token_ids;
  /// Drafts of a request that token_ids and accept_rates have room for.
  int64_t max_num_drafts = 0;

  SPECDEC_HOST_DEVICE bool accepts(int64_t draft, int64_t token, int64_t i) const {
    if (token < 0 || token >= vocab_size) return false;
    const double u = at(accept_uniforms, draft);
    if (accept_rates) return u < at(accept_rates, i);
    const double p = at(target_probs, draft, token);
    if (!draft_probs) return p > 0.0 && p >= u;
    const double q = at(draft_probs, draft, token);
    const bool is_float64 =
        target_probs.dtype == FloatType::kFloat64 || draft_probs.dtype == FloatType::kFloat64;
    const double ratio = is_float64 ? p / q : static_cast<float>(p) / static_cast<float>(q);
    return p > 0.0 && q > 0.0 && ratio >= u;
  }

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    if (is_greedy && at(is_greedy, request)) return;
    const EmittedTokens out{token_ids, request, lane, num_lanes};
    const Span span = drafts.of(request);
    const int64_t begin = span.begin, count = span.size() < max_num_drafts ? span.size() : max_num_drafts;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t token = at(draft_token_ids, begin + i);
      const bool accepted = accepts(begin + i, token, i);
      out.emit(i, accepted ? token : at(recovered_token_ids, begin + i));
      if (!accepted) return;
    }
    out.emit(count, at(bonus_token_ids, request));
  }
};

/// Floats of 16 bits compare as float32: CUDA has two == for them, and takes neither.
template <class T>
SPECDEC_HOST_DEVICE bool are_equal(T a, T b) {
  if constexpr (std::is_arithmetic_v<T>) {
    return a == b;
  } else {
    return static_cast<float>(a) == static_cast<float>(b);
  }
}

/// T is the dtype of the values.
template <class T>
struct ExpandToDrafts {
  static constexpr int kLanes = 32;

  DraftCounts drafts;
  const T* values = nullptr;
  int64_t values_stride = 0;
  bool replaces = false;
  T replace_from{};
  T replace_to{};
  T* expanded = nullptr;
  int64_t expanded_stride = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    const T given = values[request * values_stride];
    const T value = replaces && are_equal(given, replace_from) ? replace_to : given;
    const Span span = drafts.of(request);
    for (int64_t i = span.begin + lane; i < span.end; i += num_lanes) {
      expanded[i * expanded_stride] = value;
    }
  }
};

struct PreparePaddedDraftInputs {
  static constexpr int kLanes = 1;

  DraftCounts drafts;
  IntView num_sampled;
  IntView query_start_loc;
  MutableIntView token_indices;
  MutableIntView num_rejected;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    if (lane != 0) return;
    const int64_t num_drafts = drafts.of(request).size();
    int64_t rejected = num_drafts > 0 ? num_drafts + 1 - at(num_sampled, request) : 0;
    rejected = rejected < 0 ? 0 : rejected > num_drafts + 1 ? num_drafts + 1 : rejected;
    const int64_t first = at(query_start_loc, request), last = at(query_start_loc, request + 1) - 1;
    // A request of which nothing was kept points to its own first token, not to another request.
    const int64_t lowest = first < last ? first : last;
    put(token_indices, request, last - rejected > lowest ? last - rejected : lowest);
    put(num_rejected, request, rejected);
  }
};

struct PrepareNextTokens {
  static constexpr int kLanes = 1;

  IntView token_ids;
  int64_t width = 0;
  BoolView discard_request_mask;
  IntView backup_token_ids;
  int64_t vocab_size = 0;
  MutableIntView next_token_ids;
  MutableIntView num_sampled;

  SPECDEC_HOST_DEVICE bool is_valid(int64_t token) const { return token >= 0 && token < vocab_size; }

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    if (lane != 0) return;
    const int64_t backup = at(backup_token_ids, request);
    int64_t next = is_valid(backup) ? backup : 0;
    int64_t count = 0;
    const int64_t num_tokens = at(discard_request_mask, request) ? 0 : width;
    for (int64_t i = 0; i < num_tokens; ++i) {
      const int64_t token = at(token_ids, request, i);
      if (!is_valid(token)) continue;
      next = token;
      ++count;
    }
    put(next_token_ids, request, next);
    put(num_sampled, request, count);
  }
};

}  // namespace specdec_ops

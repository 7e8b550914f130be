#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/spans.h"
#include "common/views.h"

/// Bookkeeping between a batch and the runner's state, in which each request has a row for as long
/// as it lives. `request_indices` are those rows; an index outside of them marks a padding request,
/// whose state is neither read nor written.
///
/// Each body is called for every request of the batch by `num_lanes` lanes, on a GPU kLanes threads. Bodies
/// with a `batch` are called once more with it as the request, for what lies past the last one. Totals are
/// clamped: wherever they lead, no access leaves a tensor.
namespace specdec_ops {

/// Rows of the runner's state.
struct StateRows {
  IntView request_indices;
  int64_t max_requests = 0;

  /// The state row of a request of the batch; negative for padding.
  SPECDEC_HOST_DEVICE int64_t of(int64_t request) const {
    const int64_t index = at(request_indices, request);
    return index < max_requests ? index : -1;
  }
};

struct CombineSampledAndDraftTokens {
  static constexpr int kLanes = 32;

  StateRows rows;
  int64_t batch = 0;
  IntView query_start_loc;
  IntView seq_lens;
  IntView cu_num_logits;
  IntView last_token_ids;
  IntView draft_token_ids;
  int64_t max_num_drafts = 0;
  IntView prefill_lens;
  int64_t num_new_tokens = 1;
  MutableIntView input_ids;
  int64_t num_tokens = 0;
  MutableIntView logits_indices;
  int64_t num_logits = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    if (request == batch) {
      const int64_t used = clamped(at(cu_num_logits, batch), 0, num_logits);
      for (int64_t i = used + lane; i < num_logits; i += num_lanes) put(logits_indices, i, 0);
      return;
    }
    const Span query = span_at(query_start_loc, request, num_tokens);
    const Span logits = span_at(cu_num_logits, request, num_logits);
    // The last tokens of the query are those that logits are computed for.
    const int64_t first = query.end - logits.size();
    for (int64_t i = lane; i < logits.size(); i += num_lanes) {
      put(logits_indices, logits.begin + i, first + i > 0 ? first + i : 0);
    }

    const int64_t row = rows.of(request);
    if (row < 0) return;
    const int64_t seq_len = at(seq_lens, request), prefill_len = at(prefill_lens, row);
    if (seq_len <= prefill_len) return;
    // A query that starts in the prompt keeps the prompt's token before the drafts.
    const bool has_new_token = seq_len - logits.size() >= prefill_len;
    for (int64_t i = lane; i < logits.size(); i += num_lanes) {
      const int64_t draft = i - num_new_tokens;
      if (first + i < query.begin || draft >= max_num_drafts) continue;
      if (draft >= 0) {
        put(input_ids, first + i, at(draft_token_ids, row, draft));
      } else if (has_new_token) {
        put(input_ids, first + i, at(last_token_ids, row));
      }
    }
  }
};

struct CountEmittedAndRejected {
  static constexpr int kLanes = 1;

  StateRows rows;
  IntView seq_lens;
  IntView cu_num_logits;
  IntView prefill_lens;
  MutableIntView num_emitted;
  MutableIntView num_rejected;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    if (lane != 0) return;
    const int64_t row = rows.of(request);
    int64_t emitted = 0, rejected = 0;
    // Until its prefill is complete, what a request samples is thrown away.
    if (row >= 0 && at(seq_lens, request) >= at(prefill_lens, row)) {
      emitted = clamped(at(num_emitted, request), 0, INT64_MAX);
      rejected = clamped(span_at(cu_num_logits, request, INT64_MAX).size() - emitted, 0, INT64_MAX);
    }
    put(num_emitted, request, emitted);
    put(num_rejected, request, rejected);
  }
};

struct UpdateRequestState {
  static constexpr int kLanes = 32;

  StateRows rows;
  IntView sampled_token_ids;
  int64_t max_num_emitted = 0;
  IntView num_emitted;
  IntView num_rejected;
  /// Missing: no tokens of the batch are to be counted as computed.
  IntView query_start_loc;
  MutableIntView num_computed_tokens;
  MutableIntView last_token_ids;
  MutableIntView total_lens;
  MutableIntView all_token_ids;
  int64_t max_model_len = 0;
  MutableIntView output_counts;
  int64_t vocab_size = 0;
  IntView new_draft_token_ids;
  MutableIntView draft_token_ids;
  int64_t max_num_drafts = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    const int64_t row = rows.of(request);
    if (row < 0) return;
    if (new_draft_token_ids) {
      for (int64_t i = lane; i < max_num_drafts; i += num_lanes) {
        put(draft_token_ids, row, i, at(new_draft_token_ids, request, i));
      }
    }
    // What follows reads what it writes, and is a handful of tokens.
    if (lane != 0) return;
    const int64_t emitted = clamped(at(num_emitted, request), 0, max_num_emitted);
    const int64_t total_len = at(total_lens, row);
    for (int64_t i = 0; i < emitted; ++i) {
      const int64_t id = at(sampled_token_ids, request, i);
      const int64_t position = total_len + i;
      if (position >= 0 && position < max_model_len) put(all_token_ids, row, position, id);
      if (id >= 0 && id < vocab_size) put(output_counts, row, id, at(output_counts, row, id) + 1);
      if (i == emitted - 1) put(last_token_ids, row, id);
    }
    put(total_lens, row, total_len + emitted);

    const int64_t query_len = query_start_loc ? span_at(query_start_loc, request, INT64_MAX).size() : 0;
    put(num_computed_tokens, row, at(num_computed_tokens, row) + query_len - at(num_rejected, request));
  }
};

struct UpdateNumComputedTokens {
  static constexpr int kLanes = 1;

  StateRows rows;
  IntView query_start_loc;
  MutableIntView num_computed_tokens;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    const int64_t row = rows.of(request);
    if (row < 0 || lane != 0) return;
    const int64_t query_len = span_at(query_start_loc, request, INT64_MAX).size();
    put(num_computed_tokens, row, at(num_computed_tokens, row) + query_len);
  }
};

struct ExpandRequestIndices {
  static constexpr int kLanes = 32;

  IntView request_indices;
  int64_t batch = 0;
  IntView cu_num_logits;
  MutableIntView expanded_request_indices;
  MutableIntView local_positions;
  int64_t num_logits = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    const bool past_the_last = request == batch;
    const Span logits = past_the_last ? Span{clamped(at(cu_num_logits, batch), 0, num_logits), num_logits}
                                      : span_at(cu_num_logits, request, num_logits);
    const int64_t index = past_the_last ? -1 : at(request_indices, request);
    for (int64_t i = lane; i < logits.size(); i += num_lanes) {
      put(expanded_request_indices, logits.begin + i, index);
      put(local_positions, logits.begin + i, past_the_last ? 0 : i);
    }
  }
};

struct PreparePositionsAndSeqLens {
  static constexpr int kLanes = 256;

  StateRows rows;
  int64_t batch = 0;
  IntView query_start_loc;
  IntView num_computed_tokens;
  MutableIntView positions;
  int64_t num_tokens = 0;
  MutableIntView seq_lens;
  int64_t num_seq_lens = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    if (request == batch) {
      for (int64_t i = batch + lane; i < num_seq_lens; i += num_lanes) put(seq_lens, i, 0);
      return;
    }
    const int64_t row = rows.of(request);
    if (row < 0) {
      if (lane == 0) put(seq_lens, request, 0);
      return;
    }
    const Span query = span_at(query_start_loc, request, num_tokens);
    const int64_t num_computed = at(num_computed_tokens, row);
    for (int64_t i = lane; i < query.size(); i += num_lanes) {
      put(positions, query.begin + i, num_computed + i);
    }
    if (lane == 0) put(seq_lens, request, num_computed + query.size());
  }
};

/// Called with tiles of logits rows in place of requests.
struct GatherDraftTokens {
  static constexpr int kLanes = 256;
  static constexpr int64_t kTile = 1024;

  IntView input_ids;
  IntView positions;
  int64_t num_tokens = 0;
  IntView logits_indices;
  int64_t num_logits = 0;
  StateRows rows;
  IntView local_positions;
  IntView prefill_lens;
  MutableIntView out_token_ids;
  MutableIntView out_positions;

  SPECDEC_HOST_DEVICE void operator()(int64_t tile, int64_t lane, int64_t num_lanes) const {
    const int64_t end = clamped(num_logits, 0, (tile + 1) * kTile);
    for (int64_t i = tile * kTile + lane; i < end; i += num_lanes) {
      const int64_t row = rows.of(i), token = at(logits_indices, i);
      if (row < 0 || token < 0 || token >= num_tokens) {
        put(out_token_ids, i, -1);
        put(out_positions, i, 0);
        continue;
      }
      const int64_t position = at(positions, token), local_position = at(local_positions, i);
      // Nothing was drafted for a query that starts in the prompt: its draft slots are fillers.
      const bool is_filler = local_position > 0 && position - local_position < at(prefill_lens, row);
      put(out_token_ids, i, is_filler ? -1 : at(input_ids, token));
      put(out_positions, i, position);
    }
  }
};

}  // namespace specdec_ops

#pragma once

#include <algorithm>

#include "common/checks.h"
#include "common/runner_state.h"
#include "common/tensor_views.h"

/// The bookkeeping between a runner's batches and the state of its requests. A Backend says whether the
/// values in tensors can be read here (kValuesOnHost), names the checks of an op (checks), and calls a body
/// for each request (for_each_request).
namespace specdec_ops {

template <class Backend>
class RunnerChecks : public Checks {
 public:
  RunnerChecks(const char* op, const Tensor& first) : Checks(Backend::checks(op, first)) {}

  /// Integers of one dimension, of any size.
  void ints(const Tensor& tensor, const char* name, const char* shape) const { dims(tensor, name, shape, 1); }

  void ints(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    dims(tensor, name, shape, 1);
    require(tensor.size(0) == size, name, " must be ", shape, " with ", size,
            size == 1 ? " element" : " elements", ", got ", shape_of(tensor));
  }

  /// The first `size` elements count: buffers of the runner are longer than a batch.
  void ints_from(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    dims(tensor, name, shape, 1);
    require(tensor.size(0) >= size, name, " must be ", shape, " with at least ", size,
            size == 1 ? " element" : " elements", ", got ", shape_of(tensor));
  }

  /// Rows of integers, of any width.
  void int_rows(const Tensor& tensor, const char* name, const char* shape, int64_t num_rows) const {
    dims(tensor, name, shape, 2);
    require(tensor.size(0) == num_rows, name, " must be ", shape, " with ", num_rows,
            num_rows == 1 ? " row" : " rows", ", got ", shape_of(tensor));
  }

  /// Running totals of the batch, in host memory checked to never decrease and end within `limit`, the size
  /// of `of`.
  IntView totals(const Tensor& tensor, const char* name, int64_t batch, int64_t limit = INT64_MAX,
                 const char* of = "") const {
    ints_from(tensor, name, "[batch + 1]", batch + 1);
    const IntView view = int_view(tensor);
    if (!Backend::kValuesOnHost) return view;
    int64_t before = 0;
    for (int64_t r = 0; r <= batch; ++r) {
      const int64_t total = at(view, r);
      require(total >= before, name, " must start at 0 or above and never decrease, got ", total, " after ",
              before, " at index ", r);
      before = total;
    }
    require(before <= limit, name, " must end within the ", limit, " elements of ", of, ", got ", before);
    return view;
  }

 private:
  void dims(const Tensor& tensor, const char* name, const char* shape, int64_t dims) const {
    integer(tensor, name);
    require(tensor.dim() == dims, name, " must be ", shape, ", got ", shape_of(tensor));
  }
};

/// One integer of each state row: [max_requests], or the column that runners keep.
struct Column {
  Column(const Checks& checks, const Tensor& tensor, const char* name, int64_t num_rows) : tensor(tensor) {
    checks.integer(tensor, name);
    const int64_t dims = tensor.dim();
    checks.require((dims == 1 || (dims == 2 && tensor.size(1) == 1)) && tensor.size(0) == num_rows, name,
                   " must be [max_requests] or [max_requests, 1] with ", num_rows,
                   num_rows == 1 ? " row" : " rows", ", got ", shape_of(tensor));
  }

  IntView view() const {
    return {tensor.const_data_ptr(), tensor.stride(0), dtype_of(tensor) == ScalarType::Long};
  }
  MutableIntView mutable_view() const {
    return {tensor.mutable_data_ptr(), tensor.stride(0), dtype_of(tensor) == ScalarType::Long};
  }

  const Tensor& tensor;
};

inline constexpr char kBatch[] = "[batch]";
inline constexpr char kMaxRequests[] = "[max_requests]";
inline constexpr char kNumLogits[] = "[num_logits]";
inline constexpr char kNumTokens[] = "[num_tokens]";

template <class Backend>
void combine_sampled_and_draft_tokens_(const Tensor& request_indices, const Tensor& query_start_loc,
                                       const Tensor& seq_lens, const Tensor& cu_num_logits,
                                       const Tensor& last_token_ids, const Tensor& draft_token_ids,
                                       const Tensor& prefill_lens, int64_t num_new_tokens,
                                       const Tensor& input_ids, const Tensor& logits_indices) {
  const RunnerChecks<Backend> checks("combine_sampled_and_draft_tokens_", request_indices);
  CombineSampledAndDraftTokens body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.rows.request_indices = int_view(request_indices);
  body.batch = request_indices.size(0);
  checks.ints(prefill_lens, "prefill_lens", kMaxRequests);
  body.prefill_lens = int_view(prefill_lens);
  body.rows.max_requests = prefill_lens.size(0);
  checks.ints(input_ids, "input_ids", kNumTokens);
  body.input_ids = mutable_int_view(input_ids);
  body.num_tokens = input_ids.size(0);
  checks.ints(logits_indices, "logits_indices", kNumLogits);
  body.logits_indices = mutable_int_view(logits_indices);
  body.num_logits = logits_indices.size(0);
  body.query_start_loc =
      checks.totals(query_start_loc, "query_start_loc", body.batch, body.num_tokens, "input_ids");
  checks.ints_from(seq_lens, "seq_lens", kBatch, body.batch);
  body.seq_lens = int_view(seq_lens);
  body.cu_num_logits =
      checks.totals(cu_num_logits, "cu_num_logits", body.batch, body.num_logits, "logits_indices");
  body.last_token_ids = Column(checks, last_token_ids, "last_token_ids", body.rows.max_requests).view();
  checks.int_rows(draft_token_ids, "draft_token_ids", "[max_requests, k]", body.rows.max_requests);
  body.draft_token_ids = int_view(draft_token_ids);
  body.max_num_drafts = draft_token_ids.size(1);
  checks.require(num_new_tokens == 0 || num_new_tokens == 1, "num_new_tokens must be 0 or 1, got ",
                 num_new_tokens);
  body.num_new_tokens = num_new_tokens;
  for (int64_t r = 0; Backend::kValuesOnHost && r < body.batch; ++r) {
    const int64_t query_len = span_at(body.query_start_loc, r, INT64_MAX).size();
    const int64_t num_logits = span_at(body.cu_num_logits, r, INT64_MAX).size();
    checks.require(query_len >= num_logits, "query_start_loc must give request ", r,
                   " a token for each of its ", num_logits, " logits rows, got ", query_len);
  }
  Backend::for_each_request(checks, request_indices, body.batch + 1, body);
}

template <class Backend>
void count_emitted_and_rejected_(const Tensor& request_indices, const Tensor& seq_lens,
                                 const Tensor& cu_num_logits, const Tensor& prefill_lens,
                                 const Tensor& num_emitted, const Tensor& num_rejected) {
  const RunnerChecks<Backend> checks("count_emitted_and_rejected_", request_indices);
  CountEmittedAndRejected body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.rows.request_indices = int_view(request_indices);
  const int64_t batch = request_indices.size(0);
  checks.ints_from(seq_lens, "seq_lens", kBatch, batch);
  body.seq_lens = int_view(seq_lens);
  body.cu_num_logits = checks.totals(cu_num_logits, "cu_num_logits", batch);
  checks.ints(prefill_lens, "prefill_lens", kMaxRequests);
  body.prefill_lens = int_view(prefill_lens);
  body.rows.max_requests = prefill_lens.size(0);
  checks.ints(num_emitted, "num_emitted", kBatch, batch);
  body.num_emitted = mutable_int_view(num_emitted);
  checks.ints(num_rejected, "num_rejected", kBatch, batch);
  body.num_rejected = mutable_int_view(num_rejected);
  Backend::for_each_request(checks, request_indices, batch, body);
}

template <class Backend>
void update_request_state_(const Tensor& request_indices, const Tensor& sampled_token_ids,
                           const Tensor& num_emitted, const Tensor& num_rejected,
                           const OptionalTensor& query_start_loc, const OptionalTensor& new_draft_token_ids,
                           const Tensor& num_computed_tokens, const Tensor& last_token_ids,
                           const Tensor& total_lens, const Tensor& all_token_ids,
                           const OptionalTensor& output_counts, const OptionalTensor& draft_token_ids) {
  const RunnerChecks<Backend> checks("update_request_state_", request_indices);
  UpdateRequestState body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.rows.request_indices = int_view(request_indices);
  const int64_t batch = request_indices.size(0);
  checks.int_rows(sampled_token_ids, "sampled_token_ids", "[batch, k + 1]", batch);
  body.sampled_token_ids = int_view(sampled_token_ids);
  body.max_num_emitted = sampled_token_ids.size(1);
  checks.ints(num_emitted, "num_emitted", kBatch, batch);
  body.num_emitted = int_view(num_emitted);
  checks.ints(num_rejected, "num_rejected", kBatch, batch);
  body.num_rejected = int_view(num_rejected);
  if (query_start_loc) body.query_start_loc = checks.totals(*query_start_loc, "query_start_loc", batch);
  checks.ints(num_computed_tokens, "num_computed_tokens", kMaxRequests);
  body.num_computed_tokens = mutable_int_view(num_computed_tokens);
  const int64_t max_requests = num_computed_tokens.size(0);
  body.rows.max_requests = max_requests;
  body.last_token_ids = Column(checks, last_token_ids, "last_token_ids", max_requests).mutable_view();
  checks.ints(total_lens, "total_lens", kMaxRequests, max_requests);
  body.total_lens = mutable_int_view(total_lens);
  checks.int_rows(all_token_ids, "all_token_ids", "[max_requests, max_model_len]", max_requests);
  body.all_token_ids = mutable_int_view(all_token_ids);
  body.max_model_len = all_token_ids.size(1);
  if (output_counts) {
    checks.int_rows(*output_counts, "output_counts", "[max_requests, vocab_size]", max_requests);
    body.output_counts = mutable_int_view(*output_counts);
    body.vocab_size = output_counts->size(1);
  }
  if (new_draft_token_ids) {
    checks.require(draft_token_ids.has_value(),
                   "draft_token_ids must be given with new_draft_token_ids, got none");
    checks.int_rows(*new_draft_token_ids, "new_draft_token_ids", "[batch, k]", batch);
    body.new_draft_token_ids = int_view(*new_draft_token_ids);
    checks.int_rows(*draft_token_ids, "draft_token_ids", "[max_requests, k]", max_requests);
    body.draft_token_ids = mutable_int_view(*draft_token_ids);
    body.max_num_drafts = draft_token_ids->size(1);
    checks.require(new_draft_token_ids->size(1) == body.max_num_drafts, "new_draft_token_ids must have the ",
                   body.max_num_drafts, " columns of draft_token_ids, got ", shape_of(*new_draft_token_ids));
  } else if (draft_token_ids) {
    checks.same_device(*draft_token_ids, "draft_token_ids");
  }
  Backend::for_each_request(checks, request_indices, batch, body);
}

template <class Backend>
void update_num_computed_tokens_(const Tensor& request_indices, const Tensor& query_start_loc,
                                 const Tensor& num_computed_tokens) {
  const RunnerChecks<Backend> checks("update_num_computed_tokens_", request_indices);
  UpdateNumComputedTokens body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.rows.request_indices = int_view(request_indices);
  const int64_t batch = request_indices.size(0);
  body.query_start_loc = checks.totals(query_start_loc, "query_start_loc", batch);
  checks.ints(num_computed_tokens, "num_computed_tokens", kMaxRequests);
  body.num_computed_tokens = mutable_int_view(num_computed_tokens);
  body.rows.max_requests = num_computed_tokens.size(0);
  Backend::for_each_request(checks, request_indices, batch, body);
}

template <class Backend>
void expand_request_indices_(const Tensor& request_indices, const Tensor& cu_num_logits,
                             const Tensor& expanded_request_indices, const Tensor& local_positions) {
  const RunnerChecks<Backend> checks("expand_request_indices_", request_indices);
  ExpandRequestIndices body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.request_indices = int_view(request_indices);
  body.batch = request_indices.size(0);
  checks.ints(expanded_request_indices, "expanded_request_indices", kNumLogits);
  body.expanded_request_indices = mutable_int_view(expanded_request_indices);
  body.num_logits = expanded_request_indices.size(0);
  body.cu_num_logits =
      checks.totals(cu_num_logits, "cu_num_logits", body.batch, body.num_logits, "expanded_request_indices");
  checks.ints(local_positions, "local_positions", kNumLogits, body.num_logits);
  body.local_positions = mutable_int_view(local_positions);
  Backend::for_each_request(checks, request_indices, body.batch + 1, body);
}

template <class Backend>
void prepare_positions_and_seq_lens_(const Tensor& request_indices, const Tensor& query_start_loc,
                                     const Tensor& num_computed_tokens, const Tensor& positions,
                                     const Tensor& seq_lens) {
  const RunnerChecks<Backend> checks("prepare_positions_and_seq_lens_", request_indices);
  PreparePositionsAndSeqLens body;
  checks.ints(request_indices, "request_indices", kBatch);
  body.rows.request_indices = int_view(request_indices);
  body.batch = request_indices.size(0);
  checks.ints(num_computed_tokens, "num_computed_tokens", kMaxRequests);
  body.num_computed_tokens = int_view(num_computed_tokens);
  body.rows.max_requests = num_computed_tokens.size(0);
  checks.ints(positions, "positions", kNumTokens);
  body.positions = mutable_int_view(positions);
  body.num_tokens = positions.size(0);
  body.query_start_loc =
      checks.totals(query_start_loc, "query_start_loc", body.batch, body.num_tokens, "positions");
  checks.ints_from(seq_lens, "seq_lens", kBatch, body.batch);
  body.seq_lens = mutable_int_view(seq_lens);
  body.num_seq_lens = seq_lens.size(0);
  Backend::for_each_request(checks, request_indices, body.batch + 1, body);
}

template <class Backend>
void gather_draft_tokens_(const Tensor& input_ids, const Tensor& positions, const Tensor& logits_indices,
                          const Tensor& expanded_request_indices, const Tensor& local_positions,
                          const Tensor& prefill_lens, const Tensor& out_token_ids,
                          const Tensor& out_positions) {
  const RunnerChecks<Backend> checks("gather_draft_tokens_", input_ids);
  GatherDraftTokens body;
  checks.ints(input_ids, "input_ids", kNumTokens);
  body.input_ids = int_view(input_ids);
  checks.ints(positions, "positions", kNumTokens);
  body.positions = int_view(positions);
  body.num_tokens = std::min(input_ids.size(0), positions.size(0));
  checks.ints(logits_indices, "logits_indices", kNumLogits);
  body.logits_indices = int_view(logits_indices);
  body.num_logits = logits_indices.size(0);
  checks.ints(expanded_request_indices, "expanded_request_indices", kNumLogits, body.num_logits);
  body.rows.request_indices = int_view(expanded_request_indices);
  checks.ints(local_positions, "local_positions", kNumLogits, body.num_logits);
  body.local_positions = int_view(local_positions);
  checks.ints(prefill_lens, "prefill_lens", kMaxRequests);
  body.prefill_lens = int_view(prefill_lens);
  body.rows.max_requests = prefill_lens.size(0);
  checks.ints(out_token_ids, "out_token_ids", kNumLogits, body.num_logits);
  body.out_token_ids = mutable_int_view(out_token_ids);
  checks.ints(out_positions, "out_positions", kNumLogits, body.num_logits);
  body.out_positions = mutable_int_view(out_positions);
  Backend::for_each_request(
      checks, input_ids, (body.num_logits + GatherDraftTokens::kTile - 1) / GatherDraftTokens::kTile, body);
}

}  // namespace specdec_ops

#pragma once

#include <algorithm>
#include <optional>

#include "common/checks.h"
#include "common/slot_mapping.h"
#include "common/tensor_views.h"

/// The ops that prepare a draft model's inputs over a paged key-value cache. A Backend says whether the
/// values in tensors can be read here (kValuesOnHost), names the checks of an op (checks), and calls a body
/// for each request (for_each_request).
namespace specdec_ops {

/// What these ops check, and what kernels see of it. An op takes some ten tensors of a few requests each, so
/// that every look at a tensor counts: none is taken twice, and messages are built only for what is wrong.
template <class Backend>
class DraftInputChecks : public Checks {
 public:
  DraftInputChecks(const char* op, const Tensor& first) : Checks(Backend::checks(op, first)) {}

  /// An integer vector of at least `size` elements.
  IntView ints(const Tensor& tensor, const char* name, const char* shape, int64_t size = 0) const {
    const bool wide = is_int64(tensor, name);
    at_least(tensor, name, shape, size);
    return {tensor.const_data_ptr(), tensor.stride(0), wide};
  }

  /// An integer vector of exactly `size` elements.
  IntView ints_exactly(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    const bool wide = is_int64(tensor, name);
    if (tensor.dim() != 1 || tensor.size(0) != size) vector(tensor, name, shape, size);
    return {tensor.const_data_ptr(), tensor.stride(0), wide};
  }

  /// An integer vector of at least `size` elements, to write to.
  MutableIntView output(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    const bool wide = is_int64(tensor, name);
    at_least(tensor, name, shape, size);
    return {tensor.mutable_data_ptr(), tensor.stride(0), wide};
  }

  /// A bool vector of at least `size` elements, to write to.
  MutableBoolView bool_output(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    boolean(tensor, name);
    at_least(tensor, name, shape, size);
    return mutable_bool_view(tensor);
  }

  /// Where the tokens of each request begin and those of the last end, in host memory checked to be within
  /// the `num_tokens` of `of`; the batch is one less than its size.
  IntView query_start_loc(const Tensor& tensor, int64_t num_tokens, const char* of) const {
    constexpr char kName[] = "query_start_loc";
    const IntView starts = ints(tensor, kName, "[batch + 1]", 1);
    if (!Backend::kValuesOnHost) return starts;
    const int64_t batch = tensor.size(0) - 1;
    int64_t before = 0;
    for (int64_t request = 0; request <= batch; ++request) {
      const int64_t start = at(starts, request);
      if (start < before) {
        require(false, kName, " must start at 0 or above and never decrease, got ", start, " after ", before,
                " at index ", request);
      }
      before = start;
    }
    if (before > num_tokens) {
      require(false, kName, " must end within the ", num_tokens, " elements of ", of, ", got ", before);
    }
    return starts;
  }

  /// The table of `batch` requests, for slots that every one of `outputs` can hold.
  SlotTable slot_table(const Tensor& tensor, int64_t batch, int64_t block_size, int64_t pad_slot_id,
                       std::initializer_list<MutableIntView> outputs) const {
    const bool wide = is_int64(tensor, "block_table");
    if (tensor.dim() != 2 || tensor.size(0) < batch) {
      require(false, "block_table must be [batch, num_columns] with at least ", batch, " rows, got ",
              shape_of(tensor));
    }
    positive_int32(block_size, "block_size");
    int64_t last_slot = INT64_MAX;
    for (const MutableIntView& output : outputs) last_slot = std::min(last_slot, largest_value(output));
    if (last_slot == INT32_MAX) int32(pad_slot_id, "pad_slot_id");
    const uint64_t num_slots = static_cast<uint64_t>(last_slot) + 1;
    return {{tensor.const_data_ptr(), tensor.stride(1), wide, tensor.stride(0)},
            tensor.size(1),
            block_size,
            static_cast<int64_t>(num_slots / block_size - 1),
            pad_slot_id};
  }

  void positive_int32(int64_t value, const char* name) const { between(value, name, 1, INT32_MAX); }
  void int32(int64_t value, const char* name) const { between(value, name, INT32_MIN, INT32_MAX); }
  /// A token id that `output` can hold.
  void token_id(int64_t value, const char* name, const MutableIntView& output) const {
    if (!output.is_int64) int32(value, name);
  }

 private:
  /// Whether the integers are int64 rather than int32.
  bool is_int64(const Tensor& tensor, const char* name) const {
    same_device(tensor, name);
    const ScalarType dtype = dtype_of(tensor);
    if (dtype != ScalarType::Long && dtype != ScalarType::Int) integer(tensor, name);
    return dtype == ScalarType::Long;
  }

  void at_least(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    if (tensor.dim() == 1 && tensor.size(0) >= size) return;
    require(false, name, " must be ", shape, " with at least ", size, size == 1 ? " element" : " elements",
            ", got ", shape_of(tensor));
  }

  void between(int64_t value, const char* name, int64_t low, int64_t high) const {
    if (value >= low && value <= high) return;
    require(false, name, " must be between ", low, " and ", high, ", got ", value);
  }
};

template <class Backend>
void compute_slot_mapping_(const Tensor& query_start_loc, const Tensor& positions, const Tensor& block_table,
                           const Tensor& slot_mapping, int64_t block_size, int64_t pad_slot_id) {
  const DraftInputChecks<Backend> checks("compute_slot_mapping_", query_start_loc);
  ComputeSlotMapping body;
  body.positions = checks.ints(positions, "positions", "[num_tokens]");
  body.num_tokens = positions.size(0);
  body.slot_mapping = checks.output(slot_mapping, "slot_mapping", "[num_tokens] or longer", body.num_tokens);
  body.num_slots = slot_mapping.size(0);
  body.query_start_loc = checks.query_start_loc(query_start_loc, body.num_tokens, "positions");
  body.batch = query_start_loc.size(0) - 1;
  body.table = checks.slot_table(block_table, body.batch, block_size, pad_slot_id, {body.slot_mapping});
  Backend::for_each_request(checks, query_start_loc, body.batch + 1, body);
}

template <class Backend>
void advance_draft_step_(const Tensor& positions, const Tensor& block_table, const Tensor& seq_lens,
                         const Tensor& out_positions, const Tensor& out_slot_mapping, int64_t block_size,
                         int64_t max_model_len, int64_t pad_slot_id, int64_t overflow_position) {
  const DraftInputChecks<Backend> checks("advance_draft_step_", positions);
  constexpr char kShape[] = "[batch] or longer";
  AdvanceDraftStep body;
  body.positions = checks.ints(positions, "positions", "[batch]");
  body.batch = positions.size(0);
  body.seq_lens = checks.output(seq_lens, "seq_lens", kShape, body.batch);
  body.out_positions = checks.output(out_positions, "out_positions", kShape, body.batch);
  body.out_slot_mapping = checks.output(out_slot_mapping, "out_slot_mapping", kShape, body.batch);
  checks.positive_int32(max_model_len, "max_model_len");
  if (overflow_position < 0 || overflow_position >= max_model_len) {
    checks.require(false, "overflow_position must be between 0 and max_model_len - 1, ", max_model_len - 1,
                   ", got ", overflow_position);
  }
  body.max_model_len = max_model_len;
  body.overflow_position = overflow_position;
  body.table = checks.slot_table(block_table, body.batch, block_size, pad_slot_id, {body.out_slot_mapping});
  Backend::for_each_request(checks, positions, out_slot_mapping.size(0), body);
}

template <class Backend>
void expand_draft_inputs_(const Tensor& target_token_ids, const Tensor& target_positions,
                          const Tensor& next_token_ids, const Tensor& query_start_loc,
                          const Tensor& query_end_loc, const Tensor& input_ids, const Tensor& positions,
                          const Tensor& is_rejected_token_mask, const Tensor& is_masked_token_mask,
                          const Tensor& new_token_indices, const OptionalTensor& hidden_state_mapping,
                          int64_t padding_token_id, int64_t parallel_drafting_token_id,
                          int64_t num_padding_slots_per_request, bool shift_input_ids) {
  const DraftInputChecks<Backend> checks("expand_draft_inputs_", target_token_ids);
  ExpandDraftInputs body;
  body.target_token_ids = checks.ints(target_token_ids, "target_token_ids", "[num_tokens]");
  body.num_tokens = target_token_ids.size(0);
  body.target_positions =
      checks.ints_exactly(target_positions, "target_positions", "[num_tokens]", body.num_tokens);
  body.query_start_loc = checks.query_start_loc(query_start_loc, body.num_tokens, "target_token_ids");
  const int64_t batch = query_start_loc.size(0) - 1;
  body.next_token_ids = checks.ints_exactly(next_token_ids, "next_token_ids", "[batch]", batch);
  body.query_end_loc = checks.ints_exactly(query_end_loc, "query_end_loc", "[batch]", batch);
  checks.positive_int32(num_padding_slots_per_request, "num_padding_slots_per_request");
  body.num_padding_slots_per_request = num_padding_slots_per_request;
  body.shift_input_ids = shift_input_ids;

  constexpr char kShape[] = "[num_outputs] or longer";
  // Where the totals cannot be read, outputs may be too short: what they have no room for is dropped.
  int64_t end = 0, num_outputs = 0;
  if constexpr (Backend::kValuesOnHost) {
    end = at(body.query_start_loc, batch);
    num_outputs = end + batch * (num_padding_slots_per_request - (shift_input_ids ? 1 : 0));
  }
  body.input_ids = checks.output(input_ids, "input_ids", kShape, num_outputs);
  body.positions = checks.output(positions, "positions", kShape, num_outputs);
  body.is_rejected_token_mask =
      checks.bool_output(is_rejected_token_mask, "is_rejected_token_mask", kShape, num_outputs);
  body.is_masked_token_mask =
      checks.bool_output(is_masked_token_mask, "is_masked_token_mask", kShape, num_outputs);
  body.num_outputs = std::min(
      {input_ids.size(0), positions.size(0), is_rejected_token_mask.size(0), is_masked_token_mask.size(0)});
  body.new_token_indices = checks.output(new_token_indices, "new_token_indices",
                                         "[batch * num_padding_slots_per_request] or longer",
                                         batch * num_padding_slots_per_request);
  if (shift_input_ids) {
    checks.require(hidden_state_mapping.has_value(),
                   "hidden_state_mapping must be a tensor with shift_input_ids, got none");
    body.hidden_state_mapping =
        checks.output(*hidden_state_mapping, "hidden_state_mapping", "[num_tokens] or longer", end);
    body.num_mapped = hidden_state_mapping->size(0);
  } else if (hidden_state_mapping) {
    checks.same_device(*hidden_state_mapping, "hidden_state_mapping");
  }
  checks.token_id(padding_token_id, "padding_token_id", body.input_ids);
  checks.token_id(parallel_drafting_token_id, "parallel_drafting_token_id", body.input_ids);
  body.padding_token_id = padding_token_id;
  body.parallel_drafting_token_id = parallel_drafting_token_id;
  Backend::for_each_request(checks, target_token_ids, batch, body);
}

template <class Backend>
void expand_dflash_inputs_(const Tensor& next_token_ids, const Tensor& target_positions,
                           const Tensor& block_table, const Tensor& query_start_loc,
                           const OptionalTensor& num_rejected_tokens, const Tensor& input_ids,
                           const Tensor& context_positions, const Tensor& query_positions,
                           const Tensor& context_slot_mapping, const Tensor& query_slot_mapping,
                           const Tensor& token_indices, int64_t parallel_drafting_token_id,
                           int64_t block_size, int64_t num_queries_per_request,
                           int64_t num_speculative_tokens, std::optional<int64_t> max_model_len,
                           int64_t pad_slot_id) {
  const DraftInputChecks<Backend> checks("expand_dflash_inputs_", next_token_ids);
  ExpandDFlashInputs body;
  body.target_positions = checks.ints(target_positions, "target_positions", "[num_tokens]");
  body.num_tokens = target_positions.size(0);
  body.query_start_loc = checks.query_start_loc(query_start_loc, body.num_tokens, "target_positions");
  const int64_t batch = query_start_loc.size(0) - 1;
  body.next_token_ids = checks.ints_exactly(next_token_ids, "next_token_ids", "[batch]", batch);
  if (num_rejected_tokens.has_value()) {
    body.num_rejected_tokens =
        checks.ints_exactly(*num_rejected_tokens, "num_rejected_tokens", "[batch]", batch);
  }
  checks.positive_int32(num_queries_per_request, "num_queries_per_request");
  checks.positive_int32(num_speculative_tokens, "num_speculative_tokens");
  body.num_queries_per_request = num_queries_per_request;
  body.num_speculative_tokens = num_speculative_tokens;

  constexpr char kContext[] = "[num_tokens] or longer";
  constexpr char kQueries[] = "[batch * num_queries_per_request] or longer";
  // As for expand_draft_inputs_.
  const int64_t num_context = Backend::kValuesOnHost ? at(body.query_start_loc, batch) : 0;
  const int64_t num_queries = batch * num_queries_per_request;
  body.input_ids = checks.output(input_ids, "input_ids", kQueries, num_queries);
  body.context_positions = checks.output(context_positions, "context_positions", kContext, num_context);
  body.query_positions = checks.output(query_positions, "query_positions", kQueries, num_queries);
  body.context_slot_mapping =
      checks.output(context_slot_mapping, "context_slot_mapping", kContext, num_context);
  body.num_context = std::min(context_positions.size(0), context_slot_mapping.size(0));
  body.query_slot_mapping = checks.output(query_slot_mapping, "query_slot_mapping", kQueries, num_queries);
  body.token_indices =
      checks.output(token_indices, "token_indices", "[batch * num_speculative_tokens] or longer",
                    batch * num_speculative_tokens);
  checks.token_id(parallel_drafting_token_id, "parallel_drafting_token_id", body.input_ids);
  body.parallel_drafting_token_id = parallel_drafting_token_id;
  body.max_model_len = largest_value(body.query_positions);
  if (max_model_len.has_value()) {
    checks.positive_int32(*max_model_len, "max_model_len");
    body.max_model_len = *max_model_len;
  }
  body.table = checks.slot_table(block_table, batch, block_size, pad_slot_id,
                                 {body.context_slot_mapping, body.query_slot_mapping});
  Backend::for_each_request(checks, next_token_ids, batch, body);
}

}  // namespace specdec_ops

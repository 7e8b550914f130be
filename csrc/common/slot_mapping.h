#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/spans.h"
#include "common/views.h"

/// Preparation of a draft model's inputs over a paged key-value cache: bodies for host and device.
///
/// Each is called as body(request, lane, num_lanes): the lanes of a request, on a GPU kLanes threads, share
/// its tokens, and none reads what another wrote. Totals are clamped: wherever they lead, no access leaves a
/// tensor.
namespace specdec_ops {

SPECDEC_HOST_DEVICE int64_t largest_value(const MutableIntView& view) {
  return view.is_int64 ? INT64_MAX : INT32_MAX;
}

/// A token id that can be embedded, or `otherwise`: -1 stands for no token, and larger ids than the output
/// holds are none.
SPECDEC_HOST_DEVICE int64_t token_or(int64_t id, int64_t otherwise, const MutableIntView& output) {
  return id >= 0 && id <= largest_value(output) ? id : otherwise;
}

/// Where a block table puts the positions of a request.
struct SlotTable {
  IntView blocks;  // [batch, num_columns]
  int64_t num_columns = 0;
  int64_t block_size = 1;
  int64_t last_block = -1;  // the last one whose slots the output can hold
  int64_t pad_slot_id = -1;

  SPECDEC_HOST_DEVICE int64_t slot(int64_t request, int64_t position) const {
    if (position < 0) return pad_slot_id;
    const int64_t column = position / block_size;
    if (column >= num_columns) return pad_slot_id;
    const int64_t block = at(blocks, request, column);
    if (block < 0 || block > last_block) return pad_slot_id;
    return block * block_size + (position - column * block_size);
  }

  SPECDEC_HOST_DEVICE int64_t num_positions() const { return num_columns * block_size; }
};

/// A "request" past the last one pads the slots that no token has.
struct ComputeSlotMapping {
  static constexpr int kLanes = 256;

  IntView query_start_loc;
  int64_t batch = 0;
  IntView positions;
  int64_t num_tokens = 0;
  SlotTable table;
  MutableIntView slot_mapping;
  int64_t num_slots = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    if (request == batch) {
      pad(0, clamped(at(query_start_loc, 0), 0, num_tokens), lane, num_lanes);
      pad(clamped(at(query_start_loc, batch), 0, num_tokens), num_slots, lane, num_lanes);
      return;
    }
    const Span span = span_at(query_start_loc, request, num_tokens);
    for (int64_t i = span.begin + lane; i < span.end; i += num_lanes) {
      put(slot_mapping, i, table.slot(request, at(positions, i)));
    }
  }

  SPECDEC_HOST_DEVICE void pad(int64_t begin, int64_t end, int64_t lane, int64_t num_lanes) const {
    if (slot_mapping.is_int64 && slot_mapping.stride == 1) {  // an engine's buffer: plain stores
      int64_t* slots = static_cast<int64_t*>(slot_mapping.data);
      for (int64_t i = begin + lane; i < end; i += num_lanes) slots[i] = table.pad_slot_id;
      return;
    }
    for (int64_t i = begin + lane; i < end; i += num_lanes) put(slot_mapping, i, table.pad_slot_id);
  }
};

/// One drafted token further. A "request" past the batch pads its slot.
struct AdvanceDraftStep {
  static constexpr int kLanes = 1;

  IntView positions;
  int64_t batch = 0;
  SlotTable table;
  MutableIntView seq_lens;
  MutableIntView out_positions;
  MutableIntView out_slot_mapping;
  int64_t max_model_len = 0;
  int64_t overflow_position = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t) const {
    if (lane != 0) return;
    if (request >= batch) {
      put(out_slot_mapping, request, table.pad_slot_id);
      return;
    }
    const int64_t position = at(positions, request);
    const int64_t seq_len = at(seq_lens, request);
    const int64_t addressable = table.num_positions();
    const int64_t max_seq_len = max_model_len < addressable ? max_model_len : addressable;
    if (position < 0 || seq_len <= 0) {
      put(out_positions, request, 0);
      put(out_slot_mapping, request, table.pad_slot_id);
      put(seq_lens, request, 0);
    } else if (position >= max_model_len - 1) {
      put(out_positions, request, overflow_position);
      put(out_slot_mapping, request, table.pad_slot_id);
      put(seq_lens, request, max_seq_len < 1 ? max_seq_len : 1);
    } else {
      put(out_positions, request, position + 1);
      put(out_slot_mapping, request, table.slot(request, position + 1));
      put(seq_lens, request, seq_len < max_seq_len ? seq_len + 1 : max_seq_len);
    }
  }
};

/// The tokens of a request become [kept | next token | masks | rejected].
struct ExpandDraftInputs {
  static constexpr int kLanes = 256;

  IntView target_token_ids;
  IntView target_positions;
  IntView next_token_ids;
  IntView query_start_loc;
  IntView query_end_loc;
  int64_t num_tokens = 0;
  MutableIntView input_ids;
  MutableIntView positions;
  MutableBoolView is_rejected_token_mask;
  MutableBoolView is_masked_token_mask;
  MutableIntView new_token_indices;
  MutableIntView hidden_state_mapping;  // written only with shift_input_ids
  int64_t num_mapped = 0;               // what hidden_state_mapping holds
  int64_t num_outputs = 0;              // what every output over tokens holds
  int64_t padding_token_id = 0;
  int64_t parallel_drafting_token_id = 0;
  int64_t num_padding_slots_per_request = 0;
  bool shift_input_ids = false;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    const Span span = span_at(query_start_loc, request, num_tokens);
    const int64_t num_inputs = span.size();
    const int64_t shift = shift_input_ids ? 1 : 0;
    const int64_t num_added = num_padding_slots_per_request - shift;
    const int64_t out_begin = span.begin + request * num_added;
    const int64_t first_new_token = request * num_padding_slots_per_request;

    int64_t num_kept = 0, num_new_tokens = 0, start_position = 0;
    if (num_inputs > 0) {
      const int64_t last_kept = clamped(at(query_end_loc, request), span.begin, span.end - 1);
      num_kept = last_kept - span.begin + 1 - shift;
      num_new_tokens = num_padding_slots_per_request;
      start_position = at(target_positions, span.begin);
      if (start_position < 0) start_position = 0;
    } else {
      for (int64_t i = lane; i < num_padding_slots_per_request; i += num_lanes) {
        put(new_token_indices, first_new_token + i, -1);
      }
    }

    for (int64_t j = lane; j < num_inputs + num_added; j += num_lanes) {
      const int64_t out = out_begin + j;
      if (out >= num_outputs) break;
      const int64_t new_token = j - num_kept;
      const bool is_rejected = new_token >= num_new_tokens;
      int64_t id = padding_token_id;
      if (new_token < 0) {
        id = token_or(at(target_token_ids, span.begin + shift + j), padding_token_id, input_ids);
      } else if (!is_rejected) {
        id = new_token == 0 ? token_or(at(next_token_ids, request), padding_token_id, input_ids)
                            : parallel_drafting_token_id;
        put(new_token_indices, first_new_token + new_token, out);
      }
      const int64_t last_start = largest_value(positions) - j;
      put(input_ids, out, id);
      put(positions, out, is_rejected ? 0 : (start_position < last_start ? start_position : last_start) + j);
      put(is_rejected_token_mask, out, is_rejected);
      put(is_masked_token_mask, out, new_token > 0 && !is_rejected);
    }

    if (shift_input_ids) {
      for (int64_t j = lane; j < num_inputs && span.begin + j < num_mapped; j += num_lanes) {
        put(hidden_state_mapping, span.begin + j, out_begin + j);
      }
    }
  }
};

/// The tokens of a request become context, and [next token | masks] become its queries.
struct ExpandDFlashInputs {
  static constexpr int kLanes = 256;

  IntView next_token_ids;
  IntView target_positions;
  IntView query_start_loc;
  IntView num_rejected_tokens;  // absent: none
  int64_t num_tokens = 0;
  SlotTable table;
  MutableIntView input_ids;
  MutableIntView context_positions;
  MutableIntView query_positions;
  MutableIntView context_slot_mapping;
  int64_t num_context = 0;  // what both outputs over the context hold
  MutableIntView query_slot_mapping;
  MutableIntView token_indices;
  int64_t parallel_drafting_token_id = 0;
  int64_t num_queries_per_request = 0;
  int64_t num_speculative_tokens = 0;
  int64_t max_model_len = 0;

  SPECDEC_HOST_DEVICE void operator()(int64_t request, int64_t lane, int64_t num_lanes) const {
    const Span span = span_at(query_start_loc, request, num_tokens);
    const int64_t largest_position = largest_value(context_positions);
    for (int64_t i = span.begin + lane; i < span.end && i < num_context; i += num_lanes) {
      const int64_t position = at(target_positions, i);
      put(context_positions, i, clamped(position, 0, largest_position));
      put(context_slot_mapping, i, table.slot(request, position));
    }

    int64_t last_position = -1;  // of the last kept token
    if (span.size() > 0) {
      const int64_t rejected = num_rejected_tokens ? at(num_rejected_tokens, request) : 0;
      const int64_t last_kept = span.end - 1 - clamped(rejected, 0, span.size() - 1);
      last_position = at(target_positions, last_kept);
    }
    for (int64_t query = lane; query < num_queries_per_request; query += num_lanes) {
      const int64_t out = request * num_queries_per_request + query;
      int64_t position = 0, slot = table.pad_slot_id;
      if (last_position >= 0) {
        const bool overflows = last_position >= max_model_len - 1 - query;
        position = overflows ? max_model_len - 1 : last_position + 1 + query;
        if (!overflows) slot = table.slot(request, position);
      }
      put(input_ids, out,
          query == 0 ? token_or(at(next_token_ids, request), parallel_drafting_token_id, input_ids)
                     : parallel_drafting_token_id);
      put(query_positions, out, position);
      put(query_slot_mapping, out, slot);
      if (query > 0 && query <= num_speculative_tokens) {
        put(token_indices, request * num_speculative_tokens + query - 1, out);
      }
    }
  }
};

}  // namespace specdec_ops

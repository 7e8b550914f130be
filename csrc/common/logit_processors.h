#pragma once

#include <cstdint>

#include "common/draft_counts.h"
#include "common/mutable_row.h"
#include "common/views.h"

/// What is done to rows of logits before they become laws. A row belongs to a slot of a request: what its
/// token would follow are the request's output so far and its drafts in earlier slots.
namespace specdec_ops {

/// Lists of ids, one for each request; of a list only ids in [0, vocab_size) count.
struct IdLists {
  IntView ids;
  int64_t width = 0;

  SPECDEC_HOST_DEVICE explicit operator bool() const { return static_cast<bool>(ids); }
};

/// Tokens of each request, as many as its length says.
struct TokenLists {
  IntView ids;
  IntView lens;
  int64_t width = 0;

  SPECDEC_HOST_DEVICE int64_t length(int64_t request) const {
    return ids ? clamped(at(lens, request), 0, width) : 0;
  }
};

struct LogitProcessors {
  int64_t batch = 0;
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  void* logits = nullptr;
  int64_t logits_stride = 0;
  DType dtype = DType::kFloat32;
  /// Without ends no request has drafts.
  DraftCounts drafts;
  IntView draft_token_ids;

  IdLists bias_ids;
  RealView bias;
  bool has_penalties = false;
  RealView repetition_penalty, frequency_penalty, presence_penalty;
  TokenLists prompt, output;
  IdLists allowed;
  IdLists stops;
  IntView min_tokens;
  /// Of the output, where its tokens are not needed.
  IntView output_lens;
  /// [batch, num_bad_words * bad_word_width].
  IntView bad_words;
  int64_t num_bad_words = 0, bad_word_width = 0;
  /// [num_rows, words of 32 ids].
  const int32_t* grammar_bitmask = nullptr;
  int64_t grammar_row_stride = 0, grammar_stride = 0;

  SPECDEC_HOST_DEVICE Span drafts_of(int64_t request) const {
    return drafts.ends ? drafts.of(request) : Span{0, 0};
  }
  SPECDEC_HOST_DEVICE bool is_id(int64_t id) const { return id >= 0 && id < vocab_size; }
  SPECDEC_HOST_DEVICE MutableRow row(int64_t index) const {
    const int64_t bytes = index * logits_stride * (dtype == DType::kFloat32 ? 4 : 2);
    return {static_cast<char*>(logits) + bytes, dtype};
  }
  SPECDEC_HOST_DEVICE MutableRow row_of_slot(int64_t request, int64_t slot) const {
    return row(drafts_of(request).begin + request + slot);
  }
  SPECDEC_HOST_DEVICE int64_t num_words() const { return (vocab_size + 31) / 32; }

  /// Entry j of a list of ids, -1 where it is no id, or the list has that id before.
  SPECDEC_HOST_DEVICE int64_t distinct_id(const IdLists& lists, int64_t request, int64_t j) const {
    const int64_t id = at(lists.ids, request, j);
    if (!is_id(id)) return -1;
    for (int64_t i = 0; i < j; ++i) {
      if (at(lists.ids, request, i) == id) return -1;
    }
    return id;
  }

  /// Adds entry j of the request's biases, in each of its rows.
  SPECDEC_HOST_DEVICE void add_bias(int64_t request, int64_t j) const {
    const int64_t id = distinct_id(bias_ids, request, j);
    if (id < 0) return;
    const auto value = static_cast<float>(at(bias, request, j));
    const int64_t num_slots = drafts_of(request).size() + 1;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      const MutableRow logits_row = row_of_slot(request, slot);
      logits_row.set(id, logits_row.get(id) + value);
    }
  }

  struct Penalties {
    float repetition, frequency, presence;

    SPECDEC_HOST_DEVICE bool are_neutral() const {
      return repetition == 1.0f && frequency == 0.0f && presence == 0.0f;
    }
    /// `count`: of the id in the output.
    SPECDEC_HOST_DEVICE float applied(float logit, int64_t count) const {
      float result = logit > 0.0f ? logit / repetition : logit * repetition;
      if (count > 0) result = (result - frequency * static_cast<float>(count)) - presence;
      return result;
    }
  };
  SPECDEC_HOST_DEVICE Penalties penalties_of(int64_t request) const {
    return {static_cast<float>(at(repetition_penalty, request)),
            static_cast<float>(at(frequency_penalty, request)),
            static_cast<float>(at(presence_penalty, request))};
  }

  /// Penalises an id in the rows of a request that follow it. `count`: in the output so far.
  SPECDEC_HOST_DEVICE void penalise(const Penalties& penalties, int64_t request, int64_t id, bool is_seen,
                                    int64_t count) const {
    const Span own = drafts_of(request);
    for (int64_t slot = 0; slot <= own.size(); ++slot) {
      if (slot > 0 && at(draft_token_ids, own.begin + slot - 1) == id) {
        is_seen = true;
        ++count;
      }
      if (!is_seen) continue;
      const MutableRow logits_row = row_of_slot(request, slot);
      logits_row.set(id, penalties.applied(logits_row.get(id), count));
    }
  }

  /// The draft in a slot, -1 where it is no id, or an earlier slot has that id.
  SPECDEC_HOST_DEVICE int64_t distinct_draft(int64_t request, int64_t slot) const {
    const Span own = drafts_of(request);
    const int64_t id = at(draft_token_ids, own.begin + slot);
    if (!is_id(id)) return -1;
    for (int64_t i = 0; i < slot; ++i) {
      if (at(draft_token_ids, own.begin + i) == id) return -1;
    }
    return id;
  }

  /// Masks stop token j in the rows whose token would come before the request's least number of tokens.
  SPECDEC_HOST_DEVICE void mask_stop(int64_t request, int64_t j) const {
    const int64_t id = at(stops.ids, request, j);
    if (!is_id(id)) return;
    const int64_t missing = at(min_tokens, request) - at(output_lens, request);
    const int64_t num_slots = drafts_of(request).size() + 1;
    for (int64_t slot = 0; slot < num_slots && slot < missing; ++slot) row_of_slot(request, slot).mask(id);
  }

  /// The token that is `distance` before the one of a slot, at least 1; -1 where the output is shorter.
  SPECDEC_HOST_DEVICE int64_t token_before(int64_t request, int64_t slot, int64_t distance) const {
    const Span own = drafts_of(request);
    if (distance <= slot) return at(draft_token_ids, own.begin + slot - distance);
    const int64_t index = output.length(request) + slot - distance;
    return index >= 0 ? at(output.ids, request, index) : -1;
  }

  /// Masks the last token of a bad word in the rows where the tokens before it are the rest of the word.
  SPECDEC_HOST_DEVICE void mask_bad_word(int64_t request, int64_t word) const {
    const int64_t begin = word * bad_word_width;
    int64_t length = 0;
    while (length < bad_word_width && at(bad_words, request, begin + length) >= 0) ++length;
    if (length == 0) return;
    const int64_t last = at(bad_words, request, begin + length - 1);
    if (!is_id(last)) return;
    const int64_t num_slots = drafts_of(request).size() + 1;
    for (int64_t slot = 0; slot < num_slots; ++slot) {
      bool matches = true;
      for (int64_t distance = 1; distance < length && matches; ++distance) {
        matches =
            token_before(request, slot, distance) == at(bad_words, request, begin + length - 1 - distance);
      }
      if (matches) row_of_slot(request, slot).mask(last);
    }
  }

  /// Bits of 32 ids of a row, a 1 where the grammar allows the id.
  SPECDEC_HOST_DEVICE uint32_t grammar_word(int64_t row_index, int64_t word) const {
    if (grammar_bitmask == nullptr) return ~0u;
    return static_cast<uint32_t>(grammar_bitmask[row_index * grammar_row_stride + word * grammar_stride]);
  }
};

}  // namespace specdec_ops

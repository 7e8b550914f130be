#pragma once

#include <cstdint>

#include "common/numerics.h"
#include "common/views.h"

/// Drafters whose vocabulary is a part of the target's: from their ids to the target's, and from their logits
/// to rows over the target's ids.
namespace specdec_ops {

/// Where a draft id leads: the target ids themselves, or their distances from the draft ids.
struct DraftVocabulary {
  IntView targets;
  int64_t size = 0;
  bool are_offsets = false;

  /// -1 where `id` is no draft id, or leads to a negative one.
  SPECDEC_HOST_DEVICE int64_t target_of(int64_t id) const {
    if (id < 0 || id >= size) return -1;
    const int64_t target = at(targets, id) + (are_offsets ? id : 0);
    return target >= 0 ? target : -1;
  }
};

struct MapDraftTokens {
  DraftVocabulary vocabulary;
  int64_t num_ids = 0;
  IntView draft_token_ids;
  MutableIntView token_ids;

  SPECDEC_HOST_DEVICE void operator()(int64_t index) const {
    put(token_ids, index, vocabulary.target_of(at(draft_token_ids, index)));
  }
};

/// A row of `expanded` from one of `draft`, whose elements are contiguous.
struct ExpandDraftLogits {
  DraftVocabulary vocabulary;
  int64_t num_rows = 0;
  int64_t vocab_size = 0;
  RowsView draft;
  RealView temperature;
  void* expanded = nullptr;
  int64_t expanded_stride = 0;

  /// [vocab_size] and [vocabulary.size]: of each target id a list of the draft ids that lead to it, in any
  /// order, ended by -1.
  int32_t* first = nullptr;
  int32_t* next = nullptr;

  /// Weights of ids that share a target are whole multiples of this part of the largest.
  static constexpr double kUnits = 0x1p40;

  /// The logit of a target id: that of its draft id, -inf where there is none, or of several ids that whose
  /// weight is the sum of theirs. The sum is one of whole numbers: it does not depend on the order.
  /// `logit(d)` reads the row.
  template <class Logit>
  SPECDEC_HOST_DEVICE float combined(float row_temperature, int64_t target, const Logit& logit) const {
    const int32_t head = first[target];
    if (head < 0) return -__builtin_inff();
    float largest = logit(head);
    if (next[head] < 0) return largest;
    bool has_nan = false;
    for (int32_t id = head; id >= 0; id = next[id]) {
      const float value = logit(id);
      has_nan |= value != value;
      if (value > largest) largest = value;
    }
    if (has_nan) return __builtin_nanf("");
    if (is_greedy(row_temperature) || largest == __builtin_inff() || largest == -__builtin_inff()) {
      return largest;
    }
    const double scale = static_cast<double>(log2_scale(row_temperature));
    int64_t units = 0;
    for (int32_t id = head; id >= 0; id = next[id]) {
      const double distance = static_cast<double>(logit(id)) - static_cast<double>(largest);
      units += static_cast<int64_t>(exp2_f64(distance * scale) * kUnits);
    }
    const double more = log2_f64(static_cast<double>(units) / kUnits) / scale;
    return static_cast<float>(static_cast<double>(largest) + more);
  }
};

}  // namespace specdec_ops

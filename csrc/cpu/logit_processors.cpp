#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "common/logit_processors_ops.h"
#include "cpu/kernels/float_environment.h"

namespace specdec_ops::cpu {
namespace {

/// Of an id's count: it occurs in the prompt, and it was penalised.
constexpr uint32_t kInPrompt = 1u << 31, kIsDone = 1u << 30;

/// One worker's memory.
struct Scratch {
  /// How often each id occurs in the output; all 0 between requests.
  std::vector<uint32_t> counts;
  std::vector<uint32_t> allowed;
};

template <class Visit>
void for_each_token(const LogitProcessors& apply, const TokenLists& tokens, int64_t request,
                    const Visit& visit) {
  const int64_t length = tokens.length(request);
  for (int64_t i = 0; i < length; ++i) {
    const int64_t id = at(tokens.ids, request, i);
    if (apply.is_id(id)) visit(id);
  }
}

void apply_penalties(const LogitProcessors& apply, int64_t request, std::vector<uint32_t>& counts) {
  const LogitProcessors::Penalties penalties = apply.penalties_of(request);
  if (penalties.are_neutral()) return;
  counts.resize(static_cast<size_t>(apply.vocab_size), 0);
  const auto count_of = [&](int64_t id) -> uint32_t& { return counts[static_cast<size_t>(id)]; };
  for_each_token(apply, apply.prompt, request, [&](int64_t id) { count_of(id) |= kInPrompt; });
  for_each_token(apply, apply.output, request, [&](int64_t id) { ++count_of(id); });
  const auto penalise = [&](int64_t id) {
    uint32_t& count = count_of(id);
    if ((count & kIsDone) != 0) return;
    apply.penalise(penalties, request, id, count != 0, count & ~kInPrompt);
    count |= kIsDone;
  };
  for_each_token(apply, apply.prompt, request, penalise);
  for_each_token(apply, apply.output, request, penalise);
  const int64_t num_drafts = apply.drafts_of(request).size();
  for (int64_t slot = 0; slot < num_drafts; ++slot) {
    const int64_t id = apply.distinct_draft(request, slot);
    if (id >= 0) penalise(id);
  }
  const auto forget = [&](int64_t id) { count_of(id) = 0; };
  for_each_token(apply, apply.prompt, request, forget);
  for_each_token(apply, apply.output, request, forget);
  for (int64_t slot = 0; slot < num_drafts; ++slot) {
    const int64_t id = apply.distinct_draft(request, slot);
    if (id >= 0) forget(id);
  }
}

/// Packs the ids that a request is held to; false if there are none, and it may have all.
bool pack_allowed(const LogitProcessors& apply, int64_t request, std::vector<uint32_t>& words) {
  if (!apply.allowed) return false;
  words.assign(static_cast<size_t>(apply.num_words()), 0);
  bool has_ids = false;
  for (int64_t j = 0; j < apply.allowed.width; ++j) {
    const int64_t id = at(apply.allowed.ids, request, j);
    if (!apply.is_id(id)) continue;
    words[static_cast<size_t>(id / 32)] |= 1u << id % 32;
    has_ids = true;
  }
  return has_ids;
}

/// Masks the ids whose bits are 0, in a row of elements of Word, which are masked by the bits of -inf.
template <class Word>
void mask_row(const LogitProcessors& apply, int64_t row_index, const uint32_t* allowed, Word masked) {
  Word* row = static_cast<Word*>(apply.row(row_index).data);
  for (int64_t word = 0; word < apply.num_words(); ++word) {
    uint32_t bits = apply.grammar_word(row_index, word);
    if (allowed != nullptr) bits &= allowed[word];
    const int64_t begin = word * 32, rest = apply.vocab_size - begin;
    if (rest < 32) bits |= ~0u << rest;
    if (bits == 0) {
      std::fill_n(row + begin, 32, masked);
      continue;
    }
    for (uint32_t left = ~bits; left != 0; left &= left - 1) row[begin + __builtin_ctz(left)] = masked;
  }
}

void apply_to_request(const LogitProcessors& apply, int64_t request, Scratch& scratch) {
  for (int64_t j = 0; j < apply.bias_ids.width; ++j) apply.add_bias(request, j);
  if (apply.has_penalties) apply_penalties(apply, request, scratch.counts);
  const bool is_held = pack_allowed(apply, request, scratch.allowed);
  if (is_held || apply.grammar_bitmask != nullptr) {
    const Span drafts = apply.drafts_of(request);
    const uint32_t* allowed = is_held ? scratch.allowed.data() : nullptr;
    for (int64_t slot = 0; slot <= drafts.size(); ++slot) {
      const int64_t row = drafts.begin + request + slot;
      switch (apply.dtype) {
        case DType::kBFloat16:
          mask_row<uint16_t>(apply, row, allowed, 0xFF80);
          break;
        case DType::kFloat16:
          mask_row<uint16_t>(apply, row, allowed, 0xFC00);
          break;
        default:
          mask_row<uint32_t>(apply, row, allowed, 0xFF800000);
      }
    }
  }
  for (int64_t j = 0; j < apply.stops.width; ++j) apply.mask_stop(request, j);
  for (int64_t word = 0; word < apply.num_bad_words; ++word) apply.mask_bad_word(request, word);
}

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  static void apply_logit_processors(const Checks&, const LogitProcessors& apply, const Tensor&) {
    // What a request costs depends on its lists; a row of bits alone is worth a thread.
    constexpr int64_t kElementsPerWorker = 262144;
    const int64_t grain = std::max<int64_t>(kElementsPerWorker / apply.vocab_size, 1);
    torch::stable::parallel_for(0, apply.batch, grain, [&](int64_t begin, int64_t end) {
      const DenormalsOn environment;
      Scratch scratch;
      for (int64_t request = begin; request < end; ++request) apply_to_request(apply, request, scratch);
    });
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("apply_logit_processors_",
         TORCH_BOX(&specdec_ops::apply_logit_processors_<specdec_ops::cpu::Backend>));
}

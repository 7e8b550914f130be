#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "common/draft_vocabulary_ops.h"
#include "common/mutable_row.h"
#include "cpu/kernels/float_environment.h"

namespace specdec_ops::cpu {
namespace {

template <class From, class To>
void expand_row(const ExpandDraftLogits& expand, int64_t row) {
  const From* draft = static_cast<const From*>(expand.draft.data) + row * expand.draft.stride;
  To* expanded = static_cast<To*>(expand.expanded) + row * expand.expanded_stride;
  const auto temperature = static_cast<float>(at(expand.temperature, row));
  for (int64_t target = 0; target < expand.vocab_size; ++target) {
    expanded[target] = narrowed<To>(
        expand.combined(temperature, target, [&](int32_t id) { return static_cast<float>(draft[id]); }));
  }
}

struct Backend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  static void map_draft_tokens(const Checks&, const MapDraftTokens& map, const Tensor&) {
    for (int64_t index = 0; index < map.num_ids; ++index) map(index);
  }

  static void expand_draft_logits(const Checks&, ExpandDraftLogits expand, DType expanded_dtype,
                                  const Tensor&) {
    std::vector<int32_t> first(static_cast<size_t>(expand.vocab_size), -1);
    std::vector<int32_t> next(static_cast<size_t>(expand.vocabulary.size), -1);
    for (int64_t id = 0; id < expand.vocabulary.size; ++id) {
      int32_t& head = first[static_cast<size_t>(expand.vocabulary.target_of(id))];
      next[static_cast<size_t>(id)] = head;
      head = static_cast<int32_t>(id);
    }
    expand.first = first.data();
    expand.next = next.data();
    constexpr int64_t kElementsPerWorker = 32768;
    const int64_t grain = std::max<int64_t>(kElementsPerWorker / expand.vocab_size, 1);
    visit_dtype(expand.draft.dtype, [&](auto* from) {
      visit_dtype(expanded_dtype, [&](auto* to) {
        using From = std::remove_pointer_t<decltype(from)>;
        using To = std::remove_pointer_t<decltype(to)>;
        torch::stable::parallel_for(0, expand.num_rows, grain, [&](int64_t begin, int64_t end) {
          const DenormalsOn environment;
          for (int64_t row = begin; row < end; ++row) expand_row<From, To>(expand, row);
        });
      });
    });
  }
};

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  using specdec_ops::cpu::Backend;
  m.impl("map_draft_tokens", TORCH_BOX(&specdec_ops::map_draft_tokens<Backend>));
  m.impl("expand_draft_logits_", TORCH_BOX(&specdec_ops::expand_draft_logits_<Backend>));
}

// The bookkeeping ops, which users of vLLM know under this file's name.

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"

namespace specdec_ops::cpu {
namespace {

template <class Id>
void count_rows(const Tensor& token_ids, int64_t vocab_size, int32_t* num_accepted, int32_t* num_emitted) {
  const Id* ids = static_cast<const Id*>(token_ids.const_data_ptr());
  const int64_t batch = token_ids.size(0), width = token_ids.size(1);
  const int64_t row_stride = token_ids.stride(0), stride = token_ids.stride(1);
  for (int64_t r = 0; r < batch; ++r) {
    int32_t count = 0;
    for (int64_t i = 0; i < width; ++i) {
      const int64_t id = ids[r * row_stride + i * stride];
      count += id >= 0 && id < vocab_size;
    }
    num_emitted[r] = count;
    num_accepted[r] = count > 0 ? count - 1 : 0;
  }
}

std::tuple<Tensor, Tensor> count_accepted(const Tensor& token_ids, std::optional<int64_t> vocab_size) {
  const Checks checks("count_accepted");
  checks.integer(token_ids, "token_ids");
  checks.require(token_ids.dim() == 2, "token_ids must be [batch, k + 1], got ", shape_of(token_ids));
  checks.require(vocab_size.value_or(1) >= 1, "vocab_size must be at least 1, got ", vocab_size.value_or(1));
  Tensor num_accepted = empty_beside(token_ids, {token_ids.size(0)}, ScalarType::Int);
  Tensor num_emitted = empty_beside(token_ids, {token_ids.size(0)}, ScalarType::Int);
  const auto count = token_ids.scalar_type() == ScalarType::Long ? count_rows<int64_t> : count_rows<int32_t>;
  count(token_ids, vocab_size.value_or(INT64_MAX), static_cast<int32_t*>(num_accepted.mutable_data_ptr()),
        static_cast<int32_t*>(num_emitted.mutable_data_ptr()));
  return {std::move(num_accepted), std::move(num_emitted)};
}

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("count_accepted", TORCH_BOX(&specdec_ops::cpu::count_accepted));
}

// The bookkeeping ops, which users of vLLM know under this file's name.

#include "common/spec_decode_utils.h"

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/tensor_views.h"
#include "cuda/for_each_request.cuh"

namespace specdec_ops::cuda {
namespace {

std::tuple<Tensor, Tensor> count_accepted(const Tensor& token_ids, std::optional<int64_t> vocab_size) {
  const Checks checks("count_accepted");
  checks.integer(token_ids, "token_ids");
  checks.require(token_ids.dim() == 2, "token_ids must be [batch, k + 1], got ", shape_of(token_ids));
  checks.require(vocab_size.value_or(1) >= 1, "vocab_size must be at least 1, got ", vocab_size.value_or(1));
  const DeviceScope scope(token_ids);
  const int64_t batch = token_ids.size(0);
  Tensor num_accepted = empty_beside(token_ids, {batch}, ScalarType::Int);
  Tensor num_emitted = empty_beside(token_ids, {batch}, ScalarType::Int);
  CountAccepted count;
  count.token_ids = int_view(token_ids);
  count.width = token_ids.size(1);
  count.vocab_size = vocab_size.value_or(INT64_MAX);
  count.num_accepted = static_cast<int32_t*>(num_accepted.mutable_data_ptr());
  count.num_emitted = static_cast<int32_t*>(num_emitted.mutable_data_ptr());
  check(for_each_request(scope, batch, count), "count_accepted");
  return {std::move(num_accepted), std::move(num_emitted)};
}

}  // namespace
}  // namespace specdec_ops::cuda

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CUDA, m) {
  m.impl("count_accepted", TORCH_BOX(&specdec_ops::cuda::count_accepted));
}

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/chain_arguments.h"

namespace specdec_ops::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> sample(const Tensor& logits, const Tensor& temperature,
                                                  const OptionalTensor& seeds,
                                                  const OptionalTensor& positions,
                                                  std::optional<int64_t> draft_slot,
                                                  const OptionalTensor& uniforms,
                                                  std::optional<int64_t> vocab_size, ScalarType token_dtype) {
  const Checks checks("sample");
  ChainParams params;
  checks.require(logits.dim() == 2, "logits must be [batch, width], got ", shape_of(logits));
  params.batch = logits.size(0);
  checks.rows(logits, "logits", "[batch, width]", params.batch);
  params.target = rows_view(logits);
  params.vocab_size = checks.vocab_size(vocab_size, logits, "logits");
  set_temperature(checks, temperature, "[batch]", &params);
  set_seeds(checks, seeds, positions, "[batch]", &params);
  checks.require(!seeds || !uniforms, "seeds and uniforms must be at most one, got both");
  if (uniforms) set_uniforms(checks, *uniforms, "uniforms", "[batch]", params.batch, &params.final_uniforms);
  checks.require(seeds || uniforms || !any_sampling(params),
                 "seeds and positions, or uniforms, must be given unless every row is greedy, got neither");
  if (draft_slot) {
    checks.require(!uniforms, "draft_slot and uniforms must be at most one, got both");
    checks.require(*draft_slot >= 0 && *draft_slot <= INT32_MAX, "draft_slot must be in [0, 2^31), got ",
                   *draft_slot);
    params.final_stream = Stream::kDraft;
    params.final_slot = *draft_slot;
  }
  checks.require(token_dtype == ScalarType::Int || token_dtype == ScalarType::Long,
                 "token_dtype must be int32 or int64, got ", name_of(token_dtype));

  Tensor token_ids = empty_beside(logits, {params.batch}, token_dtype);
  Tensor logprobs = empty_beside(logits, {params.batch}, ScalarType::Float);
  Tensor logsumexp = empty_beside(logits, {params.batch}, ScalarType::Double);
  Tensor status = empty_beside(logits, {params.batch}, ScalarType::Int);
  params.token_ids = token_ids.mutable_data_ptr();
  params.token_ids_are_int64 = token_dtype == ScalarType::Long;
  params.logprobs = static_cast<float*>(logprobs.mutable_data_ptr());
  params.logsumexp = static_cast<double*>(logsumexp.mutable_data_ptr());
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  if (params.batch > 0) run_chain_on_torch_threads(params);
  return {std::move(token_ids), std::move(logprobs), std::move(logsumexp), std::move(status)};
}

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) { m.impl("sample", TORCH_BOX(&specdec_ops::cpu::sample)); }

#include <torch/csrc/stable/library.h>

#include <tuple>

#include "cpu/chain_arguments.h"

namespace specdec_ops::cpu {
namespace {

std::tuple<Tensor, Tensor> sample_recovered(
    const Tensor& target_logits, const Tensor& draft_token_ids, const Tensor& temperature,
    const OptionalTensor& draft_logits, const OptionalTensor& draft_probs,
    const OptionalTensor& draft_logsumexp, const OptionalTensor& draft_support_ids,
    const OptionalTensor& draft_support_logprobs, const OptionalTensor& draft_temperature,
    const OptionalTensor& has_draft_law, const OptionalTensor& seeds, const OptionalTensor& positions,
    const OptionalTensor& uniforms, std::optional<int64_t> vocab_size) {
  const Checks checks("sample_recovered");
  ChainParams params;
  params.rule = Rule::kRejectAll;
  params.drafts_per_request = 1;
  params.has_bonus_rows = false;
  checks.integer(draft_token_ids, "draft_token_ids");
  checks.require(draft_token_ids.dim() == 1, "draft_token_ids must be [num_drafts], got ",
                 shape_of(draft_token_ids));
  params.batch = draft_token_ids.size(0);
  params.draft_token_ids = int_view(draft_token_ids);
  checks.rows(target_logits, "target_logits", "[num_drafts, width]", params.batch);
  params.target = rows_view(target_logits);
  params.vocab_size = checks.vocab_size(vocab_size, target_logits, "target_logits");
  set_temperature(checks, temperature, "[num_drafts]", &params);
  set_draft_law(checks,
                {draft_logits, draft_probs, draft_logsumexp, draft_support_ids, draft_support_logprobs,
                 draft_temperature, has_draft_law},
                "[num_drafts]", params.batch, &params);
  set_seeds(checks, seeds, positions, "[num_drafts]", &params);
  checks.require(!seeds || !uniforms, "seeds and uniforms must be at most one, got both");
  if (uniforms)
    set_uniforms(checks, *uniforms, "uniforms", "[num_drafts]", params.batch, &params.final_uniforms);
  checks.require(seeds || uniforms || !any_sampling(params),
                 "seeds and positions, or uniforms, must be given unless every row is greedy, got neither");

  Tensor token_ids = empty_beside(draft_token_ids, {params.batch}, dtype_of(draft_token_ids));
  Tensor status = empty_beside(draft_token_ids, {params.batch}, ScalarType::Int);
  params.token_ids = token_ids.mutable_data_ptr();
  params.token_ids_are_int64 = dtype_of(draft_token_ids) == ScalarType::Long;
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  if (params.batch > 0) run_chain_on_torch_threads(params);
  return {std::move(token_ids), std::move(status)};
}

}  // namespace
}  // namespace specdec_ops::cpu

STABLE_TORCH_LIBRARY_IMPL(specdec_ops, CPU, m) {
  m.impl("sample_recovered", TORCH_BOX(&specdec_ops::cpu::sample_recovered));
}

#pragma once

#include <optional>
#include <tuple>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/draft_counts_checks.h"
#include "common/numerics.h"
#include "common/plan_verification.h"
#include "common/tensor_views.h"

/// A Backend says whether the values in tensors can be read here (kValuesOnHost), names the checks of the op
/// (checks), and makes the plan (plan_verification).
namespace specdec_ops {

/// Of a table in host memory.
inline void require_step_costs(const Checks& checks, const RealView& costs, int64_t size) {
  for (int64_t n = 0; n < size; ++n) {
    const double cost = at(costs, n);
    checks.require((cost > 0.0 || n == 0) && is_finite(cost), "step_costs must be positive and finite, got ",
                   cost, " for ", n, n == 1 ? " row" : " rows");
  }
}

template <class Backend>
std::tuple<Tensor, Tensor> plan_verification(const Tensor& accept_probs, const Tensor& cu_num_draft_tokens,
                                             std::optional<int64_t> budget,
                                             const OptionalTensor& device_budget,
                                             const OptionalTensor& step_costs) {
  const Checks checks = Backend::checks("plan_verification", accept_probs);
  PlanVerificationParams params;
  checks.real(accept_probs, "accept_probs");
  checks.require(accept_probs.dim() == 1, "accept_probs must be [num_drafts], got ", shape_of(accept_probs));
  params.accept_probs = real_view(accept_probs);
  checks.integer(cu_num_draft_tokens, "cu_num_draft_tokens");
  checks.require(cu_num_draft_tokens.dim() == 1 && cu_num_draft_tokens.size(0) >= 1,
                 "cu_num_draft_tokens must be [batch + 1], got ", shape_of(cu_num_draft_tokens));
  params.batch = cu_num_draft_tokens.size(0) - 1;
  params.drafts = draft_counts(checks, cu_num_draft_tokens, params.batch, accept_probs.size(0));
  if constexpr (Backend::kValuesOnHost) {
    largest_draft_count(checks, cu_num_draft_tokens, params.drafts, params.batch);
  }

  checks.require(budget || device_budget || step_costs, "budget or step_costs must be given, got neither");
  if (budget) {
    checks.require(*budget >= 0, "budget must be at least 0, got ", *budget);
    params.budget = *budget;
  }
  if (device_budget) {
    checks.integer(*device_budget, "budget");
    checks.require(device_budget->dim() == 0, "budget must be one number, got ", shape_of(*device_budget));
    params.device_budget = {device_budget->const_data_ptr(), 0, dtype_of(*device_budget) == ScalarType::Long};
    if constexpr (Backend::kValuesOnHost) {
      checks.require(at(params.device_budget, 0) >= 0, "budget must be at least 0, got ",
                     at(params.device_budget, 0));
    }
  }
  if (step_costs) {
    checks.real(*step_costs, "step_costs");
    checks.require(step_costs->dim() == 1 && step_costs->size(0) > params.batch,
                   "step_costs must be [max_rows + 1] with at least batch + 1 = ", params.batch + 1,
                   params.batch == 0 ? " element" : " elements", ", got ", shape_of(*step_costs));
    params.step_costs = real_view(*step_costs);
    params.num_step_costs = step_costs->size(0);
    if constexpr (Backend::kValuesOnHost)
      require_step_costs(checks, params.step_costs, params.num_step_costs);
  }

  Tensor num_draft_tokens = empty_beside(accept_probs, {params.batch}, ScalarType::Int);
  Tensor expected = empty_beside(accept_probs, {params.batch}, ScalarType::Double);
  params.num_draft_tokens = static_cast<int32_t*>(num_draft_tokens.mutable_data_ptr());
  params.expected_tokens = static_cast<double*>(expected.mutable_data_ptr());
  if (params.batch > 0) Backend::plan_verification(checks, params, accept_probs);
  return {std::move(num_draft_tokens), std::move(expected)};
}

}  // namespace specdec_ops

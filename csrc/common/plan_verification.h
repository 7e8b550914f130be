#pragma once

#include <cstdint>

#include "common/draft_counts.h"
#include "common/macros.h"
#include "common/views.h"

/// Which drafts to verify where not all fit into a step. Survivals are whole numbers, so that what is
/// expected of a plan is the same number in whatever order it is added up.
namespace specdec_ops {

/// A survival probability of 1. What is below 2^-32 counts as 0.
constexpr int64_t kCertain = int64_t{1} << 32;

struct PlanVerificationParams {
  int64_t batch = 0;
  DraftCounts drafts;
  RealView accept_probs;
  /// The most drafts of the step. The tensor, if there is one, has a smaller number or none.
  int64_t budget = INT64_MAX;
  IntView device_budget;
  /// May be empty. Entry n: what a step of n rows costs.
  RealView step_costs;
  int64_t num_step_costs = 0;
  int32_t* num_draft_tokens = nullptr;
  double* expected_tokens = nullptr;

  SPECDEC_HOST_DEVICE int64_t most_drafts() const {
    int64_t most = budget;
    if (device_budget && at(device_budget, 0) < most) most = at(device_budget, 0);
    // A request has a row for each draft and one more.
    if (step_costs && num_step_costs - 1 - batch < most) most = num_step_costs - 1 - batch;
    return most;
  }
};

/// Goes through the drafts of a request: the chance that all of them up to here are accepted.
class Survival {
 public:
  /// An estimate that is NaN or negative counts as 0, one above 1 as 1.
  SPECDEC_HOST_DEVICE int64_t next(double accept_prob) {
    product_ = accept_prob > 0.0 ? product_ * (accept_prob < 1.0 ? accept_prob : 1.0) : 0.0;
    return static_cast<int64_t>(product_ * static_cast<double>(kCertain));
  }

 private:
  double product_ = 1.0;
};

/// A draft that may be verified next.
struct Candidate {
  int64_t survival;
  int64_t slot;
  int64_t request;
};

/// The order of admission: the likelier draft first; of equal ones the earlier slot, then the lower request.
SPECDEC_HOST_DEVICE bool comes_before(const Candidate& a, const Candidate& b) {
  if (a.survival != b.survival) return a.survival > b.survival;
  return a.slot != b.slot ? a.slot < b.slot : a.request < b.request;
}

/// Whether one more draft, the last of `num_drafts`, lowers what is expected of a step by its cost.
/// `survivals` and `survivals_before` are summed over the drafts with and without it.
SPECDEC_HOST_DEVICE bool lowers_tokens_per_cost(const PlanVerificationParams& params, int64_t num_drafts,
                                                int64_t survivals, int64_t survivals_before) {
  const int64_t rows = params.batch + num_drafts;
  const auto tokens = static_cast<double>(params.batch * kCertain + survivals);
  const auto tokens_before = static_cast<double>(params.batch * kCertain + survivals_before);
  return tokens * at(params.step_costs, rows - 1) < tokens_before * at(params.step_costs, rows);
}

SPECDEC_HOST_DEVICE double expected_tokens(int64_t survivals) {
  return static_cast<double>(kCertain + survivals) / static_cast<double>(kCertain);
}

}  // namespace specdec_ops

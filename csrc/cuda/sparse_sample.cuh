#pragma once

#include "common/support_law.h"
#include "cuda/filters.cuh"

/// The draw from the most likely ids of a row, whose law is handed over: a CTA to a row, after the launch
/// that reads rows. Nothing is judged then.
namespace specdec_ops::cuda {

/// Shared memory of a CTA that draws: the ids of the law, the most likely first.
struct LawScratch {
  float logits[kLargestLawSize];
  int32_t ids[kLargestLawSize];
};

/// Two values to a lane, those of the places lane and lane + kWarpSize.
template <class T>
struct PairOfLane {
  static_assert(kLargestLawSize == 2 * kWarpSize, "a lane holds two places");
  T values[2] = {};

  __device__ T at_place(int place) const {
    return __shfl_sync(kAllLanes, values[place / kWarpSize], place % kWarpSize);
  }
  __device__ T sum(int count) const {
    T total = 0;
#pragma unroll 1
    for (int place = 0; place < count; ++place) total = total + at_place(place);
    return total;
  }
};

/// All threads take the same way until the first warp writes.
class SparseSample {
 public:
  __device__ SparseSample(const Plan& plan, const Request& request, RowFilter& filter, LawScratch& law)
      : params_(plan.params), request_(request), filter_(filter), law_(law) {}

  __device__ void run() {
    const bool draws = !request_.greedy && filter_.has_law();
    const int law_size = static_cast<int>(params_.law_size);
    if (draws) {
      const Filters filters = filters_of(params_.filters, request_.entry, params_.vocab_size);
      cut_ = filter_.cut_to_size(filter_.find_threshold(filters, params_.joint_filters), law_size);
    }
    // Where nothing is drawn, the lowest id with the largest logit.
    const int wanted = draws ? law_size : 1;
    const uint32_t found =
        filter_.list_largest(draws ? RowFilter::lowest(cut_) : filter_.row_max().max, wanted);
    const int count = static_cast<int>(min(found, static_cast<uint32_t>(wanted)));
    for (int place = static_cast<int>(threadIdx.x); place < count; place += num_threads()) {
      law_.logits[place] = filter_.listed_logit(static_cast<uint32_t>(place));
      law_.ids[place] = filter_.listed_id(static_cast<uint32_t>(place));
    }
    __syncthreads();
    const double total = draws ? 0.0 : filter_.total_weight();
    if (warp_index() != 0) return;
    if (draws) {
      draw(count);
    } else {
      take_largest(count > 0 ? law_.ids[0] : 0, total);
    }
  }

 private:
  __device__ void draw(int count) const {
    PairOfLane<double> log2_weights, weights, probs;
    for (int i = 0; i < 2; ++i) {
      const int place = lane_index() + i * kWarpSize;
      if (place >= count) continue;
      log2_weights.values[i] = log2_support_weight(law_.logits[place], filter_.row_max().max, request_.scale);
      weights.values[i] = exp2_out_of_line(log2_weights.values[i]);
    }
    const double log2_total = log2_f64(weights.sum(count));
    for (int i = 0; i < 2; ++i) {
      const int place = lane_index() + i * kWarpSize;
      if (place >= params_.law_size) continue;
      const bool is_kept = place < count;
      const float logprob = is_kept ? support_logprob(log2_weights.values[i], log2_total) : kMasked;
      put_law(place, is_kept ? law_.ids[place] : -1, logprob);
      if (is_kept) probs.values[i] = exp2_out_of_line(logprob * kLog2E);
    }

    const double threshold = support_number(token_draw()) * probs.sum(count);
    double prefix = 0.0;
    int chosen = 0;
#pragma unroll 1
    for (int place = 0; place < count; ++place) {
      const double prob = probs.at_place(place);
      // A uniform past the sum leaves no id: the last one with a probability stays chosen.
      if (prob > 0.0) chosen = place;
      prefix = prefix + prob;
      if (prefix > threshold) break;
    }
    const float logprob = support_logprob(log2_weights.at_place(chosen), log2_total);
    finish(law_.ids[chosen], logprob, support_logsumexp(filter_.row_max().max, request_.scale, log2_total));
  }

  /// Greedy, or without a law: a token that is certain.
  __device__ void take_largest(int32_t id, double total) const {
    for (int place = lane_index(); place < params_.law_size; place += kWarpSize) {
      put_law(place, place == 0 ? id : -1, place == 0 ? 0.0f : kMasked);
    }
    const RowLaw law = row_law_from_total(request_.scale, filter_.row_max(), total);
    const double logprob = filter_.has_law() ? law.log2_prob(filter_.logit_of(id)) * kLn2 : __builtin_nan("");
    finish(id, static_cast<float>(logprob), law.logsumexp);
  }

  __device__ TokenDraw token_draw() const {
    if (params_.final_uniforms) return TokenDraw::from(at(params_.final_uniforms, request_.index));
    const bool is_draft = params_.final_stream == Stream::kDraft;
    return TokenDraw::from(random_words(request_.seed, is_draft ? Stream::kDraft : Stream::kTarget,
                                        is_draft ? request_.final_slot : 0, request_.position));
  }

  __device__ void put_law(int place, int64_t id, float logprob) const {
    put(params_.law_ids, request_.index, place, id);
    params_.law_logprobs[request_.index * params_.law_size + place] = logprob;
  }

  __device__ void finish(int64_t token, float logprob, double logsumexp) const {
    if (lane_index() != 0) return;
    if (params_.token_ids_are_int64) {
      static_cast<int64_t*>(params_.token_ids)[request_.index] = token;
    } else {
      static_cast<int32_t*>(params_.token_ids)[request_.index] = static_cast<int32_t>(token);
    }
    params_.logprobs[request_.index] = logprob;
    params_.logsumexp[request_.index] = logsumexp;
    params_.thresholds[request_.index] = cut_;
    const RowMax row = filter_.row_max();
    const Status status = row.non_finite      ? Status::kNonFiniteTarget
                          : row.max > kMasked ? Status::kOk
                                              : Status::kMaskedTarget;
    params_.status[request_.index] = static_cast<int32_t>(status);
  }

  const ChainParams& params_;
  const Request& request_;
  RowFilter& filter_;
  LawScratch& law_;
  float cut_ = kMasked;
};

}  // namespace specdec_ops::cuda

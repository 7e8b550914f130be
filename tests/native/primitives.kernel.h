// What the native module shows of a tier, by pointer and dtype.

#include "cpu/kernels/blocks.kernel.h"

template <class Visit>
auto with_type(DType dtype, const void* data, const Visit& visit) {
  switch (dtype) {
    case DType::kBFloat16:
      return visit(static_cast<const BFloat16*>(data));
    case DType::kFloat16:
      return visit(static_cast<const Float16*>(data));
    default:
      return visit(static_cast<const float*>(data));
  }
}

void tier_block_stats(const void* data, DType dtype, int n, float scale, BlockStats* stats) {
  float padded[kBlockSize];
  with_type(dtype, data, [&](const auto* x) {
    const int rows = pad_block(x, n, padded);
    if (n == kBlockSize) {
      *stats = block_stats(x, rows, scale, x);
    } else {
      *stats =
          block_stats(static_cast<const float*>(padded), rows, scale, static_cast<const float*>(nullptr));
    }
    return 0;
  });
}

void tier_weights(const void* data, DType dtype, int n, float reference, float scale, float* weights) {
  float padded[kBlockSize], padded_weights[kBlockSize];
  with_type(dtype, data, [&](const auto* x) {
    const int rows = pad_block(x, n, padded);
    write_probs(ProbsOfLogits(static_cast<const float*>(padded), reference, scale, 1.0f), rows,
                padded_weights);
    memcpy(weights, padded_weights, static_cast<size_t>(n) * sizeof(float));
    return 0;
  });
}

void tier_to_float32(const void* data, DType dtype, int n, float* values) {
  float padded[kBlockSize];
  with_type(dtype, data, [&](const auto* x) {
    pad_block(x, n, padded);
    memcpy(values, padded, static_cast<size_t>(n) * sizeof(float));
    return 0;
  });
}

int tier_pick(const float* weights, int n, double chunk, double id) {
  float padded[kBlockSize] = {};
  memcpy(padded, weights, static_cast<size_t>(n) * sizeof(float));
  return pick_in_block(padded, (n + kNumLanes - 1) / kNumLanes, chunk, id);
}

float tier_residual(const float* p, const float* q, int n, float* residual) {
  float left[kBlockSize] = {}, right[kBlockSize] = {};
  memcpy(left, p, static_cast<size_t>(n) * sizeof(float));
  memcpy(right, q, static_cast<size_t>(n) * sizeof(float));
  float rest[kBlockSize];
  const int rows = (n + kNumLanes - 1) / kNumLanes;
  const float sum = sum_residual(GivenProbs<float>{left}, GivenProbs<float>{right}, rows, rest);
  memcpy(residual, rest, static_cast<size_t>(n) * sizeof(float));
  return sum;
}

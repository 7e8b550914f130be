#pragma once

#include "common/views.h"

namespace specdec_ops::cpu {

/// A row of logits or probabilities.
struct RowRef {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  /// Of kernels that weigh logits.
  float scale = 0.0f;
  /// Elements below it count as -inf.
  float threshold = -__builtin_inff();

  bool is_masked() const { return threshold > -__builtin_inff(); }
};

}  // namespace specdec_ops::cpu

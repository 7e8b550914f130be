#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

#include "common/views.h"

namespace specdec_ops {

/// A float as an element of a row. Every NaN becomes the same one: which bits arithmetic and conversions
/// leave in it depends on the hardware.
template <class Element>
SPECDEC_HOST_DEVICE Element narrowed(float value) {
  return value == value ? static_cast<Element>(value) : static_cast<Element>(__builtin_nanf(""));
}

template <>
SPECDEC_HOST_DEVICE torch::headeronly::Half narrowed(float value) {
  using torch::headeronly::Half;
  return value == value ? Half(value) : Half(0x7E00, Half::from_bits());
}

template <>
SPECDEC_HOST_DEVICE torch::headeronly::BFloat16 narrowed(float value) {
  using torch::headeronly::BFloat16;
  return value == value ? BFloat16(value) : BFloat16(0x7FC0, BFloat16::from_bits());
}

/// A row to write to.
struct MutableRow {
  void* data;
  DType dtype;

  SPECDEC_HOST_DEVICE float get(int64_t id) const {
    switch (dtype) {
      case DType::kBFloat16:
        return static_cast<float>(static_cast<const torch::headeronly::BFloat16*>(data)[id]);
      case DType::kFloat16:
        return static_cast<float>(static_cast<const torch::headeronly::Half*>(data)[id]);
      default:
        return static_cast<const float*>(data)[id];
    }
  }
  SPECDEC_HOST_DEVICE void set(int64_t id, float value) const {
    switch (dtype) {
      case DType::kBFloat16:
        static_cast<torch::headeronly::BFloat16*>(data)[id] = narrowed<torch::headeronly::BFloat16>(value);
        break;
      case DType::kFloat16:
        static_cast<torch::headeronly::Half*>(data)[id] = narrowed<torch::headeronly::Half>(value);
        break;
      default:
        static_cast<float*>(data)[id] = narrowed<float>(value);
    }
  }
  SPECDEC_HOST_DEVICE void mask(int64_t id) const { set(id, -__builtin_inff()); }
};

}  // namespace specdec_ops

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <stdexcept>

namespace specdec_ops {

/// An uninitialised contiguous tensor on the device of `beside`. Straight to the allocator: the
/// dispatcher's new_empty costs several times as much, which a call on one request feels.
inline torch::stable::Tensor empty_beside(const torch::stable::Tensor& beside,
                                          std::initializer_list<int64_t> shape,
                                          torch::headeronly::ScalarType dtype) {
  constexpr int kMaxDims = 2;
  const int dims = static_cast<int>(shape.size());
  if (dims > kMaxDims) throw std::logic_error("empty_beside: too many dimensions");
  int64_t strides[kMaxDims] = {1, 1};
  for (int d = dims - 2; d >= 0; --d) strides[d] = strides[d + 1] * shape.begin()[d + 1];
  int32_t device_type;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(beside.get(), &device_type));
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, shape.begin(), strides, static_cast<int32_t>(dtype),
                                                  device_type, beside.get_device_index(), &handle));
  return torch::stable::Tensor(handle);
}

}  // namespace specdec_ops

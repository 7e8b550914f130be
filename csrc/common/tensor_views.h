#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include "common/views.h"

/// From checked tensors to what kernels see of them.
namespace specdec_ops {

/// Tensor::scalar_type, which compares with every dtype there is, takes longer than the rest of a view.
inline torch::headeronly::ScalarType dtype_of(const torch::stable::Tensor& tensor) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return static_cast<torch::headeronly::ScalarType>(dtype);
}

template <class View, class Data>
View numbers_view(const torch::stable::Tensor& tensor, Data data, torch::headeronly::ScalarType wide) {
  const int64_t columns = tensor.dim() - 1;
  return {data, tensor.stride(columns), dtype_of(tensor) == wide,
          columns > 0 ? tensor.stride(columns - 1) : 0};
}

inline IntView int_view(const torch::stable::Tensor& tensor) {
  return numbers_view<IntView>(tensor, tensor.const_data_ptr(), torch::headeronly::ScalarType::Long);
}

inline MutableIntView mutable_int_view(const torch::stable::Tensor& tensor) {
  return numbers_view<MutableIntView>(tensor, tensor.mutable_data_ptr(), torch::headeronly::ScalarType::Long);
}

inline RealView real_view(const torch::stable::Tensor& tensor) {
  return numbers_view<RealView>(tensor, tensor.const_data_ptr(), torch::headeronly::ScalarType::Double);
}

inline BoolView bool_view(const torch::stable::Tensor& tensor) {
  return {static_cast<const bool*>(tensor.const_data_ptr()), tensor.stride(0)};
}

inline MutableBoolView mutable_bool_view(const torch::stable::Tensor& tensor) {
  return {static_cast<bool*>(tensor.mutable_data_ptr()), tensor.stride(0)};
}

inline RowsView rows_view(const torch::stable::Tensor& tensor) {
  const torch::headeronly::ScalarType dtype = dtype_of(tensor);
  return {tensor.const_data_ptr(), tensor.stride(tensor.dim() - 2),
          dtype == torch::headeronly::ScalarType::Float      ? DType::kFloat32
          : dtype == torch::headeronly::ScalarType::BFloat16 ? DType::kBFloat16
                                                             : DType::kFloat16};
}

}  // namespace specdec_ops

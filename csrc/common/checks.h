#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "common/tensor_views.h"

/// Argument checks of the torch layers, all with one message shape:
/// "<op>: <argument> must be <expectation>, got <actual>".
namespace specdec_ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Half:
      return "float16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

/// A tensor's shape as part of a message. Put into words only where the message is needed: that takes
/// longer than all the checks of a call.
struct ShapeOf {
  const Tensor& tensor;

  friend std::ostream& operator<<(std::ostream& out, const ShapeOf& shape) {
    out << "shape [";
    for (int64_t d = 0; d < shape.tensor.dim(); ++d) out << (d == 0 ? "" : ", ") << shape.tensor.size(d);
    return out << "]";
  }
};
inline ShapeOf shape_of(const Tensor& tensor) { return {tensor}; }

inline bool same_shape(const Tensor& a, const Tensor& b) {
  bool same = a.dim() == b.dim();
  for (int64_t d = 0; same && d < a.dim(); ++d) same = a.size(d) == b.size(d);
  return same;
}

/// The checks of one op, which names itself once.
class Checks {
 public:
  explicit Checks(const char* op) : op_(op) {}
  /// Checks of the tensors' device too: each must be where `first` is.
  Checks(const char* op, const Tensor& first) : op_(op), first_(&first) {}

  const char* op() const { return op_; }

  template <class... Parts>
  void require(bool condition, const Parts&... parts) const {
    if (condition) return;
    std::ostringstream message;
    message << op_ << ": ";
    (message << ... << parts);
    throw std::runtime_error(message.str());
  }

  /// Part of every check of a dtype; for tensors that have none.
  void same_device(const Tensor& tensor, const char* name) const {
    if (first_ != nullptr) device(tensor, name);
  }

  /// The dtype is one of those allowed, which `expected` spells out.
  void dtype(const Tensor& tensor, const char* name, std::initializer_list<ScalarType> allowed,
             const char* expected) const {
    same_device(tensor, name);
    const ScalarType actual = dtype_of(tensor);
    for (ScalarType dtype : allowed) {
      if (actual == dtype) return;
    }
    require(false, name, " must be ", expected, ", got ", name_of(actual));
  }
  void integer(const Tensor& tensor, const char* name) const {
    dtype(tensor, name, {ScalarType::Int, ScalarType::Long}, "int32 or int64");
  }
  void real(const Tensor& tensor, const char* name) const {
    dtype(tensor, name, {ScalarType::Float, ScalarType::Double}, "float32 or float64");
  }

  void boolean(const Tensor& tensor, const char* name) const {
    dtype(tensor, name, {ScalarType::Bool}, "bool");
  }

  /// A vector of `size` elements, which `shape` spells out.
  void vector(const Tensor& tensor, const char* name, const char* shape, int64_t size) const {
    require(tensor.dim() == 1 && tensor.size(0) == size, name, " must be ", shape, " with ", size,
            size == 1 ? " element" : " elements", ", got ", shape_of(tensor));
  }

  void row_dtype(const Tensor& tensor, const char* name) const {
    dtype(tensor, name, {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half},
          "float32, bfloat16 or float16");
  }
  void contiguous_rows(const Tensor& tensor, const char* name) const {
    const int64_t last = tensor.dim() - 1;
    require(tensor.size(last) <= 1 || tensor.size(0) == 0 || tensor.stride(last) == 1, name,
            " must have a contiguous last dimension, got stride ", tensor.stride(last));
  }

  /// Rows of logits or probabilities with a contiguous last dimension.
  void rows(const Tensor& tensor, const char* name, const char* shape, int64_t num_rows) const {
    row_dtype(tensor, name);
    require(tensor.dim() == 2, name, " must be ", shape, ", got ", shape_of(tensor));
    require(tensor.size(0) == num_rows, name, " must be ", shape, " with ", num_rows,
            num_rows == 1 ? " row" : " rows", ", got ", shape_of(tensor));
    contiguous_rows(tensor, name);
  }

  /// The number of ids that can win: `given`, or the width.
  int64_t vocab_size(std::optional<int64_t> given, const Tensor& logits, const char* name) const {
    const int64_t width = logits.size(1);
    require(width >= 1, name, " must have at least one column, got ", shape_of(logits));
    const int64_t size = given.value_or(width);
    require(size >= 1 && size <= width, "vocab_size must be between 1 and the width of ", name, ", ", width,
            ", got ", size);
    require(size <= INT32_MAX, "vocab_size must be below 2^31, got ", size);
    return size;
  }

 private:
  void device(const Tensor& tensor, const char* name) const {
    int32_t type, expected;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &type));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(first_->get(), &expected));
    require(type == expected && tensor.get_device_index() == first_->get_device_index(), name,
            " must be on the device of the other tensors, index ", first_->get_device_index(), ", got ",
            type == expected ? "index " : "one of another kind, index ", tensor.get_device_index());
  }

  const char* op_;
  const Tensor* first_ = nullptr;
};

}  // namespace specdec_ops

#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>

namespace specdec_ops::cuda {

/// Finds what torch's CUDA library has to offer; null, or what is missing.
const char* bind_torch();

/// torch's current stream of a device. Needs bind_torch.
cudaStream_t current_stream(int device);

/// Throws, naming the op, unless `error` is cudaSuccess.
void check(cudaError_t error, const char* op);

/// Makes the device of a tensor current for as long as it lives, for torch and for this module's own runtime.
class DeviceScope {
 public:
  explicit DeviceScope(const torch::stable::Tensor& tensor)
      : device_(tensor.get_device_index()), guard_(device_) {
    cudaSetDevice(device_);
  }
  int device() const { return device_; }
  cudaStream_t stream() const { return current_stream(device_); }

 private:
  int device_;
  torch::stable::accelerator::DeviceGuard guard_;
};

}  // namespace specdec_ops::cuda

#include "cuda/stream.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace specdec_ops::cuda {
namespace {

// Declared in torch's shim.h where USE_CUDA is set, defined in libtorch_cuda.so. The build has no such
// library, as it needs no torch with CUDA; and the process has it already.
using GetCurrentStream = AOTITorchError (*)(int32_t device_index, void** stream);
GetCurrentStream get_current_stream = nullptr;

}  // namespace

const char* bind_torch() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return "libtorch_cuda.so, which torch has not loaded";
  get_current_stream =
      reinterpret_cast<GetCurrentStream>(dlsym(library, "aoti_torch_get_current_cuda_stream"));
  return get_current_stream == nullptr ? "aoti_torch_get_current_cuda_stream in libtorch_cuda.so" : nullptr;
}

cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(get_current_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

void check(cudaError_t error, const char* op) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(op) + ": CUDA says " + cudaGetErrorString(error));
}

}  // namespace specdec_ops::cuda

// The kernels for GPUs as C++: this folder's headers stand in for CUDA's.

// Each file uses a part of what blocks.cuh has.
#pragma GCC diagnostic ignored "-Wunused-function"

#include "cuda/token_logprobs.cu"

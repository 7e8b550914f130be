// The kernels for GPUs as C++: this folder's headers stand in for CUDA's.

#include "cuda/plan_verification.cu"

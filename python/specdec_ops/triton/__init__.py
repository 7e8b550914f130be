"""The ops in Triton, for devices without native kernels. Each is imported on first use."""

#pragma once

#include <algorithm>

#include "common/checks.h"
#include "cuda/stream.h"

namespace specdec_ops::cuda {

constexpr int kRequestThreads = 256;

/// Body::kLanes threads to a request.
template <class Body>
__global__ void __launch_bounds__(kRequestThreads) run_for_each_request(int64_t num_requests, Body body) {
  static_assert(kRequestThreads % Body::kLanes == 0, "a request belongs to one CTA");
  constexpr int64_t kRequestsPerCta = kRequestThreads / Body::kLanes;
  const int64_t lane = static_cast<int>(threadIdx.x) % Body::kLanes;
  const int64_t first = blockIdx.x * kRequestsPerCta + static_cast<int>(threadIdx.x) / Body::kLanes;
  for (int64_t request = first; request < num_requests; request += gridDim.x * kRequestsPerCta) {
    body(request, lane, int64_t{Body::kLanes});
  }
}

/// Serves the bookkeeping ops, whose bodies are functors in csrc/common, on the current stream of the
/// tensors' device.
struct RequestBackend {
  static constexpr bool kValuesOnHost = false;

  static Checks checks(const char* op, const Tensor& first) { return Checks(op, first); }

  template <class Body>
  static void for_each_request(const Checks& checks, const Tensor& beside, int64_t num_requests,
                               const Body& body) {
    if (num_requests <= 0) return;
    constexpr int64_t kRequestsPerCta = kRequestThreads / Body::kLanes;
    constexpr int64_t kMaxCtas = 65535;
    const int64_t num_ctas = std::min((num_requests + kRequestsPerCta - 1) / kRequestsPerCta, kMaxCtas);
    const DeviceScope scope(beside);
    run_for_each_request<<<static_cast<unsigned>(num_ctas), kRequestThreads, 0, scope.stream()>>>(
        num_requests, body);
    check(cudaGetLastError(), checks.op());
  }
};

}  // namespace specdec_ops::cuda

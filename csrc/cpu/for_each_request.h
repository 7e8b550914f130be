#pragma once

#include "common/checks.h"

namespace specdec_ops::cpu {

/// Serves the bookkeeping ops, whose bodies are functors in csrc/common: the requests one by one.
struct RequestBackend {
  static constexpr bool kValuesOnHost = true;

  static Checks checks(const char* op, const Tensor&) { return Checks(op); }

  template <class Body>
  static void for_each_request(const Checks&, const Tensor&, int64_t num_requests, const Body& body) {
    for (int64_t request = 0; request < num_requests; ++request) body(request, 0, 1);
  }
};

}  // namespace specdec_ops::cpu

#pragma once

#include <cstdint>

#include "common/macros.h"
#include "common/views.h"

namespace specdec_ops {

/// A range of tokens or rows.
struct Span {
  int64_t begin = 0;
  int64_t end = 0;

  SPECDEC_HOST_DEVICE int64_t size() const { return end - begin; }
};

SPECDEC_HOST_DEVICE int64_t clamped(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

/// What running totals give to a request, held inside of [0, limit].
SPECDEC_HOST_DEVICE Span span_at(const IntView& totals, int64_t request, int64_t limit) {
  const int64_t begin = clamped(at(totals, request), 0, limit);
  return {begin, clamped(at(totals, request + 1), begin, limit)};
}

}  // namespace specdec_ops

#pragma once

#include <cstddef>
#include <cstdint>

namespace specdec_ops {

/// Cuts memory into arrays, each aligned; finds the sum of their sizes where there is no memory yet.
template <size_t kAlignment>
class Cutter {
 public:
  explicit Cutter(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    char* array = memory_ == nullptr ? nullptr : memory_ + size_;
    size_ += (static_cast<size_t>(count) * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(array);
  }
  size_t size() const { return size_; }

 private:
  char* memory_;
  size_t size_ = 0;
};

}  // namespace specdec_ops

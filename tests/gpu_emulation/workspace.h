#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "machine.h"

namespace emulation {

/// The memory of a call between two guards. It holds NaN, small int64 numbers, or what calls before have
/// left.
class Workspace {
 public:
  explicit Workspace(size_t size) : size_(size) {
    memory_.resize(std::max(memory_.size(), size + 2 * kGuardSize), 0xFF);
    switch (pick(3)) {
      case 0:
        std::fill(memory_.begin(), memory_.end(), 0xFF);
        break;
      case 1:
        std::fill(memory_.begin(), memory_.end(), 0);
        for (size_t i = 0; i < memory_.size(); i += sizeof(int64_t)) {
          memory_[i] = static_cast<unsigned char>(pick(8));
        }
        break;
    }
    std::fill(memory_.begin(), memory_.begin() + kGuardSize, kGuard);
    std::fill(end(), end() + kGuardSize, kGuard);
  }
  void* begin() { return memory_.data() + kGuardSize; }
  bool is_intact() {
    const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuardSize, is_guard) &&
           std::all_of(end(), end() + kGuardSize, is_guard);
  }

 private:
  static constexpr size_t kGuardSize = 4096;
  static constexpr unsigned char kGuard = 0xA5;

  std::vector<unsigned char>::iterator end() {
    return memory_.begin() + static_cast<std::ptrdiff_t>(kGuardSize + size_);
  }

  static inline std::vector<unsigned char> memory_;
  size_t size_;
};

}  // namespace emulation

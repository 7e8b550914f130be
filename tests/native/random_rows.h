#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "common/views.h"
#include "cpu/kernels/isa.h"

/// Random rows of logits in buffers without a byte to spare, for the sanitizers, and the comparison of tiers.
namespace specdec_ops::cpu {

struct RandomRows {
  std::vector<float> wide;
  std::vector<uint16_t> half;
  RowsView view;

  RandomRows(std::mt19937& random, int64_t num_rows, int64_t vocab_size) {
    std::normal_distribution<float> normal(0.0f, 3.0f);
    wide.resize(static_cast<size_t>(num_rows * vocab_size));
    for (float& x : wide) x = normal(random);
    const float odd[] = {-__builtin_inff(), -__builtin_inff(), __builtin_inff(), __builtin_nanf("")};
    for (int i = 0; i < 3 && random() % 3 == 0; ++i) wide[random() % wide.size()] = odd[random() % 4];
    view = {wide.data(), vocab_size, DType::kFloat32};
    const unsigned dtype = random() % 3;
    if (dtype == 0) return;
    for (float x : wide) {
      uint32_t bits;
      memcpy(&bits, &x, sizeof bits);
      // Any bits will do: these are the top halves, read as bfloat16 or as float16.
      half.push_back(static_cast<uint16_t>(bits >> 16));
    }
    view = {half.data(), vocab_size, dtype == 1 ? DType::kBFloat16 : DType::kFloat16};
  }
};

inline int64_t random_vocab_size(std::mt19937& random) {
  const int64_t sizes[] = {1, 7, 16, 70, 255, 257, 4095, 4096, 4097, 9000};
  return sizes[random() % 10];
}

using Bytes = std::vector<unsigned char>;
template <class T>
void append(Bytes& bytes, const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const unsigned char*>(values.data());
  bytes.insert(bytes.end(), data, data + values.size() * sizeof(T));
}

/// Runs one case in every tier, and in another that `emulated` runs; all must give the same bytes.
inline void compare_tiers(int number, const std::function<Bytes()>& run,
                          const std::function<Bytes()>& emulated) {
  set_isa("scalar");
  const Bytes expected = run();
  const auto check = [&](const char* what, const Bytes& actual) {
    if (actual == expected) return;
    std::printf("case %d: %s differs from the scalar tier\n", number, what);
    std::exit(1);
  };
  for (Isa isa : available_isas()) {
    set_isa(name_of(isa));
    check(name_of(isa), run());
  }
  if (emulated) check("emulated avx512", emulated());
}

}  // namespace specdec_ops::cpu

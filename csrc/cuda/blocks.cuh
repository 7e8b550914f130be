#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/row_law.h"
#include "common/views.h"
#include "cuda/instructions.cuh"
#include "cuda/warp.cuh"

/// What a warp does with one block of a row; csrc/cpu/kernels/blocks.kernel.h defines the bits. A block is
/// 16 rows of 256 lanes. Thread t owns the eight neighbouring lanes from 8 * t, which are one or two 16-byte
/// loads a row, and adds them row by row: the order of the definition without a single shuffle.
namespace specdec_ops::cuda {

constexpr int kOctet = 8;
constexpr int kRowsPerBlock = kBlockSize / kNumLanes;
constexpr int kChunksPerBlock = kBlockSize / kChunkSize;
static_assert(kNumLanes == kWarpSize * kOctet, "a warp holds one row of a block");

constexpr float kMasked = -__builtin_inff();

/// A row of logits or probabilities.
struct RowRef {
  const char* data;
  DType dtype;

  __device__ int item_size() const { return dtype == DType::kFloat32 ? 4 : 2; }
};

__device__ __forceinline__ RowRef row_of(const RowsView& rows, int64_t row) {
  const int64_t item_size = rows.dtype == DType::kFloat32 ? 4 : 2;
  return {static_cast<const char*>(rows.data) + row * rows.stride * item_size, rows.dtype};
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }
__device__ __forceinline__ float f16_low(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
}
__device__ __forceinline__ float f16_high(uint32_t pair) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
}

/// The largest of each half of two pairs; NaN loses in max2 and wins in max2_nan.
template <DType kDType>
struct Pairs;
template <>
struct Pairs<DType::kBFloat16> {
  static constexpr uint32_t kMaskedPair = 0xFF80FF80;
  static __device__ float low(uint32_t pair) { return bf16_low(pair); }
  static __device__ float high(uint32_t pair) { return bf16_high(pair); }
  static __device__ __nv_bfloat162 pair_of(uint32_t bits) { return reinterpret_cast<__nv_bfloat162&>(bits); }
  static __device__ uint32_t max2(uint32_t a, uint32_t b) {
    __nv_bfloat162 result = __hmax2(pair_of(a), pair_of(b));
    return reinterpret_cast<uint32_t&>(result);
  }
  static __device__ uint32_t max2_nan(uint32_t a, uint32_t b) {
    __nv_bfloat162 result = __hmax2_nan(pair_of(a), pair_of(b));
    return reinterpret_cast<uint32_t&>(result);
  }
};
template <>
struct Pairs<DType::kFloat16> {
  static constexpr uint32_t kMaskedPair = 0xFC00FC00;
  static __device__ float low(uint32_t pair) { return f16_low(pair); }
  static __device__ float high(uint32_t pair) { return f16_high(pair); }
  static __device__ __half2 pair_of(uint32_t bits) { return reinterpret_cast<__half2&>(bits); }
  static __device__ uint32_t max2(uint32_t a, uint32_t b) {
    __half2 result = __hmax2(pair_of(a), pair_of(b));
    return reinterpret_cast<uint32_t&>(result);
  }
  static __device__ uint32_t max2_nan(uint32_t a, uint32_t b) {
    __half2 result = __hmax2_nan(pair_of(a), pair_of(b));
    return reinterpret_cast<uint32_t&>(result);
  }
};

__device__ __forceinline__ float element(const RowRef& row, int64_t index) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return bf16_low(__ldg(reinterpret_cast<const unsigned short*>(row.data) + index));
    case DType::kFloat16:
      return f16_low(__ldg(reinterpret_cast<const unsigned short*>(row.data) + index));
    default:
      return __ldg(reinterpret_cast<const float*>(row.data) + index);
  }
}

/// Eight elements from `index` on; `padding` from `end` on.
__device__ inline void load_octet(const RowRef& row, int64_t index, int64_t end, float padding,
                                  float (&x)[kOctet]) {
  const char* address = row.data + index * row.item_size();
  if (index + kOctet > end || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = index + j < end ? element(row, index + j) : padding;
    return;
  }
  const uint4 first = __ldg(reinterpret_cast<const uint4*>(address));
  const uint32_t words[4] = {first.x, first.y, first.z, first.w};
  if (row.dtype == DType::kFloat32) {
    const uint4 second = __ldg(reinterpret_cast<const uint4*>(address) + 1);
    const uint32_t more[4] = {second.x, second.y, second.z, second.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      x[j] = __uint_as_float(words[j]);
      x[j + 4] = __uint_as_float(more[j]);
    }
  } else if (row.dtype == DType::kBFloat16) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? bf16_low(words[j / 2]) : bf16_high(words[j / 2]);
  } else {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? f16_low(words[j / 2]) : f16_high(words[j / 2]);
  }
}

/// 2^((x - max) * scale) as two factors; 0 for everything below 2^-126. NaN stays NaN.
struct Exp2 {
  float reference, scale, floor;

  __device__ Exp2(float block_max, float row_scale)
      : reference(block_max), scale(row_scale), floor(-127.0f / row_scale) {}

  __device__ __forceinline__ void factors(float x, float* polynomial, float* power) const {
    // The floor rounds to n = -127, whose power has the bits of +0.
    const float y = max_or_nan(floor, sub_ftz(x, reference));
    const float shifted = fma_ftz(y, scale, kExp2Magic);
    const float fraction = fma_ftz(y, scale, sub_ftz(kExp2Magic, shifted));
    *power = __uint_as_float(__float_as_uint(shifted) << 23);
    float sum = fma_ftz(exp2_coefficient(4), fraction, exp2_coefficient(3));
    sum = fma_ftz(sum, fraction, exp2_coefficient(2));
    sum = fma_ftz(sum, fraction, exp2_coefficient(1));
    sum = fma_ftz(sum, fraction, exp2_coefficient(0));
    *polynomial = fma_ftz(sum, fraction, 1.0f);
  }
};

/// Out of line: a float64 polynomial is long, and not on the way of the units.
static __device__ __noinline__ double exp2_out_of_line(double y) { return exp2_f64(y); }

/// The sum over the lanes by halves, in every thread. Pairs of threads split their lanes between them, so
/// that each step moves half as many values as the one before.
__device__ __forceinline__ float tree_sum(const float (&lanes)[kOctet]) {
  const int lane = lane_index();
  float four[4], two[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // lane l and l + 128: threads t and t + 16
    const float mine = lane & 16 ? lanes[j + 4] : lanes[j], other = lane & 16 ? lanes[j] : lanes[j + 4];
    four[j] = mine + __shfl_xor_sync(kAllLanes, other, 16);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {  // l + 64: t + 8
    const float mine = lane & 8 ? four[j + 2] : four[j], other = lane & 8 ? four[j] : four[j + 2];
    two[j] = mine + __shfl_xor_sync(kAllLanes, other, 8);
  }
  const float mine = lane & 4 ? two[1] : two[0], other = lane & 4 ? two[0] : two[1];
  float sum = mine + __shfl_xor_sync(kAllLanes, other, 4);  // l + 32: t + 4
  sum = sum + __shfl_xor_sync(kAllLanes, sum, 2);           // l + 16: t + 2
  sum = sum + __shfl_xor_sync(kAllLanes, sum, 1);           // l + 8: t + 1
  // Bits 4, 3 and 2 of the thread's index say which of the eight lanes that are left it holds.
  sum = sum + __shfl_xor_sync(kAllLanes, sum, 16);
  sum = sum + __shfl_xor_sync(kAllLanes, sum, 8);
  return sum + __shfl_xor_sync(kAllLanes, sum, 4);
}

/// The first elements of a row from `index` on that a warp looks at.
struct BlockRef {
  RowRef row;
  int64_t begin;
  /// Elements, at most kBlockSize.
  int size;

  __device__ int rows() const { return (size + kNumLanes - 1) / kNumLanes; }
  /// Where a whole block begins, if its rows can be copied in words of 16 bytes; null otherwise.
  __device__ const char* aligned_whole() const {
    const char* source = row.data + begin * row.item_size();
    return size == kBlockSize && reinterpret_cast<uintptr_t>(source) % 16 == 0 ? source : nullptr;
  }
  /// Rows in shared memory: they are read in pairs.
  __device__ int staged_rows() const { return (rows() + 1) / 2 * 2; }
};

/// 16-byte words of shared memory in which a warp holds one block.
constexpr int stage_words(DType dtype) { return kBlockSize * (dtype == DType::kFloat32 ? 4 : 2) / 16; }

/// Begins to fetch a block into shared memory, padded with -inf to pairs of rows; wait_for_copies ends it. A
/// thread fetches what it will read, so nobody waits for another thread.
template <DType kDType>
__device__ __forceinline__ void stage_block(const BlockRef& block, uint4* stage) {
  constexpr int kItemSize = kDType == DType::kFloat32 ? 4 : 2;
  constexpr int kWords = kOctet * kItemSize / 16;
  const int lane = lane_index();
  const char* source = block.row.data + block.begin * kItemSize;
  const bool aligned = reinterpret_cast<uintptr_t>(source) % 16 == 0;
  if (aligned && block.size == kBlockSize) {
#pragma unroll
    for (int r = 0; r < kRowsPerBlock; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        copy_async(stage + (r * kWords + w) * kWarpSize + lane,
                   source + (r * kNumLanes + lane * kOctet) * kItemSize + w * 16);
      }
    }
  } else {
    for (int r = 0; r < block.staged_rows(); ++r) {
      const int i = r * kNumLanes + lane * kOctet;
      float x[kOctet];
      uint32_t words[kOctet];
      if (aligned && i + kOctet <= block.size) {
        for (int w = 0; w < kWords; ++w) {
          copy_async(stage + (r * kWords + w) * kWarpSize + lane, source + i * kItemSize + w * 16);
        }
        continue;
      }
      if constexpr (kDType == DType::kFloat32) {
#pragma unroll
        for (int j = 0; j < kOctet; ++j) {
          x[j] = i + j < block.size ? reinterpret_cast<const float*>(source)[i + j] : kMasked;
          words[j] = __float_as_uint(x[j]);
        }
      } else {
        const auto* items = reinterpret_cast<const unsigned short*>(source);
        constexpr uint32_t kPadding = Pairs<kDType>::kMaskedPair & 0xFFFF;
#pragma unroll
        for (int j = 0; j < kOctet / 2; ++j) {
          const uint32_t low = i + 2 * j < block.size ? items[i + 2 * j] : kPadding;
          const uint32_t high = i + 2 * j + 1 < block.size ? items[i + 2 * j + 1] : kPadding;
          words[j] = low | high << 16;
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        stage[(r * kWords + w) * kWarpSize + lane] =
            make_uint4(words[w * 4], words[w * 4 + 1], words[w * 4 + 2], words[w * 4 + 3]);
      }
    }
  }
}

__device__ __forceinline__ void stage_block(const BlockRef& block, uint4* stage) {
  switch (block.row.dtype) {
    case DType::kBFloat16:
      return stage_block<DType::kBFloat16>(block, stage);
    case DType::kFloat16:
      return stage_block<DType::kFloat16>(block, stage);
    default:
      return stage_block<DType::kFloat32>(block, stage);
  }
}

/// A block that is to lie where another one is being read. A thread fetches each pair of rows as soon as it
/// is done with that pair of the other block, so that the copies go on while the rest is worked on.
struct NextBlock {
  /// Of a whole block whose rows are aligned; null where there is none.
  const char* source = nullptr;
  bool is_begun = false;

  template <DType kDType>
  __device__ __forceinline__ void fetch_rows(uint4* stage, int row) {
    constexpr int kWords = kDType == DType::kFloat32 ? 2 : 1;
    if (source == nullptr) return;
#pragma unroll
    for (int r = row; r < row + 2; ++r) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        copy_async(stage + (r * kWords + w) * kWarpSize + lane_index(),
                   source + ((r * kWarpSize + lane_index()) * kWords + w) * 16);
      }
    }
    is_begun = true;
  }
};

/// One row of the thread's lanes from shared memory.
template <DType kDType>
__device__ __forceinline__ void staged_words(const uint4* stage, int row,
                                             uint32_t (&words)[kDType == DType::kFloat32 ? 8 : 4]) {
  constexpr int kWords = kDType == DType::kFloat32 ? 2 : 1;
#pragma unroll
  for (int w = 0; w < kWords; ++w) {
    const uint4 four = stage[(row * kWords + w) * kWarpSize + lane_index()];
    words[w * 4] = four.x;
    words[w * 4 + 1] = four.y;
    words[w * 4 + 2] = four.z;
    words[w * 4 + 3] = four.w;
  }
}

/// Element j of eight.
template <DType kDType, int kWords>
__device__ __forceinline__ float word_element(const uint32_t (&words)[kWords], int j) {
  if constexpr (kDType == DType::kFloat32) {
    return __uint_as_float(words[j]);
  } else {
    return j % 2 == 0 ? Pairs<kDType>::low(words[j / 2]) : Pairs<kDType>::high(words[j / 2]);
  }
}

template <DType kDType>
__device__ __forceinline__ float staged_max(const uint4* stage, int rows, bool* has_nan) {
  float best = kMasked;
  bool nan = false;
  if constexpr (kDType == DType::kFloat32) {
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      uint32_t words[8];
      staged_words<kDType>(stage, r, words);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float x = __uint_as_float(words[j]);
        best = fmaxf(best, x);
        nan |= x != x;
      }
    }
  } else {
    using Pair = Pairs<kDType>;
    uint32_t most[4], poisoned[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) most[j] = poisoned[j] = Pair::kMaskedPair;
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      uint32_t words[4];
      staged_words<kDType>(stage, r, words);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        most[j] = Pair::max2(most[j], words[j]);
        if (has_nan != nullptr) poisoned[j] = Pair::max2_nan(poisoned[j], words[j]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      best = fmaxf(best, fmaxf(Pair::low(most[j]), Pair::high(most[j])));
      nan |= isnan(Pair::low(poisoned[j])) || isnan(Pair::high(poisoned[j]));
    }
  }
  if (has_nan != nullptr) *has_nan = __any_sync(kAllLanes, nan);
  return warp_max(best);
}

/// The first element of a block in shared memory that equals `value`; kBlockSize if there is none.
template <DType kDType>
__device__ __forceinline__ int staged_index(uint4* stage, int rows, float value, NextBlock& next) {
  constexpr int kWords = kDType == DType::kFloat32 ? 8 : 4;
  int found = kBlockSize;
#pragma unroll 1
  for (int pair = rows - 2; pair >= 0; pair -= 2) {
#pragma unroll
    for (int r = pair + 1; r >= pair; --r) {
      uint32_t words[kWords];
      staged_words<kDType>(stage, r, words);
#pragma unroll
      for (int j = kOctet - 1; j >= 0; --j) {
        if (word_element<kDType>(words, j) == value) found = r * kNumLanes + lane_index() * kOctet + j;
      }
    }
    next.fetch_rows<kDType>(stage, pair);
  }
  return warp_min(found);
}

/// The largest logit and, in place of the sum, its index; NaN there where not all is finite.
template <DType kDType>
__device__ __forceinline__ BlockStats staged_argmax(uint4* stage, int rows, NextBlock& next) {
  bool has_nan;
  const float best = staged_max<kDType>(stage, rows, &has_nan);
  if (has_nan || best == -kMasked) return {best, __builtin_nanf("")};
  return {best, static_cast<float>(staged_index<kDType>(stage, rows, best, next))};
}

/// What is asked of a block beside its maximum.
enum class Sum {
  kNone,
  /// By the special function unit, within 3e-6 of the definition's: a third of the instructions.
  kQuick,
  kDefined,
};

/// Maximum and sum of weights; without a sum what staged_argmax says. May begin to fetch the next block.
template <DType kDType>
__device__ __forceinline__ BlockStats staged_stats(uint4* stage, int rows, float scale, Sum sum,
                                                   NextBlock& next) {
  if (sum == Sum::kNone) return staged_argmax<kDType>(stage, rows, next);
  const float best = staged_max<kDType>(stage, rows, nullptr);
  if (!(best > kMasked) || best == -kMasked) {
    const BlockStats stats = staged_argmax<kDType>(stage, rows, next);
    return {best, stats.sum != stats.sum ? stats.sum : 0.0f};
  }
  float sums[kOctet] = {};
  constexpr int kWords = kDType == DType::kFloat32 ? 8 : 4;
  if (sum == Sum::kQuick) {
#pragma unroll 1
    for (int pair = 0; pair < rows; pair += 2) {
#pragma unroll
      for (int r = pair; r < pair + 2; ++r) {
        uint32_t words[kWords];
        staged_words<kDType>(stage, r, words);
#pragma unroll
        for (int j = 0; j < kOctet; ++j) {
          sums[j] += quick_exp2((word_element<kDType>(words, j) - best) * scale);
        }
      }
      next.fetch_rows<kDType>(stage, pair);
    }
    return {best, tree_sum(sums)};
  }
  const Exp2 exp2(best, scale);
#pragma unroll 1
  for (int pair = 0; pair < rows; pair += 2) {
#pragma unroll
    for (int r = pair; r < pair + 2; ++r) {
      uint32_t words[kWords];
      staged_words<kDType>(stage, r, words);
#pragma unroll
      for (int j = 0; j < kOctet; ++j) {
        float polynomial, power;
        exp2.factors(word_element<kDType>(words, j), &polynomial, &power);
        sums[j] = fma_ftz(polynomial, power, sums[j]);
      }
    }
    next.fetch_rows<kDType>(stage, pair);
  }
  return {best, tree_sum(sums)};
}

/// Of a block that the warp has staged.
__device__ __forceinline__ BlockStats block_stats(const BlockRef& block, float scale, Sum sum, uint4* stage,
                                                  NextBlock& next) {
  switch (block.row.dtype) {
    case DType::kBFloat16:
      return staged_stats<DType::kBFloat16>(stage, block.staged_rows(), scale, sum, next);
    case DType::kFloat16:
      return staged_stats<DType::kFloat16>(stage, block.staged_rows(), scale, sum, next);
    default:
      return staged_stats<DType::kFloat32>(stage, block.staged_rows(), scale, sum, next);
  }
}

/// Fetches a block into the warp's shared memory, for staged_octet. Out of line, like what follows: for
/// judges.
static __device__ __noinline__ void fetch_block(BlockRef block, uint4* stage) {
  __syncwarp();  // others may still read what is there
  stage_block(block, stage);
  wait_for_copies();
  __syncwarp();
}

/// Tells the compiler that an address is one of shared memory, where it cannot see that.
template <class T>
__device__ __forceinline__ const T* in_shared(const T* address) {
  return static_cast<const T*>(__cvta_shared_to_generic(__cvta_generic_to_shared(address)));
}

/// Of a block that was fetched.
static __device__ __noinline__ BlockStats defined_block_stats(BlockRef block, float scale, uint4* stage) {
  NextBlock none;
  return block_stats(block, scale, Sum::kDefined, stage, none);
}

/// Eight elements from shared memory, by any thread.
__device__ __forceinline__ void staged_octet(const uint4* stage, DType dtype, int octet, float (&x)[kOctet]) {
  stage = in_shared(stage);
  if (dtype == DType::kFloat32) {
    const uint4* first = stage + octet / kWarpSize * 2 * kWarpSize + octet % kWarpSize;
    const uint4 low = first[0], high = first[kWarpSize];
    const uint32_t words[kOctet] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = __uint_as_float(words[j]);
    return;
  }
  const uint4 four = stage[octet];
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
  if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? bf16_low(words[j / 2]) : bf16_high(words[j / 2]);
  } else {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? f16_low(words[j / 2]) : f16_high(words[j / 2]);
  }
}

/// The largest element that is not NaN, straight from global memory.
static __device__ __noinline__ float block_max(BlockRef block) {
  float best = kMasked;
  for (int i = lane_index() * kOctet; i < block.size; i += kNumLanes) {
    float x[kOctet];
    load_octet(block.row, block.begin + i, block.begin + block.size, kMasked, x);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) best = fmaxf(best, x[j]);
  }
  return warp_max(best);
}

/// The first element that equals value, or -1.
static __device__ __noinline__ int find_equal(BlockRef block, uint4* stage, float value) {
  fetch_block(block, stage);
  int found = kBlockSize;
  for (int r = 0; r < block.rows(); ++r) {
    float x[kOctet];
    const int octet = r * kWarpSize + lane_index();
    staged_octet(stage, block.row.dtype, octet, x);
#pragma unroll
    for (int j = kOctet - 1; j >= 0; --j) {
      if (x[j] == value && octet * kOctet + j < found) found = octet * kOctet + j;
    }
  }
  found = warp_min(found);
  return found < block.size ? found : -1;
}

/// Sources of weights: octet(i, w) gives those of the ids from i on in a block, i a multiple of eight.
struct WeightsOfLogits {
  BlockRef block;
  /// The block in shared memory; null: it is read where it is.
  const uint4* stage;
  Exp2 exp2;
  float factor;
  /// A fully masked block has no maximum to refer to.
  bool masked;

  __device__ WeightsOfLogits(const BlockRef& block_ref, const uint4* staged, float max, float scale,
                             float factor_of_block)
      : block(block_ref), stage(staged), exp2(max, scale), factor(factor_of_block), masked(max == kMasked) {}

  __device__ int size() const { return block.size; }

  __device__ void octet(int i, float (&weights)[kOctet]) const {
    float x[kOctet];
    if (stage != nullptr) {
      staged_octet(stage, block.row.dtype, i / kOctet, x);
    } else {
      load_octet(block.row, block.begin + i, block.begin + block.size, kMasked, x);
    }
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      float polynomial, power;
      exp2.factors(x[j], &polynomial, &power);
      weights[j] = masked ? 0.0f : mul_ftz(mul_ftz(polynomial, power), factor);
    }
  }
};

/// The probabilities of a block of logits.
__device__ inline WeightsOfLogits probs_of_block(const BlockRef& block, const uint4* stage, const RowLaw& law,
                                                 float max) {
  return WeightsOfLogits(block, stage, max, law.scale,
                         static_cast<float>(exp2_out_of_line(law.log2_prob(max))));
}

/// Probabilities that came as they are, negative ones as 0; NaN for what is not finite.
struct GivenProbs {
  BlockRef block;

  __device__ void octet(int i, float (&weights)[kOctet]) const {
    float x[kOctet];
    load_octet(block.row, block.begin + i, block.begin + block.size, 0.0f, x);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) weights[j] = max_or_nan(0.0f, add_ftz(x[j], sub_ftz(x[j], x[j])));
  }
};

/// max(p - q, 0), NaN if there is one.
template <class Draft>
struct Residual {
  WeightsOfLogits target;
  Draft draft;

  __device__ int size() const { return target.size(); }

  __device__ void octet(int i, float (&weights)[kOctet]) const {
    float q[kOctet];
    target.octet(i, weights);
    draft.octet(i, q);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) weights[j] = max_or_nan(0.0f, sub_ftz(weights[j], q[j]));
  }
};

/// The sum of a block's weights, in lanes and halves.
template <class Weights>
__device__ __noinline__ float sum_in_lanes(Weights source, int rows) {
  float sums[kOctet] = {};
  for (int r = 0; r < rows; ++r) {
    float weights[kOctet];
    source.octet(r * kNumLanes + lane_index() * kOctet, weights);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) sums[j] = add_ftz(sums[j], weights[j]);
  }
  return tree_sum(sums);
}

/// Shared memory of a warp that picks.
struct PickScratch {
  double sums[kChunksPerBlock];
  float chunk[kChunkSize];
};

/// Sums of the chunks of a block, each in token order, a lane to a chunk; returns their sum in order.
template <class Weights>
__device__ __noinline__ double chunk_sums(Weights source, PickScratch* scratch) {
  __syncwarp();
  for (int c = lane_index(); c < kChunksPerBlock; c += kWarpSize) {
    double sum = 0.0;
    if (c * kChunkSize < source.size()) {
#pragma unroll 1
      for (int i = 0; i < kChunkSize; i += kOctet) {
        float weights[kOctet];
        source.octet(c * kChunkSize + i, weights);
#pragma unroll
        for (int j = 0; j < kOctet; ++j) sum = sum + static_cast<double>(weights[j]);
      }
    }
    scratch->sums[c] = sum;
  }
  __syncwarp();
  double total = 0.0;
#pragma unroll 16
  for (int c = 0; c < kChunksPerBlock; ++c) total = total + scratch->sums[c];
  return total;
}

/// The first element whose prefix exceeds `draw`; if rounding leaves none, the last with weight. This is the
/// definition, addition by addition.
template <class Weights>
__device__ __noinline__ int pick_step_by_step(Weights source, double draw, PickScratch* scratch) {
  chunk_sums(source, scratch);
  double prefix = 0.0;
  int chunk = -1, last = 0;
  for (int c = 0; c < kChunksPerBlock; ++c) {
    const double sum = scratch->sums[c];
    if (prefix + sum > draw) {
      chunk = c;
      break;
    }
    if (sum > 0.0) last = c;
    prefix = prefix + sum;
  }
  const bool found = chunk >= 0;
  if (!found) chunk = last;
  if (lane_index() < kChunkSize / kOctet) {
    float weights[kOctet] = {};
    const int i = chunk * kChunkSize + lane_index() * kOctet;
    source.octet(i, weights);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) scratch->chunk[lane_index() * kOctet + j] = weights[j];
  }
  __syncwarp();
  int picked = 0;
  double inside = 0.0;
  for (int i = 0; i < kChunkSize; ++i) {
    const float weight = scratch->chunk[i];
    if (found) {
      inside = inside + static_cast<double>(weight);
      if (prefix + inside > draw) {
        picked = i;
        break;
      }
    } else if (weight > 0.0f) {
      picked = i;
    }
  }
  return chunk * kChunkSize + picked;
}

/// How far, relative to a block's sum, prefixes in float32 of weights by the special function unit can be
/// from the definition's: some twenty roundings of 2^-24, weights off by 2^-22 and by the rounding of their
/// exponents, and as much again.
constexpr float kPickMargin = 1e-5f;
/// The same for prefixes in float64 of the definition's weights: 4,096 roundings of 2^-53, and as much again.
constexpr double kPrecisePickMargin = 1e-12;

/// The weights of a block of logits in shared memory, by the special function unit.
template <DType kDType>
struct QuickWeights {
  static constexpr int kWords = kDType == DType::kFloat32 ? 2 : 1;

  const uint4* stage;
  int num_ids;
  float reference, scale;

  __device__ QuickWeights(const uint4* staged, int size, float max, float row_scale)
      : stage(staged), num_ids(size), reference(max), scale(row_scale) {}

  __device__ int size() const { return num_ids; }
  __device__ void fetch(unsigned octet, uint4 (&words)[kWords]) const {
    const uint4* first = in_shared(stage) + (kWords == 2 ? octet + octet / kWarpSize * kWarpSize : octet);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = first[w * kWarpSize];
  }
  __device__ void weigh(const uint4 (&words)[kWords], float (&weights)[kOctet]) const {
    uint32_t bits[kWords * 4];
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      bits[w * 4] = words[w].x;
      bits[w * 4 + 1] = words[w].y;
      bits[w * 4 + 2] = words[w].z;
      bits[w * 4 + 3] = words[w].w;
    }
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      weights[j] = quick_exp2((word_element<kDType>(bits, j) - reference) * scale);
    }
  }
  __device__ void octet(int i, float (&weights)[kOctet]) const {
    uint4 words[kWords];
    fetch(static_cast<unsigned>(i) / kOctet, words);
    weigh(words, weights);
  }
};

template <class Real>
__device__ __forceinline__ Real sum_of(const float (&w)[kOctet]) {
  const Real first = (static_cast<Real>(w[0]) + static_cast<Real>(w[1])) +
                     (static_cast<Real>(w[2]) + static_cast<Real>(w[3]));
  return first + ((static_cast<Real>(w[4]) + static_cast<Real>(w[5])) +
                  (static_cast<Real>(w[6]) + static_cast<Real>(w[7])));
}

/// In every lane the sum of its own and the values of the lanes before it, in groups of `width` lanes.
template <class Real>
__device__ __forceinline__ Real warp_prefix(Real value, int width) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const Real before = __shfl_up_sync(kAllLanes, value, distance, width);
    if (lane_index() % width >= distance) value += before;
  }
  return value;
}

// Picks from prefixes that are only near the definition's: weights added in another order. Each lane adds up
// a part of the block, the lanes in the order of the ids. Lanes begin at different octets of their parts, so
// that they read from different banks. What lies behind the end of a block is read and not counted.
constexpr unsigned kPart = kBlockSize / kWarpSize, kOctetsOfPart = kPart / kOctet;

__device__ __forceinline__ unsigned octet_of_part(unsigned step) {
  const auto lane = static_cast<unsigned>(lane_index());
  return lane * kOctetsOfPart + (step + lane) % kOctetsOfPart;
}

/// What pick_step_by_step finds, where the lanes' parts sum up to `sum`. -1 where a prefix is so near the
/// draw that the order could matter: within `relative_margin` of the block's sum and `margin_of_draw`.
template <class Real, class Weights>
__device__ __forceinline__ int pick_in_parts(const Weights& source, Real sum_of_part, double draw,
                                             double margin_of_draw, double relative_margin) {
  const auto wanted = static_cast<Real>(draw);
  const Real prefix = warp_prefix(sum_of_part, kWarpSize);
  const Real total = __shfl_sync(kAllLanes, prefix, kWarpSize - 1);
  const Real margin = static_cast<Real>(margin_of_draw) + total * static_cast<Real>(relative_margin);
  const int chosen = first_lane(prefix > wanted);
  if (chosen < 0) return -1;
  const Real begin = chosen > 0 ? __shfl_sync(kAllLanes, prefix, chosen - 1) : Real{0};

  // An octet of the part to a lane.
  const int first =
      chosen * static_cast<int>(kPart) + lane_index() % static_cast<int>(kOctetsOfPart) * kOctet;
  const bool is_inside = first < source.size();
  float w[kOctet];
  source.octet(first, w);
  const Real own = is_inside ? sum_of<Real>(w) : Real{0};
  Real sum = begin + (warp_prefix(own, kOctetsOfPart) - own);
  int found = -1;
  bool clear = false;
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const Real next = sum + static_cast<Real>(w[j]);
    if (found < 0 && next > wanted && is_inside) {
      found = first + j;
      clear = next > wanted + margin && sum < wanted - margin;
    }
    sum = next;
  }
  const int holder = first_lane(found >= 0);
  if (holder < 0 || !__shfl_sync(kAllLanes, clear, holder)) return -1;
  return __shfl_sync(kAllLanes, found, holder);
}

/// Inlined: out of line the compiler spares registers, and each weight waits for the one before.
template <DType kDType>
__device__ __forceinline__ int quick_pick(QuickWeights<kDType> source, double draw, double margin) {
  constexpr int kWords = QuickWeights<kDType>::kWords, kAtOnce = 4 / kWords;
  float sums[kAtOnce] = {};
#pragma unroll 1
  for (unsigned step = 0; step < kOctetsOfPart; step += kAtOnce) {
    uint4 words[kAtOnce][kWords];
#pragma unroll
    for (unsigned j = 0; j < kAtOnce; ++j) source.fetch(octet_of_part(step + j), words[j]);
#pragma unroll
    for (unsigned j = 0; j < kAtOnce; ++j) {
      float w[kOctet];
      source.weigh(words[j], w);
      const float sum = sum_of<float>(w);
      sums[j] += static_cast<int>(octet_of_part(step + j)) * kOctet < source.size() ? sum : 0.0f;
    }
  }
#pragma unroll
  for (int half = kAtOnce / 2; half >= 1; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return pick_in_parts<float>(source, sums[0], draw, margin, kPickMargin);
}

/// From the definition's weights, in float64.
template <class Weights>
__device__ __noinline__ int precise_pick(Weights source, double draw, double margin) {
  double sum = 0.0;
#pragma unroll 1
  for (unsigned step = 0; step < kOctetsOfPart; ++step) {
    const int i = static_cast<int>(octet_of_part(step)) * kOctet;
    float w[kOctet];
    source.octet(i, w);
    sum += i < source.size() ? sum_of<double>(w) : 0.0;
  }
  return pick_in_parts<double>(source, sum, draw, margin, kPrecisePickMargin);
}

/// For unscaled weights of a block of logits.
__device__ __forceinline__ int pick_near(const WeightsOfLogits& source, double draw, double margin) {
  const float max = source.exp2.reference, scale = source.exp2.scale;
  int found;
  switch (source.block.row.dtype) {
    case DType::kBFloat16:
      found =
          quick_pick(QuickWeights<DType::kBFloat16>(source.stage, source.size(), max, scale), draw, margin);
      break;
    case DType::kFloat16:
      found =
          quick_pick(QuickWeights<DType::kFloat16>(source.stage, source.size(), max, scale), draw, margin);
      break;
    default:
      found =
          quick_pick(QuickWeights<DType::kFloat32>(source.stage, source.size(), max, scale), draw, margin);
  }
  return found >= 0 ? found : precise_pick(source, draw, margin);
}

template <class Weights>
__device__ __forceinline__ int pick_in_block(const Weights& source, double draw, PickScratch* scratch) {
  const int found = precise_pick(source, draw, 0.0);
  return found >= 0 ? found : pick_step_by_step(source, draw, scratch);
}

}  // namespace specdec_ops::cuda

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/philox.h"
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
  /// Elements below it count as -inf.
  float threshold = kMasked;

  __device__ int item_size() const { return dtype == DType::kFloat32 ? 4 : 2; }
};

__device__ __forceinline__ RowRef row_of(const RowsView& rows, int64_t row) {
  const int64_t item_size = rows.dtype == DType::kFloat32 ? 4 : 2;
  RowRef ref;
  ref.data = static_cast<const char*>(rows.data) + row * rows.stride * item_size;
  ref.dtype = rows.dtype;
  return ref;
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

__device__ __forceinline__ float stored_element(const RowRef& row, int64_t index) {
  switch (row.dtype) {
    case DType::kBFloat16:
      return bf16_low(__ldg(reinterpret_cast<const unsigned short*>(row.data) + index));
    case DType::kFloat16:
      return f16_low(__ldg(reinterpret_cast<const unsigned short*>(row.data) + index));
    default:
      return __ldg(reinterpret_cast<const float*>(row.data) + index);
  }
}

__device__ __forceinline__ float element(const RowRef& row, int64_t index) {
  const float x = stored_element(row, index);
  return x < row.threshold ? kMasked : x;
}

/// Eight elements of two bytes.
__device__ __forceinline__ void octet_of_halves(const uint4& four, DType dtype, float (&x)[kOctet]) {
  const uint32_t words[4] = {four.x, four.y, four.z, four.w};
  if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? bf16_low(words[j / 2]) : bf16_high(words[j / 2]);
  } else {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = j % 2 == 0 ? f16_low(words[j / 2]) : f16_high(words[j / 2]);
  }
}

/// Eight elements as they are stored, from `index` on; `padding` from `end` on.
__device__ inline void load_stored_octet(const RowRef& row, int64_t index, int64_t end, float padding,
                                         float (&x)[kOctet]) {
  const char* address = row.data + index * row.item_size();
  if (index + kOctet > end || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
#pragma unroll
    for (int j = 0; j < kOctet; ++j) x[j] = index + j < end ? stored_element(row, index + j) : padding;
    return;
  }
  const uint4 first = __ldg(reinterpret_cast<const uint4*>(address));
  if (row.dtype != DType::kFloat32) return octet_of_halves(first, row.dtype, x);
  const uint4 second = __ldg(reinterpret_cast<const uint4*>(address) + 1);
  const uint32_t words[kOctet] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
  for (int j = 0; j < kOctet; ++j) x[j] = __uint_as_float(words[j]);
}

__device__ inline void load_octet(const RowRef& row, int64_t index, int64_t end, float padding,
                                  float (&x)[kOctet]) {
  load_stored_octet(row, index, end, padding, x);
#pragma unroll
  for (int j = 0; j < kOctet; ++j) x[j] = x[j] < row.threshold ? kMasked : x[j];
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
__device__ __forceinline__ float staged_max(const uint4* stage, int rows, bool* has_nan,
                                            float* part_max = nullptr) {
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
  if (part_max != nullptr) *part_max = best;
  return warp_max(best);
}

/// The first element of a block in shared memory that equals `value`; kBlockSize if there is none.
template <DType kDType>
__device__ __forceinline__ int staged_index(uint4* stage, int rows, float value) {
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
  }
  return warp_min(found);
}

/// The largest logit and, in place of the sum, its index; NaN there where not all is finite.
template <DType kDType>
__device__ __forceinline__ BlockStats staged_argmax(uint4* stage, int rows) {
  bool has_nan;
  const float best = staged_max<kDType>(stage, rows, &has_nan);
  if (has_nan || best == -kMasked) return {best, __builtin_nanf("")};
  return {best, static_cast<float>(staged_index<kDType>(stage, rows, best))};
}

/// What is asked of a block beside its maximum.
enum class Sum {
  kNone,
  /// By the special function unit, within 3e-6 of the definition's: a third of the instructions.
  kQuick,
  kDefined,
};

/// Maximum and sum of weights; without a sum what staged_argmax says. With a sum, `part_max` gets the largest
/// logit of what the thread holds.
template <DType kDType>
__device__ __forceinline__ BlockStats staged_stats(uint4* stage, int rows, float scale, Sum sum,
                                                   float* part_max) {
  if (sum == Sum::kNone) return staged_argmax<kDType>(stage, rows);
  const float best = staged_max<kDType>(stage, rows, nullptr, part_max);
  if (!(best > kMasked) || best == -kMasked) {
    const BlockStats stats = staged_argmax<kDType>(stage, rows);
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
  }
  return {best, tree_sum(sums)};
}

/// Of a block that the warp has staged.
__device__ __forceinline__ BlockStats block_stats(const BlockRef& block, float scale, Sum sum, uint4* stage,
                                                  float* part_max = nullptr) {
  switch (block.row.dtype) {
    case DType::kBFloat16:
      return staged_stats<DType::kBFloat16>(stage, block.staged_rows(), scale, sum, part_max);
    case DType::kFloat16:
      return staged_stats<DType::kFloat16>(stage, block.staged_rows(), scale, sum, part_max);
    default:
      return staged_stats<DType::kFloat32>(stage, block.staged_rows(), scale, sum, part_max);
  }
}

/// Masks what lies below the row's threshold in a block that was fetched, each thread what it has fetched.
template <DType kDType>
static __device__ __noinline__ void mask_block(BlockRef block, uint4* stage) {
  constexpr int kWords = kDType == DType::kFloat32 ? 2 : 1;
  const float threshold = block.row.threshold;
#pragma unroll 1
  for (int i = lane_index(); i < block.staged_rows() * kWords * kWarpSize; i += kWarpSize) {
    const uint4 four = stage[i];
    uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if constexpr (kDType == DType::kFloat32) {
        if (__uint_as_float(words[j]) < threshold) words[j] = __float_as_uint(kMasked);
      } else {
        constexpr uint32_t kLow = Pairs<kDType>::kMaskedPair & 0xFFFF, kHigh = kLow << 16;
        if (Pairs<kDType>::low(words[j]) < threshold) words[j] = (words[j] & 0xFFFF0000u) | kLow;
        if (Pairs<kDType>::high(words[j]) < threshold) words[j] = (words[j] & 0xFFFFu) | kHigh;
      }
    }
    stage[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

__device__ __forceinline__ void mask_block(const BlockRef& block, uint4* stage) {
  switch (block.row.dtype) {
    case DType::kBFloat16:
      return mask_block<DType::kBFloat16>(block, stage);
    case DType::kFloat16:
      return mask_block<DType::kFloat16>(block, stage);
    default:
      return mask_block<DType::kFloat32>(block, stage);
  }
}

/// Fetches a block into the warp's shared memory, for staged_octet. Out of line, like what follows: for
/// judges.
static __device__ __noinline__ void fetch_block(BlockRef block, uint4* stage) {
  __syncwarp();  // others may still read what is there
  stage_block(block, stage);
  wait_for_copies();
  if (block.row.threshold > kMasked) mask_block(block, stage);
  __syncwarp();
}

/// Tells the compiler that an address is one of shared memory, where it cannot see that.
template <class T>
__device__ __forceinline__ const T* in_shared(const T* address) {
  return static_cast<const T*>(__cvta_shared_to_generic(__cvta_generic_to_shared(address)));
}

/// Of a block that was fetched.
static __device__ __noinline__ BlockStats defined_block_stats(BlockRef block, float scale, uint4* stage) {
  return block_stats(block, scale, Sum::kDefined, stage);
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
  octet_of_halves(stage[octet], dtype, x);
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
    load_stored_octet(block.row, block.begin + i, block.begin + block.size, 0.0f, x);
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

/// The id that the numbers of a chunk and of an id choose in a block, addition by addition: the definition,
/// as in csrc/cpu/kernels/blocks.kernel.h.
template <class Weights>
__device__ __noinline__ int pick_step_by_step(Weights source, double chunk_number, double id_number,
                                              PickScratch* scratch) {
  const double draw = chunk_number * chunk_sums(source, scratch);
  double prefix = 0.0, remainder = 1.0;
  int chunk = 0;
  for (int c = 0; c < kChunksPerBlock; ++c) {
    const double sum = scratch->sums[c];
    if (sum > 0.0) chunk = c;
    if (prefix + sum > draw) {
      remainder = (draw - prefix) / sum;
      break;
    }
    prefix = prefix + sum;
  }
  if (lane_index() < kChunkSize / kOctet) {
    float weights[kOctet] = {};
    source.octet(chunk * kChunkSize + lane_index() * kOctet, weights);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) scratch->chunk[lane_index() * kOctet + j] = weights[j];
  }
  __syncwarp();
  const double rest = number_or_remainder(id_number, remainder) * scratch->sums[chunk];
  double inside = 0.0;
  int last = 0;
  for (int i = 0; i < kChunkSize; ++i) {
    const float weight = scratch->chunk[i];
    if (weight > 0.0f) last = i;
    inside = inside + static_cast<double>(weight);
    if (inside > rest) break;
  }
  return chunk * kChunkSize + last;
}

/// How far, relative to a block's sum, prefixes in float32 of weights by the special function unit can be
/// from the definition's: twelve roundings of 2^-24, weights off by 1e-6 on average, and as much again.
constexpr float kChunkMargin = 4e-6f;
/// The same for the prefixes of a chunk in float64: 64 roundings of 2^-53, and much more.
constexpr double kIdMargin = 1e-12;

/// The weights of a block of logits in shared memory, which has a maximum.
template <DType kDType>
struct StagedWeights {
  static constexpr int kWords = kDType == DType::kFloat32 ? 2 : 1;

  const uint4* stage;
  Exp2 exp2;

  __device__ explicit StagedWeights(const WeightsOfLogits& source)
      : stage(in_shared(source.stage)), exp2(source.exp2) {}

  __device__ __forceinline__ void fetch(unsigned octet, uint32_t (&bits)[kWords * 4]) const {
    const uint4* first = stage + (kWords == 2 ? octet + octet / kWarpSize * kWarpSize : octet);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint4 four = first[w * kWarpSize];
      bits[w * 4] = four.x;
      bits[w * 4 + 1] = four.y;
      bits[w * 4 + 2] = four.z;
      bits[w * 4 + 3] = four.w;
    }
  }
  __device__ __forceinline__ float quick_sum(unsigned octet) const {
    uint32_t bits[kWords * 4];
    fetch(octet, bits);
    float w[kOctet];
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      w[j] = quick_exp2((word_element<kDType>(bits, j) - exp2.reference) * exp2.scale);
    }
    return ((w[0] + w[1]) + (w[2] + w[3])) + ((w[4] + w[5]) + (w[6] + w[7]));
  }
  __device__ __forceinline__ void octet(unsigned octet, float (&weights)[kOctet]) const {
    uint32_t bits[kWords * 4];
    fetch(octet, bits);
#pragma unroll
    for (int j = 0; j < kOctet; ++j) {
      float polynomial, power;
      exp2.factors(word_element<kDType>(bits, j), &polynomial, &power);
      weights[j] = mul_ftz(polynomial, power);
    }
  }
};

/// In every lane the sum of its own and the values of the lanes before it, in groups of `width` lanes.
template <class Real>
__device__ __forceinline__ Real warp_prefix(Real value, int width) {
#pragma unroll
  for (int distance = 1; distance < width; distance *= 2) {
    const Real before = __shfl_up_sync(kAllLanes, value, distance, width);
    if (lane_index() % width >= distance) value += before;
  }
  return value;
}

/// The chunk of a block in shared memory that a number chooses, -1 where it is too near to call. A lane adds
/// up two chunks. Lanes begin at different octets, so that they read from different banks.
template <DType kDType>
__device__ __forceinline__ int quick_chunk(const StagedWeights<kDType>& source, int size, double number) {
  constexpr unsigned kOctets = kChunkSize / kOctet;
  const auto lane = static_cast<unsigned>(lane_index());
  // What lies behind the end of a block is read and not counted.
  const auto end = static_cast<unsigned>(size + kOctet - 1) / kOctet;
  float first = 0.0f, second = 0.0f;
#pragma unroll 4
  for (unsigned step = 0; step < 2 * kOctets; ++step) {
    const unsigned within = (step + lane) % (2 * kOctets), octet = lane * 2 * kOctets + within;
    const float sum = source.quick_sum(octet);
    first += octet < end && within < kOctets ? sum : 0.0f;
    second += octet < end && within >= kOctets ? sum : 0.0f;
  }
  const float prefix = warp_prefix(first + second, kWarpSize);
  const float total = __shfl_sync(kAllLanes, prefix, kWarpSize - 1);
  const float draw = static_cast<float>(number) * total, margin = total * kChunkMargin;
  float before = __shfl_up_sync(kAllLanes, prefix, 1);
  if (lane_index() == 0) before = 0.0f;
  const bool is_second = before + first <= draw;
  const float begin = is_second ? before + first : before;
  const bool is_clear = begin < draw - margin && begin + (is_second ? second : first) > draw + margin;
  const int holder = first_lane(is_clear);
  return holder < 0 ? -1 : 2 * holder + __shfl_sync(kAllLanes, static_cast<int>(is_second), holder);
}

/// The id of a chunk that a number chooses, -1 where it is too near to call: within the margin, relative to
/// the chunk's sum. An octet to a lane.
template <DType kDType>
__device__ __forceinline__ int quick_id(const StagedWeights<kDType>& source, int chunk, double number,
                                        double margin) {
  constexpr int kOctets = kChunkSize / kOctet;
  const int octet = chunk * kOctets + lane_index() % kOctets;
  float w[kOctet];
  source.octet(static_cast<unsigned>(octet), w);
  double own = 0.0;
#pragma unroll
  for (int j = 0; j < kOctet; ++j) own += static_cast<double>(w[j]);
  const double prefix = warp_prefix(own, kOctets);
  const double total = __shfl_sync(kAllLanes, prefix, kOctets - 1), draw = number * total;
  double sum = prefix - own;
  int found = -1;
#pragma unroll
  for (int j = 0; j < kOctet; ++j) {
    const double next = sum + static_cast<double>(w[j]);
    if (sum < draw - margin * total && next > draw + margin * total) found = octet * kOctet + j;
    sum = next;
  }
  const int holder = first_lane(found >= 0);
  return holder < 0 ? -1 : __shfl_sync(kAllLanes, found, holder);
}

template <DType kDType>
__device__ __forceinline__ int quick_pick(const WeightsOfLogits& weights, const TokenDraw& token,
                                          double id_margin) {
  const StagedWeights<kDType> source(weights);
  const int chunk = quick_chunk(source, weights.size(), token.chunk);
  return chunk < 0 ? -1 : quick_id(source, chunk, token.id, id_margin);
}

/// What pick_step_by_step finds for unscaled weights of a block of logits in shared memory; -1 where it takes
/// care.
__device__ __forceinline__ int quick_pick(const WeightsOfLogits& weights, const TokenDraw& token,
                                          double id_margin) {
  switch (weights.block.row.dtype) {
    case DType::kBFloat16:
      return quick_pick<DType::kBFloat16>(weights, token, id_margin);
    case DType::kFloat16:
      return quick_pick<DType::kFloat16>(weights, token, id_margin);
    default:
      return quick_pick<DType::kFloat32>(weights, token, id_margin);
  }
}
static __device__ __noinline__ int quick_pick_out_of_line(WeightsOfLogits weights, TokenDraw token,
                                                          double id_margin) {
  return quick_pick(weights, token, id_margin);
}

}  // namespace specdec_ops::cuda

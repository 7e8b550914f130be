#pragma once

#include <cstdint>

#include "common/macros.h"

namespace specdec_ops {

/// What a random number is for. Streams never share a counter.
enum class Stream : uint32_t { kAccept = 0, kGumbel = 1, kDraft = 2, kTarget = 3, kBlock = 4 };

struct PhiloxBlock {
  uint32_t words[4];
};

/// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
SPECDEC_HOST_DEVICE PhiloxBlock philox4x32(uint64_t key, PhiloxBlock counter) {
  uint32_t key_low = static_cast<uint32_t>(key);
  uint32_t key_high = static_cast<uint32_t>(key >> 32);
  uint32_t* c = counter.words;
  for (int round = 0; round < 10; ++round) {
    const uint64_t low = uint64_t{0xD2511F53} * c[0];
    const uint64_t high = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next0 = static_cast<uint32_t>(high >> 32) ^ c[1] ^ key_low;
    const uint32_t next2 = static_cast<uint32_t>(low >> 32) ^ c[3] ^ key_high;
    c[0] = next0;
    c[1] = static_cast<uint32_t>(high);
    c[2] = next2;
    c[3] = static_cast<uint32_t>(low);
    key_low += 0x9E3779B9;
    key_high += 0xBB67AE85;
  }
  return counter;
}

/// The finaliser of SplitMix64 (Steele et al., OOPSLA 2014): spreads a user's seed over the key.
SPECDEC_HOST_DEVICE uint64_t splitmix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

/// 128 random bits that depend on these arguments alone: never on a row, block or rank.
SPECDEC_HOST_DEVICE PhiloxBlock random_words(int64_t seed, Stream stream, int64_t slot, int64_t position) {
  const uint64_t p = static_cast<uint64_t>(position);
  const PhiloxBlock counter = {{static_cast<uint32_t>(slot), static_cast<uint32_t>(p),
                                static_cast<uint32_t>(stream), static_cast<uint32_t>(p >> 32)}};
  return philox4x32(splitmix64(static_cast<uint64_t>(seed)), counter);
}

/// 53 of the bits, in [0, 1).
SPECDEC_HOST_DEVICE double uniform_of(const PhiloxBlock& random) {
  const uint64_t bits = (uint64_t{random.words[0] >> 5} << 26) | (random.words[1] >> 6);
  return static_cast<double>(bits) * 0x1p-53;
}

SPECDEC_HOST_DEVICE double uniform(int64_t seed, Stream stream, int64_t slot, int64_t position) {
  return uniform_of(random_words(seed, stream, slot, position));
}

/// The uniforms of one token, level by level: which block of its row, which chunk of that, which id. A level
/// whose number is kRemainder goes by what the level above it has left of its own.
struct TokenDraw {
  double block, chunk, id;

  static constexpr double kRemainder = -1.0;
  SPECDEC_HOST_DEVICE static TokenDraw from(double uniform) { return {uniform, kRemainder, kRemainder}; }
  /// Independent numbers: 53 bits for the id, and those that are left, 37 and 38.
  SPECDEC_HOST_DEVICE static TokenDraw from(const PhiloxBlock& random) {
    const uint64_t chunk = uint64_t{random.words[2]} << 5 | (random.words[0] & 31);
    const uint64_t block = uint64_t{random.words[3]} << 6 | (random.words[1] & 63);
    return {static_cast<double>(block) * 0x1p-38, static_cast<double>(chunk) * 0x1p-37, uniform_of(random)};
  }
};
SPECDEC_HOST_DEVICE double number_or_remainder(double number, double remainder) {
  return number >= 0.0 ? number : remainder;
}

}  // namespace specdec_ops

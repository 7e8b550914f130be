// The id of a block with the largest score (common/gumbel.h). Included by chain.kernel.h.

namespace {

/// The noise of the ids from `first` on, a multiple of kNoiseGroup like `n`. Plain loops, without branches
/// and with trip counts that compilers turn into vectors.
void write_noise(const NoiseKey& key, int64_t first, int n, float* noise) {
  constexpr int kMostNumbers = kBlockSize / 4;
  uint32_t c0[kMostNumbers], c1[kMostNumbers], c2[kMostNumbers], c3[kMostNumbers];
  const int numbers = n / 4;
  for (int i = 0; i < numbers; ++i) {
    c0[i] = static_cast<uint32_t>(first / 4) + static_cast<uint32_t>(i);
    c1[i] = static_cast<uint32_t>(key.position);
    c2[i] = static_cast<uint32_t>(Stream::kGumbel);
    c3[i] = static_cast<uint32_t>(key.position >> 32);
  }
  uint32_t k0 = static_cast<uint32_t>(key.key), k1 = static_cast<uint32_t>(key.key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < numbers; ++i) {
      const uint64_t low = uint64_t{0xD2511F53} * c0[i], high = uint64_t{0xCD9E8D57} * c2[i];
      c0[i] = static_cast<uint32_t>(high >> 32) ^ c1[i] ^ k0;
      c2[i] = static_cast<uint32_t>(low >> 32) ^ c3[i] ^ k1;
      c1[i] = static_cast<uint32_t>(high);
      c3[i] = static_cast<uint32_t>(low);
    }
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  const uint32_t* words[4] = {c0, c1, c2, c3};
  for (int w = 0; w < 4; ++w) {
    for (int i = 0; i < numbers; i += kNoiseLanes) {
      float* out = noise + 4 * i + w * kNoiseLanes;
      for (int l = 0; l < kNoiseLanes; ++l) out[l] = gumbel_of(words[w][i + l]);
    }
  }
}

/// The largest score of a block and, in `sum`, the lowest index that has it.
BlockStats largest_score(const ChainRun& run, const Phase& phase, int block) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  alignas(64) float scores[kBlockSize];
  alignas(64) float noise[kBlockSize];
  const int n = float_block(phase.row, begin, block_length(run, block), scores) * kNumLanes;
  write_noise(phase.noise, begin, n, noise);
  for (int i = 0; i < n; ++i) scores[i] = gumbel_score(scores[i], phase.reference, phase.row.scale, noise[i]);
  const float best = block_max(scores, n / kNumLanes, nullptr);
  return {best, static_cast<float>(first_equal(scores, n / kNumLanes, best))};
}

}  // namespace

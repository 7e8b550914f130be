// Random rows and tokens: every tier, and the emulated AVX-512 tier, must give the same bits.

#include "cpu/kernels/token_logprobs.h"

#include <memory>
#include <type_traits>

#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/types.h"
#include "random_rows.h"
#if defined(__x86_64__)
#define SPECDEC_EMULATED_KERNEL "cpu/kernels/token_logprobs.kernel.h"
#include "emulated_avx512.h"
#endif

using namespace specdec_ops;
using namespace specdec_ops::cpu;

int main() {
  std::mt19937 random(20260103);
  constexpr int kCases = 300;
  for (int i = 0; i < kCases; ++i) {
    TokenLogprobsParams params;
    params.vocab_size = random_vocab_size(random);
    params.num_rows = 1 + static_cast<int64_t>(random() % 3);
    params.top_n = static_cast<int>(
        random() % static_cast<unsigned>(1 + (params.vocab_size < 64 ? params.vocab_size : 64)));
    const RandomRows rows(random, params.num_rows, params.vocab_size);
    params.logits = rows.view;
    std::vector<float> temperature;
    std::vector<TokenRow> tokens;
    for (int64_t row = 0; row < params.num_rows; ++row) {
      temperature.push_back(0.5f * static_cast<float>(random() % 4));
      const auto token = static_cast<int64_t>(random() % static_cast<unsigned>(params.vocab_size + 2)) - 1;
      tokens.push_back({token < 0 ? -1 : row, token, row});
    }
    params.temperature = {temperature.data(), 1, false};

    const auto outputs = [&](const std::function<void()>& run) {
      const auto size = static_cast<size_t>(params.num_rows);
      const size_t columns = 1 + static_cast<size_t>(params.top_n);
      std::vector<int32_t> ids(size * columns), status(size);
      std::vector<float> logprobs(size * columns);
      std::vector<int64_t> ranks(size);
      params.out_token_ids = {ids.data(), 1, false, static_cast<int64_t>(columns)};
      params.logprobs = logprobs.data();
      params.ranks = ranks.data();
      params.status = status.data();
      run();
      Bytes bytes;
      append(bytes, ids);
      append(bytes, logprobs);
      append(bytes, ranks);
      append(bytes, status);
      return bytes;
    };
    std::function<Bytes()> run_emulated;
#if defined(__x86_64__)
    run_emulated = [&] {
      return outputs([&] {
        std::vector<BlockStats> workspace(static_cast<size_t>(params.num_blocks()));
        const DenormalsOn environment;
        emulated::logprobs_of_rows(params, tokens.data(), 0, params.num_rows, workspace.data());
      });
    };
#endif
    compare_tiers(
        i, [&] { return outputs([&] { run_token_logprobs(params, tokens.data(), 0, params.num_rows); }); },
        run_emulated);
  }
  std::printf("%d passed, 0 failed\n", kCases);
}

// Random rows and pairs of rows: every tier, and the emulated AVX-512 tier, must give the same bits.

#include "cpu/kernels/row_statistics.h"

#include <memory>
#include <type_traits>

#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/types.h"
#include "random_rows.h"
#if defined(__x86_64__)
#define SPECDEC_EMULATED_KERNEL "cpu/kernels/row_statistics.kernel.h"
#include "emulated_avx512.h"
#endif

using namespace specdec_ops;
using namespace specdec_ops::cpu;

int main() {
  std::mt19937 random(20260102);
  constexpr int kCases = 300;
  for (int i = 0; i < kCases; ++i) {
    RowStatisticsParams params;
    params.vocab_size = random_vocab_size(random);
    params.num_rows = 1 + static_cast<int64_t>(random() % 3);
    const RandomRows target(random, params.num_rows, params.vocab_size);
    const RandomRows draft(random, params.num_rows, params.vocab_size);
    params.target = target.view;
    params.num_target_rows = params.num_rows;
    if (random() % 3 != 0) params.draft = draft.view;
    const float temperatures[] = {0.0f, 0.7f, 1.0f, __builtin_inff()};
    std::vector<float> temperature, draft_temperature;
    std::vector<int64_t> indices;
    for (int64_t row = 0; row < params.num_rows; ++row) {
      temperature.push_back(temperatures[random() % 4]);
      draft_temperature.push_back(temperatures[random() % 4]);
      // One past either end too.
      indices.push_back(static_cast<int64_t>(random() % static_cast<unsigned>(params.num_rows + 2)) - 1);
    }
    params.temperature = {temperature.data(), 1, false};
    params.draft_temperature = {draft_temperature.data(), 1, false};
    if (random() % 2 == 0) params.row_indices = {indices.data(), 1, true};

    const auto outputs = [&](const std::function<void()>& run) {
      const auto size = static_cast<size_t>(params.num_rows);
      std::vector<double> logsumexp(size);
      std::vector<float> floats[5];
      for (auto& values : floats) values.resize(size);
      std::vector<int32_t> status(size);
      params.logsumexp = logsumexp.data();
      params.max_prob = floats[0].data();
      params.margin = floats[1].data();
      params.entropy = floats[2].data();
      params.accept_prob = floats[3].data();
      params.total_variation = floats[4].data();
      params.status = status.data();
      run();
      Bytes bytes;
      append(bytes, logsumexp);
      for (const auto& values : floats) append(bytes, values);
      append(bytes, status);
      return bytes;
    };
    std::function<Bytes()> run_emulated;
#if defined(__x86_64__)
    run_emulated = [&] {
      return outputs([&] {
        std::vector<BlockStatistics> workspace(static_cast<size_t>(2 * params.num_blocks()));
        const DenormalsOn environment;
        emulated::statistics_of_rows(params, 0, params.num_rows, workspace.data());
      });
    };
#endif
    compare_tiers(
        i, [&] { return outputs([&] { run_row_statistics(params, 0, params.num_rows); }); }, run_emulated);
  }
  std::printf("%d passed, 0 failed\n", kCases);
}

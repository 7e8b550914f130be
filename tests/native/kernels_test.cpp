// Random calls of the chain program from exactly sized buffers, for the sanitizers: every tier, one
// thread and several, and the emulated AVX-512 tier must give the same bits.

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "cpu/kernels/chain.h"
#include "cpu/kernels/chain_run.h"
#include "cpu/kernels/isa.h"
#if defined(__x86_64__)
#define SPECDEC_EMULATED_KERNEL "cpu/kernels/chain.kernel.h"
#include "emulated_avx512.h"
#endif

namespace {

using namespace specdec_ops;
using namespace specdec_ops::cpu;

void on_threads(int num_workers, void (*task)(void*, int), void* context) {
  std::vector<std::thread> threads;
  for (int worker = 0; worker < num_workers; ++worker) threads.emplace_back(task, context, worker);
  for (std::thread& thread : threads) thread.join();
}

/// As a thread pool does that is already inside a parallel region.
void one_after_another(int num_workers, void (*task)(void*, int), void* context) {
  for (int worker = 0; worker < num_workers; ++worker) task(context, worker);
}

/// One random call, in buffers without a byte to spare.
struct Case {
  std::vector<float> target, draft, logprobs_in;
  std::vector<uint16_t> target_half;
  std::vector<int64_t> cu, draft_ids, seeds, positions, support_ids, indices, top_k;
  std::vector<float> temperature, top_p, min_p;
  ChainParams params;

  explicit Case(std::mt19937& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const int sizes[] = {1, 7, 16, 255, 257, 4095, 4097, 9000, 20000};
    const int64_t vocab = sizes[below(9)];
    const int batch = 1 + below(4);
    cu.push_back(0);
    for (int r = 0; r < batch; ++r) cu.push_back(cu.back() + below(4));
    const int64_t num_drafts = cu.back();
    std::normal_distribution<float> normal(0.0f, 3.0f);
    target.resize(static_cast<size_t>((num_drafts + batch) * vocab));
    for (float& x : target) x = normal(random);
    // Draft laws by draft, or for four slots in each entry.
    const bool in_entries = below(2) == 0;
    const int64_t num_laws = in_entries ? 4 * batch : num_drafts;
    for (int64_t i = 0; i < num_laws * vocab; ++i) {
      draft.push_back(target[static_cast<size_t>(i) % target.size()] + 0.3f * normal(random));
    }
    const float odd[] = {-__builtin_inff(), __builtin_inff(), __builtin_nanf("")};
    if (below(4) == 0) target[random() % target.size()] = odd[below(3)];
    if (below(4) == 0 && !draft.empty()) draft[random() % draft.size()] = odd[below(3)];
    for (int64_t d = 0; d < num_drafts; ++d) {
      draft_ids.push_back(below(12) == 0 ? below(3) * vocab - 1 : random() % static_cast<uint64_t>(vocab));
    }
    for (int64_t law = 0; law < num_laws; ++law) {
      for (int j = 0; j < 3; ++j) {
        const bool is_draft = j == 0 && law < num_drafts;
        support_ids.push_back(is_draft ? draft_ids[static_cast<size_t>(law)]
                                       : below(static_cast<int>(vocab) + 1) - 1);
        logprobs_in.push_back(-1.0f - static_cast<float>(j));
      }
    }
    for (int r = 0; r < batch; ++r) {
      seeds.push_back(static_cast<int64_t>(random()));
      positions.push_back(below(1000));
      temperature.push_back(below(3) == 0 ? 0.0f : 0.5f + 0.25f * static_cast<float>(below(5)));
      // One past either end too.
      indices.push_back(below(batch + 2) - 1);
    }
    params.batch = batch;
    params.vocab_size = vocab;
    params.target = {target.data(), vocab, DType::kFloat32};
    const int half = below(3);
    if (half != 0) {
      for (float x : target) {
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        // Any bits will do: these are the top halves, read as bfloat16 or as float16.
        target_half.push_back(static_cast<uint16_t>(bits >> 16));
      }
      params.target = {target_half.data(), vocab, half == 1 ? DType::kBFloat16 : DType::kFloat16};
    }
    params.cu_num_draft_tokens = {cu.data(), 1, true};
    params.draft_token_ids = {draft_ids.data(), 1, true};
    params.draft_law = static_cast<DraftLawKind>(below(4));
    if (below(2) == 0) params.request_indices = {indices.data(), 1, true};
    params.num_entries = batch;
    const auto view_of_laws = [&](const auto& view, int64_t stride) {
      return DraftView<std::decay_t<decltype(view)>>{view, in_entries ? 0 : stride,
                                                     in_entries ? 4 * stride : 0};
    };
    params.draft = view_of_laws(RowsView{draft.data(), vocab, DType::kFloat32}, vocab);
    params.draft_support_ids = view_of_laws(IntView{support_ids.data(), 1, true, 3}, 3);
    params.draft_support_logprobs = view_of_laws(RealView{logprobs_in.data(), 1, false, 3}, 3);
    params.draft_support_size = 3;
    params.temperature = {temperature.data(), 1, false};
    for (int r = 0; r < batch; ++r) {
      top_k.push_back(below(3) == 0 ? 0 : 1 + below(below(2) == 0 ? 60 : static_cast<int>(vocab)));
      top_p.push_back(below(3) == 0 ? 1.0f : 0.01f * static_cast<float>(below(101)));
      min_p.push_back(below(3) == 0 ? 0.0f : 0.001f * static_cast<float>(1 + below(300)));
    }
    const auto some = [&](FilterViews& views) {
      if (below(2) == 0) views.top_k = {top_k.data(), 1, true};
      if (below(2) == 0) views.top_p = {top_p.data(), 1, false};
      if (below(3) == 0) views.min_p = {min_p.data(), 1, false};
    };
    if (below(2) == 0) some(params.filters);
    if (below(3) == 0 && params.draft_law == DraftLawKind::kLogits) some(params.draft_filters);
    params.joint_filters = below(2) == 0;
    params.seeds = {seeds.data(), 1, true};
    params.positions = {positions.data(), 1, true};
    params.width = 4;
  }

  using Runner = std::function<void(const ChainParams&, void*, int)>;

  std::vector<unsigned char> outputs(int num_workers, const Runner& run) {
    const auto batch = static_cast<size_t>(params.batch), num_drafts = static_cast<size_t>(cu.back());
    std::vector<int32_t> tokens(batch * 4), status(batch), accepted(batch);
    std::vector<double> logsumexp(num_drafts + batch);
    std::vector<float> logprobs(batch * 4), accept_probs(num_drafts);
    params.token_ids = tokens.data();
    params.status = status.data();
    params.num_accepted = accepted.data();
    params.logsumexp = logsumexp.data();
    params.logprobs = logprobs.data();
    params.accept_probs = accept_probs.data();
    const size_t size = (chain_workspace_size(params, num_workers) + 63) / 64 * 64;
    const std::unique_ptr<void, decltype(&std::free)> workspace(std::aligned_alloc(64, size), &std::free);
    run(params, workspace.get(), num_workers);
    for (size_t r = 0; r < batch; ++r) {
      for (int i = 0; i <= accepted[r]; ++i) {
        const int32_t id = tokens[r * 4 + static_cast<size_t>(i)];
        if (id < 0 || id >= params.vocab_size) {
          std::printf("id %d outside [0, %lld)\n", id, static_cast<long long>(params.vocab_size));
          std::exit(1);
        }
      }
    }
    std::vector<unsigned char> bytes;
    const auto append = [&](const auto& values) {
      const auto* data = reinterpret_cast<const unsigned char*>(values.data());
      bytes.insert(bytes.end(), data, data + values.size() * sizeof(values[0]));
    };
    append(tokens);
    append(status);
    append(accepted);
    append(logsumexp);
    append(logprobs);
    append(accept_probs);
    return bytes;
  }
};

}  // namespace

int main() {
  std::mt19937 random(20260101);
  constexpr int kCases = 400;
  for (int i = 0; i < kCases; ++i) {
    Case one(random);
    set_isa("scalar");
    const auto with = [&](ParallelFor parallel_for) {
      return [parallel_for](const ChainParams& params, void* workspace, int num_workers) {
        run_chain(params, workspace, num_workers, parallel_for);
      };
    };
    const auto expected = one.outputs(1, with(one_after_another));
    const auto check = [&](const char* what, const std::vector<unsigned char>& actual) {
      if (actual == expected) return;
      std::printf("case %d: %s differs from one scalar worker\n", i, what);
      std::exit(1);
    };
    for (Isa isa : available_isas()) {
      set_isa(name_of(isa));
      check(name_of(isa), one.outputs(1, with(one_after_another)));
      check("three threads", one.outputs(3, with(on_threads)));
      check("three workers on one thread", one.outputs(3, with(one_after_another)));
    }
#if defined(__x86_64__)
    check("emulated avx512", one.outputs(1, [](const ChainParams& params, void* workspace, int num_workers) {
      run_chain_with(emulated::run_worker, params, workspace, num_workers, one_after_another);
    }));
#endif
  }
  std::printf("%d passed, 0 failed\n", kCases);
}

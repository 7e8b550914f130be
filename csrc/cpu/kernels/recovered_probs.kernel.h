// Scores max(p - q, 0) * noise and their maxima. Included once per tier through foreach_isa.h.
//
// A score that is not a number wins nothing, and a probability that is not one counts as 0.

namespace {

/// n elements of a row as T, which is float or double: in place, or converted into `buffer`.
template <class T, class From>
const T* converted(const From* x, int n, T* buffer) {
  int i = 0;
  if constexpr (std::is_same_v<T, float>) {
    for (; i + F32::kLanes <= n; i += F32::kLanes) store(buffer + i, load(x + i));
  }
  for (; i < n; ++i) buffer[i] = static_cast<T>(to_float(x[i]));
  return buffer;
}
template <class T>
const T* elements(const FloatRowsView& rows, int64_t row, int64_t begin, int n, T* buffer) {
  const int64_t offset = row * rows.row_stride + begin;
  switch (rows.dtype) {
    case FloatType::kFloat64:
      // Float rows beside float64 ones are converted to them, never the other way round.
      if constexpr (std::is_same_v<T, double>) return static_cast<const double*>(rows.data) + offset;
      return buffer;
    case FloatType::kFloat32:
      if constexpr (std::is_same_v<T, float>) return static_cast<const float*>(rows.data) + offset;
      return converted(static_cast<const float*>(rows.data) + offset, n, buffer);
    case FloatType::kBFloat16:
      return converted(static_cast<const BFloat16*>(rows.data) + offset, n, buffer);
    default:
      return converted(static_cast<const Float16*>(rows.data) + offset, n, buffer);
  }
}

/// T: of the probabilities and their difference. Score: of the noise and the product.
template <class T, class Score>
Score score_of(T p, T q, Score noise) {
  const T rest = p - q;
  return static_cast<Score>(rest > T{0} ? rest : T{0}) * noise;
}

/// A block's part of the three rows.
template <class T, class Score>
struct ScoreBlock {
  const T* p;
  /// Null: q is 0.
  const T* q;
  const Score* noise;

  Score score(int i) const { return score_of(p[i], q != nullptr ? q[i] : T{0}, noise[i]); }
};

/// The largest of `best` and the scores of [begin, end).
template <bool kHasDraft>
float best_score(const ScoreBlock<float, float>& block, int begin, int end, float best) {
  constexpr int kInStep = 4;
  const F32 zero = set1(0.0f);
  F32 bests[kInStep];
  for (int u = 0; u < kInStep; ++u) bests[u] = set1(best);
  const auto step = [&](int i, F32& most) {
    F32 rest = load(block.p + i);
    if constexpr (kHasDraft) rest = sub(rest, load(block.q + i));
    most = max(mul(max(rest, zero), load(block.noise + i)), most);
  };
  int i = begin;
  for (; i + kInStep * F32::kLanes <= end; i += kInStep * F32::kLanes) {
    for (int u = 0; u < kInStep; ++u) step(i + u * F32::kLanes, bests[u]);
  }
  for (; i + F32::kLanes <= end; i += F32::kLanes) step(i, bests[0]);
  for (int u = 1; u < kInStep; ++u) bests[0] = max(bests[u], bests[0]);
  float lanes[F32::kLanes];
  store(lanes, bests[0]);
  for (int l = 0; l < F32::kLanes; ++l) best = lanes[l] > best ? lanes[l] : best;
  for (; i < end; ++i) {
    const float score = block.score(i);
    best = score > best ? score : best;
  }
  return best;
}

/// The same in float64, for the compiler to vectorise.
template <bool kHasDraft, class T>
double best_score(const ScoreBlock<T, double>& block, int begin, int end, double best) {
  constexpr int kLanes = 16;
  double bests[kLanes];
  for (int l = 0; l < kLanes; ++l) bests[l] = best;
  int i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (int l = 0; l < kLanes; ++l) {
      const double score = score_of(block.p[i + l], kHasDraft ? block.q[i + l] : T{0}, block.noise[i + l]);
      bests[l] = score > bests[l] ? score : bests[l];
    }
  }
  for (int l = 0; l < kLanes; ++l) best = bests[l] > best ? bests[l] : best;
  for (; i < end; ++i) {
    const double score = block.score(i);
    best = score > best ? score : best;
  }
  return best;
}

/// The work of a call, for one pair of types.
template <class T, class Score>
struct Scoring {
  const RecoveredProbsParams& params;
  T p_buffer[kScoreBlock];
  T q_buffer[kScoreBlock];
  Score noise_buffer[kScoreBlock];

  __attribute__((always_inline)) explicit Scoring(const RecoveredProbsParams& shared) : params(shared) {}

  ScoreBlock<T, Score> rows(int64_t draft, const Score* noise, int64_t begin, int n) {
    return {elements(params.target_probs, draft, begin, n, p_buffer),
            params.draft_probs ? elements(params.draft_probs, draft, begin, n, q_buffer) : nullptr, noise};
  }

  int block_length(int64_t begin) const {
    const int64_t rest = params.vocab_size - begin;
    return rest < kScoreBlock ? static_cast<int>(rest) : kScoreBlock;
  }

  /// The place of a one-hot draft in the block, the block's end if it is not in it.
  int excluded(int64_t draft, int64_t begin, int n) const {
    if (params.draft_probs) return n;
    const int64_t place = at(params.draft_token_ids, draft) - begin;
    return place >= 0 && place < n ? static_cast<int>(place) : n;
  }

  void score(int64_t request, int64_t block, double* block_scores, int64_t num_blocks) {
    const int64_t begin = block * kScoreBlock;
    const int n = block_length(begin);
    const Score* noise = elements(params.inverse_noise, request, begin, n, noise_buffer);
    const Span drafts = params.drafts.of(request);
    for (int64_t draft = drafts.begin; draft < drafts.end; ++draft) {
      const ScoreBlock<T, Score> part = rows(draft, noise, begin, n);
      Score best = -static_cast<Score>(__builtin_inff());
      if (part.q != nullptr) {
        best = best_score<true>(part, 0, n, best);
      } else {
        const int x = excluded(draft, begin, n);
        best = best_score<false>(part, 0, x, best);
        if (x < n) {
          const Score nothing = score_of(T{0}, T{0}, noise[x]);
          best = nothing > best ? nothing : best;
          best = best_score<false>(part, x + 1, n, best);
        }
      }
      block_scores[draft * num_blocks + block] = static_cast<double>(best);
    }
  }

  /// The lowest id with the largest score of a row, 0 if there is none.
  int64_t pick(int64_t request, int64_t draft, const double* block_scores, int64_t num_blocks) {
    int64_t best_block = 0;
    for (int64_t block = 1; block < num_blocks; ++block) {
      if (block_scores[block] > block_scores[best_block]) best_block = block;
    }
    const double best = block_scores[best_block];
    if (!(best > -static_cast<double>(__builtin_inff()))) return 0;
    const int64_t begin = best_block * kScoreBlock;
    const int n = block_length(begin);
    const Score* noise = elements(params.inverse_noise, request, begin, n, noise_buffer);
    const ScoreBlock<T, Score> part = rows(draft, noise, begin, n);
    const int x = excluded(draft, begin, n);
    for (int i = 0; i < n; ++i) {
      const Score score = i == x ? score_of(T{0}, T{0}, noise[i]) : part.score(i);
      if (static_cast<double>(score) == best) return begin + i;
    }
    return 0;
  }

  void score_tasks(RecoveredProbsRun& run) {
    const int64_t tasks_per_request = (run.num_blocks + kBlocksPerTask - 1) / kBlocksPerTask;
    const int64_t num_tasks = params.batch * tasks_per_request;
    for (;;) {
      const int64_t task = run.next_task.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      const int64_t request = task / tasks_per_request;
      const int64_t first = task % tasks_per_request * kBlocksPerTask;
      const int64_t end = first + kBlocksPerTask < run.num_blocks ? first + kBlocksPerTask : run.num_blocks;
      for (int64_t block = first; block < end; ++block) {
        score(request, block, run.block_scores, run.num_blocks);
      }
    }
  }

  void pick_all(const RecoveredProbsRun& run) {
    for (int64_t request = 0; request < params.batch; ++request) {
      const Span drafts = params.drafts.of(request);
      for (int64_t draft = drafts.begin; draft < drafts.end; ++draft) {
        const double* block_scores = run.block_scores + draft * run.num_blocks;
        put(params.token_ids, draft, pick(request, draft, block_scores, run.num_blocks));
      }
    }
  }
};

/// Calls `visit` with the Scoring of the dtypes.
template <class Visit>
void with_scoring(const RecoveredProbsParams& params, const Visit& visit) {
  const bool float64_probs = params.target_probs.dtype == FloatType::kFloat64 ||
                             (params.draft_probs && params.draft_probs.dtype == FloatType::kFloat64);
  if (float64_probs) {
    Scoring<double, double> scoring(params);
    visit(scoring);
  } else if (params.inverse_noise.dtype == FloatType::kFloat64) {
    Scoring<float, double> scoring(params);
    visit(scoring);
  } else {
    Scoring<float, float> scoring(params);
    visit(scoring);
  }
}

}  // namespace

void score_blocks_of_tasks(RecoveredProbsRun& run) {
  with_scoring(*run.params, [&](auto& scoring) { scoring.score_tasks(run); });
}

void pick_of_drafts(const RecoveredProbsRun& run) {
  with_scoring(*run.params, [&](auto& scoring) { scoring.pick_all(run); });
}

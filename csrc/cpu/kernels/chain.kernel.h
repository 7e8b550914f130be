// The chain program. Included once per tier through foreach_isa.h.

#include "cpu/kernels/filters.kernel.h"

namespace {

/// Fills in the statistics of one block of one row.
void stats_of_block(const ChainRun& run, const Phase& phase, int block) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const bool has_next = block_length(run, block) == kBlockSize && block + 1 < run.num_blocks;
  float padded[kBlockSize];
  phase.stats[block] =
      visit_block(phase.row, begin, block_length(run, block), padded, [&](const auto* x, int rows) {
        if (phase.kind == Phase::kArgmax) return block_argmax(x, rows);
        return block_stats(x, rows, phase.row.scale,
                           has_next && !phase.row.is_masked() ? x + kBlockSize : nullptr);
      });
}

/// Calls visit with the source of the probabilities of one block of a row of logits.
template <class T, class Visit>
auto visit_probs(const T* x, const RowLaw& law, float max, const Visit& visit) {
  if (max == -__builtin_inff()) return visit(NoProbs<T>());
  return visit(ProbsOfLogits<T>(x, max, law.scale, static_cast<float>(law.prob(max))));
}

/// Writes the probabilities of one block of a row of logits; returns the rows.
int probs_of_block(const ChainRun& run, const RowRef& row, const RowLaw& law, float max, int block,
                   float* probs) {
  float padded[kBlockSize];
  return visit_block(row, static_cast<int64_t>(block) * kBlockSize, block_length(run, block), padded,
                     [&](const auto* x, int rows) {
                       return visit_probs(x, law, max, [&](const auto& source) {
                         write_probs(source, rows, probs);
                         return rows;
                       });
                     });
}

/// The sum of max(p - q, 0) over one block, whose elements are in x and y.
template <class T>
float residual_of_elements(const ChainRun& run, const Phase& phase, int block, const T* x, const T* y,
                           int rows, float* residual) {
  return visit_probs(x, phase.law, phase.stats[block].max, [&](const auto& target) {
    if (run.params->draft_law == DraftLawKind::kProbs)
      return sum_residual(target, GivenProbs<T>{y}, rows, residual);
    const float max =
        phase.draft_stats != nullptr ? phase.draft_stats[block].max : block_max(y, rows, nullptr);
    return visit_probs(y, phase.draft_law, max,
                       [&](const auto& draft) { return sum_residual(target, draft, rows, residual); });
  });
}

/// The mass of max(p - q, 0) in one block, NaN if the draft law is not usable there. Writes the
/// weights and the number of rows, unless `residual` is null.
float residual_of_block(const ChainRun& run, const Phase& phase, int block, float* residual, int* rows) {
  const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
  const int n = block_length(run, block);
  float padded_target[kBlockSize], padded_draft[kBlockSize];
  if (phase.row.dtype == phase.draft_row.dtype && n % kNumLanes == 0 && !phase.row.is_masked() &&
      !phase.draft_row.is_masked()) {
    *rows = n / kNumLanes;
    return visit_row(phase.row, [&](const auto* target) {
      const auto* draft = static_cast<decltype(target)>(phase.draft_row.data);
      return residual_of_elements(run, phase, block, target + begin, draft + begin, *rows, residual);
    });
  }
  const bool probs = run.params->draft_law == DraftLawKind::kProbs;
  *rows = float_block(phase.row, begin, n, padded_target);
  float_block(phase.draft_row, begin, n, padded_draft, probs ? 0.0f : -__builtin_inff());
  return residual_of_elements(run, phase, block, static_cast<const float*>(padded_target),
                              static_cast<const float*>(padded_draft), *rows, residual);
}

}  // namespace

#include "cpu/kernels/gumbel.kernel.h"
#include "cpu/kernels/lossy_rules.kernel.h"

namespace {

void run_blocks(const ChainRun& run, const Phase& phase, Blocks blocks) {
  for (int block = blocks.begin; block < blocks.end; ++block) {
    switch (phase.kind) {
      case Phase::kResidual: {
        int rows;
        phase.masses[block] = static_cast<double>(residual_of_block(run, phase, block, nullptr, &rows));
        break;
      }
      case Phase::kScores:
        phase.stats[block] = largest_score(run, phase, block);
        break;
      case Phase::kMaxima:
        maxima_of_block(run, phase, block);
        break;
      case Phase::kKeptMasses:
        kept_mass_of_block(run, phase, block);
        break;
      case Phase::kKeptStats:
        kept_stats_of_block(run, phase, block);
        break;
      default:
        stats_of_block(run, phase, block);
    }
  }
}

/// Runs a phase with the help of idle workers. Waits only for blocks that another worker is running
/// at this moment, so it gets through however the workers are scheduled.
void run_phase(ChainRun& run, Lane& lane, const Phase& phase) {
  if (run.num_workers == 1) return run_blocks(run, phase, {0, run.num_blocks});
  lane.publish(phase, run.num_blocks);
  for (Blocks blocks; !(blocks = lane.claim(run.num_workers, /*from_front=*/true)).empty();) {
    run_blocks(run, lane.phase, blocks);
    lane.finish(blocks);
  }
  lane.wait();
}

/// One request on its way through its rows.
struct Request {
  ChainRun& run;
  Lane& lane;
  const ChainParams& params;
  int64_t index, entry, first_draft, num_drafts, first_row;
  float scale, draft_scale;
  bool greedy;
  /// Whether the drafts have a law other than one-hot.
  bool has_law;
  /// None where greedy.
  Filters filters, draft_filters;
  /// Of its drafts, by slot.
  RowsView draft_rows;
  RealView draft_logsumexp, draft_thresholds;
  IntView support_ids;
  RealView support_logprobs;

  /// What to draw from where no further draft is accepted.
  enum class Final { kTarget, kTargetWithoutDraft, kSupportResidual, kDenseResidual };

  Request(ChainRun& chain_run, Lane& own_lane, int64_t r)
      : run(chain_run), lane(own_lane), params(*chain_run.params), index(r) {
    const bool ragged = static_cast<bool>(params.cu_num_draft_tokens);
    first_draft = ragged ? at(params.cu_num_draft_tokens, r) : r * params.drafts_per_request;
    num_drafts = ragged ? at(params.cu_num_draft_tokens, r + 1) - first_draft : params.drafts_per_request;
    first_row = first_draft + (params.has_bonus_rows ? r : 0);
    const int64_t own_entry = entry_of(params, r);
    entry = own_entry < 0 ? 0 : own_entry;
    const float temperature = own_entry < 0 ? 0.0f : static_cast<float>(at(params.temperature, entry));
    const float draft_temperature =
        params.draft_temperature ? static_cast<float>(at(params.draft_temperature, entry)) : temperature;
    greedy = is_greedy(temperature);
    scale = log2_scale(greedy ? 1.0f : temperature);
    draft_scale = log2_scale(draft_temperature);
    // A greedy drafter's law is one-hot at its draft, whatever its logits.
    has_law = params.draft_law != DraftLawKind::kOneHot &&
              (!params.has_draft_law || at(params.has_draft_law, entry)) &&
              !(params.draft_law == DraftLawKind::kLogits && is_greedy(draft_temperature));
    if (!greedy) filters = filters_of(params.filters, entry, params.vocab_size);
    draft_filters = filters_of(params.draft_filters, entry, params.vocab_size);
    draft_rows = params.draft.of(first_draft, entry);
    draft_logsumexp = params.draft_logsumexp.of(first_draft, entry);
    draft_thresholds = params.draft_thresholds.of(first_draft, entry);
    support_ids = params.draft_support_ids.of(first_draft, entry);
    support_logprobs = params.draft_support_logprobs.of(first_draft, entry);
  }

  double accept_uniform(int64_t slot) const {
    if (params.accept_uniforms) return at(params.accept_uniforms, first_draft + slot);
    return uniform(at(params.seeds, entry), Stream::kAccept, slot, at(params.positions, index));
  }

  /// Number `draw` of those at the position of the slot.
  PhiloxBlock final_words(int64_t slot, int64_t draw) const {
    const int64_t position = at(params.positions, index);
    if (params.final_stream == Stream::kDraft) {
      return random_words(at(params.seeds, entry), Stream::kDraft, draft_slot(), position);
    }
    return random_words(at(params.seeds, entry), Stream::kTarget, draw, position + slot);
  }
  /// The same, or the given uniform.
  TokenDraw final_draw(int64_t slot, int64_t draw) const {
    if (params.rule == Rule::kExactMatch && params.accept_uniforms && slot < num_drafts)
      return TokenDraw::from(at(params.accept_uniforms, first_draft + slot));
    return params.final_uniforms ? TokenDraw::from(at(params.final_uniforms, index))
                                 : TokenDraw::from(final_words(slot, draw));
  }

  int64_t draft_slot() const {
    return params.final_slots ? at(params.final_slots, index) : params.final_slot;
  }

  /// The lowest id with the largest logit that is not NaN; 0 if there is none.
  int64_t argmax_of(const RowRef& row, float max) const {
    for (int block = 0; block < run.num_blocks; ++block) {
      if (lane.target_stats[block].max != max) continue;
      const int n = block_length(run, block);
      const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
      float padded[kBlockSize];
      const int found = visit_block(row, begin, n, padded,
                                    [&](const auto* x, int rows) { return first_equal(x, rows, max); });
      if (found < n) return begin + found;
    }
    return 0;
  }

  /// q(x) of a draft that has a law; NaN where that law is not usable or cannot have produced x.
  /// Leaves behind in `residual` what the residual needs of the draft row.
  double draft_prob(int64_t slot, int64_t x, Phase* residual) {
    double q = 0.0;
    if (params.draft_law == DraftLawKind::kSupport) {
      for (int64_t j = 0; j < params.draft_support_size; ++j) {
        const int64_t id = at(support_ids, slot, j);
        if (id < 0 || id >= params.vocab_size) continue;
        const double prob = exp2_f64(at(support_logprobs, slot, j) * kLog2E);
        if (!is_finite(prob)) return __builtin_nan("");
        if (id == x) q = q + prob;
      }
    } else {
      residual->draft_row = row_of(draft_rows, slot, draft_scale);
      if (params.draft_thresholds) {
        residual->draft_row.threshold = static_cast<float>(at(draft_thresholds, slot));
      }
      if (params.draft_law == DraftLawKind::kLogits) {
        residual->draft_law = draft_row_law(slot, residual);
        if (!residual->draft_law.usable()) return __builtin_nan("");
      }
      q = dense_prob(*residual, x);
    }
    return q > 0.0 && is_finite(q) ? q : __builtin_nan("");
  }

  /// The draft row's probability of an id, not finite where the row is not usable.
  double dense_prob(const Phase& residual, int64_t id) const {
    const float value = element(residual.draft_row, id);
    if (params.draft_law == DraftLawKind::kLogits) return residual.draft_law.prob(value);
    return is_finite(static_cast<double>(value)) && value < 0.0f ? 0.0 : static_cast<double>(value);
  }

  /// What filters need of a whole row.
  RowMax find_maxima(Phase* phase, const Filters& of_row) {
    phase->kind = Phase::kMaxima;
    phase->filters = &lane.filters;
    phase->weighs_blocks = of_row.weighs_whole_row(params.joint_filters);
    run_phase(run, lane, *phase);
    return row_max_from_blocks(phase->stats, run.num_blocks);
  }

  /// The threshold of a row whose maxima were found, and which holds a law.
  float find_threshold_of(const Phase& phase, float max, const Filters& of_row) {
    const auto masses_at_least = [&](float threshold) {
      Phase masses = phase;
      masses.kind = Phase::kKeptMasses;
      masses.row.threshold = threshold;
      run_phase(run, lane, masses);
    };
    return find_threshold(run, phase, max, of_row, params.joint_filters, masses_at_least);
  }

  /// Fills in the statistics of what filters leave of a row, and where its threshold lies.
  void run_stats(Phase* phase, const Filters& of_row) {
    if (of_row.any()) {
      const RowMax largest = find_maxima(phase, of_row);
      phase->kind = Phase::kStats;
      if (largest.non_finite || !(largest.max > -__builtin_inff())) return;
      phase->row.threshold = find_threshold_of(*phase, largest.max, of_row);
      if (phase->row.is_masked()) {
        Phase kept = *phase;
        kept.kind = Phase::kKeptStats;
        return run_phase(run, lane, kept);
      }
    }
    run_phase(run, lane, *phase);
  }

  RowLaw draft_row_law(int64_t slot, Phase* residual) {
    if (params.draft_logsumexp) return row_law_from_logsumexp(draft_scale, at(draft_logsumexp, slot));
    Phase phase;
    phase.kind = Phase::kStats;
    phase.row = residual->draft_row;
    phase.stats = lane.draft_stats;
    run_stats(&phase, draft_filters);
    residual->draft_row.threshold = phase.row.threshold;
    residual->draft_stats = lane.draft_stats;
    const RowMax row = row_max_from_blocks(lane.draft_stats, run.num_blocks);
    const RowLaw law = row_law_from_blocks(draft_scale, row, lane.draft_stats, run.num_blocks);
    return row_law_from_logsumexp(draft_scale, law.logsumexp);
  }

  /// Masses of p by block.
  void target_masses(const RowLaw& law) {
    for (int block = 0; block < run.num_blocks; ++block) {
      const BlockStats& stats = lane.target_stats[block];
      lane.masses[block] = stats.sum > 0.0f ? static_cast<double>(stats.sum) * law.prob(stats.max) : 0.0;
    }
  }

  double total_mass() const {
    double total = 0.0;
    for (int block = 0; block < run.num_blocks; ++block) total = total + lane.masses[block];
    return total;
  }

  bool support_touches(int64_t slot, int block) const {
    for (int64_t j = 0; j < params.draft_support_size; ++j) {
      const int64_t id = at(support_ids, slot, j);
      if (id >= 0 && id < params.vocab_size && id / kBlockSize == block) return true;
    }
    return false;
  }

  /// Writes what is left of p in one block once a one-hot or sparse draft law is taken away.
  int sparse_residual_of_block(const Phase& residual, Final final, int64_t slot, int64_t x, int block,
                               float* weights) {
    const int rows =
        probs_of_block(run, residual.row, residual.law, lane.target_stats[block].max, block, weights);
    const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
    if (final == Final::kTargetWithoutDraft) {
      weights[x - begin] = 0.0f;
      return rows;
    }
    for (int64_t j = 0; j < params.draft_support_size; ++j) {
      const int64_t id = at(support_ids, slot, j);
      if (id < 0 || id >= params.vocab_size || id / kBlockSize != block) continue;
      const double q = exp2_f64(at(support_logprobs, slot, j) * kLog2E);
      const float rest = weights[id - begin] - static_cast<float>(q);
      weights[id - begin] = rest > 0.0f ? rest : 0.0f;
    }
    return rows;
  }

  bool touches(Final final, int64_t slot, int64_t x, int block) const {
    if (final == Final::kTargetWithoutDraft) return x / kBlockSize == block;
    return final == Final::kSupportResidual && support_touches(slot, block);
  }

  /// The token that a draw chooses from the masses by block, which add up to `total`.
  int64_t pick(const Phase& residual, Final final, int64_t slot, int64_t x, double total,
               const TokenDraw& token) {
    const double threshold = token.block * total;
    double prefix = 0.0, remainder = 1.0;
    int chosen = 0;
    for (int block = 0; block < run.num_blocks; ++block) {
      if (!(lane.masses[block] > 0.0)) continue;
      // If rounding leaves no block, the last one with mass stays chosen.
      chosen = block;
      if (prefix + lane.masses[block] > threshold) {
        remainder = (threshold - prefix) / lane.masses[block];
        break;
      }
      prefix = prefix + lane.masses[block];
    }

    int rows;
    float weights[kBlockSize];
    if (final == Final::kDenseResidual) {
      residual_of_block(run, residual, chosen, weights, &rows);
    } else if (touches(final, slot, x, chosen)) {
      rows = sparse_residual_of_block(residual, final, slot, x, chosen, weights);
    } else {
      // Unscaled weights: a block far below the row's maximum loses none of them to rounding.
      const float max = lane.target_stats[chosen].max;
      float padded[kBlockSize];
      rows = visit_block(residual.row, static_cast<int64_t>(chosen) * kBlockSize, block_length(run, chosen),
                         padded, [&](const auto* logits, int n) {
                           write_probs(ProbsOfLogits(logits, max, residual.law.scale, 1.0f), n, weights);
                           return n;
                         });
    }
    return static_cast<int64_t>(chosen) * kBlockSize +
           pick_in_block(weights, rows, number_or_remainder(token.chunk, remainder), token.id);
  }

  /// A recovered token without a pass over the rows: a token of p is kept with probability
  /// max(p - q, 0) / p, which gives the law of the residual exactly. -1 after too many attempts.
  int64_t thin(const Phase& residual, int64_t slot, Status* status) {
    target_masses(residual.law);
    const double total = total_mass();
    for (int attempt = 0; attempt < kThinningAttempts; ++attempt) {
      const int64_t y = pick(residual, Final::kTarget, -1, -1, total, final_draw(slot, 2 * attempt));
      const double p = residual.law.prob(element(residual.row, y));
      const double q = dense_prob(residual, y);
      if (!is_finite(q)) *status = Status::kUnusableDraftLaw;
      if (!is_finite(q) || uniform_of(final_words(slot, 2 * attempt + 1)) * p < p - q) return y;
    }
    return -1;
  }

  /// A token of p by Gumbel noise, that of its position: what a draft in the same place met.
  int64_t draw_by_noise(const Phase& target, int64_t slot) {
    const RowMax largest = row_max_from_blocks(lane.target_stats, run.num_blocks);
    const int64_t place = params.final_stream == Stream::kDraft ? draft_slot() : slot;
    Phase scores;
    scores.kind = Phase::kScores;
    scores.row = target.row;
    scores.reference = largest.max;
    scores.noise = noise_key(at(params.seeds, entry), at(params.positions, index) + place);
    scores.stats = lane.draft_stats;
    run_phase(run, lane, scores);
    int best = 0;
    for (int block = 1; block < run.num_blocks; ++block) {
      if (lane.draft_stats[block].max > lane.draft_stats[best].max) best = block;
    }
    return static_cast<int64_t>(best) * kBlockSize + static_cast<int64_t>(lane.draft_stats[best].sum);
  }

  /// Draws the recovered, bonus or sampled token.
  int64_t draw(Phase* residual, Final final, int64_t x, int64_t slot, Status* status) {
    if (params.sampler == Sampler::kGumbel) return draw_by_noise(*residual, slot);
    int64_t draw_number = 0;
    if (final == Final::kDenseResidual) {
      if (!params.final_uniforms) {
        const int64_t token = thin(*residual, slot, status);
        if (token >= 0) return token;
        draw_number = 2 * kThinningAttempts;
      }
      residual->kind = Phase::kResidual;
      residual->masses = lane.masses;
      run_phase(run, lane, *residual);
    } else {
      target_masses(residual->law);
      for (int block = 0; block < run.num_blocks; ++block) {
        if (!touches(final, slot, x, block)) continue;
        float weights[kBlockSize];
        const int rows = sparse_residual_of_block(*residual, final, slot, x, block, weights);
        double sums[kBlockSize / kChunkSize];
        lane.masses[block] = chunk_sums(weights, rows, sums);
      }
    }
    return draw_from_masses(*residual, final, x, slot, final_draw(slot, draw_number), status);
  }

  /// The token that a draw chooses from the masses by block.
  int64_t draw_from_masses(const Phase& residual, Final final, int64_t x, int64_t slot,
                           const TokenDraw& token, Status* status) {
    double total = total_mass();
    if (!(total > 0.0)) {
      // NaN: the draft row is not usable. Otherwise p and q agree but for rounding. Either way: p.
      if (total != total) *status = Status::kUnusableDraftLaw;
      final = Final::kTarget;
      target_masses(residual.law);
      total = total_mass();
    }
    return pick(residual, final, slot, x, total, token);
  }

  void emit(int64_t slot, int64_t token) const {
    const int64_t i = index * params.width + slot;
    if (params.token_ids_are_int64) {
      static_cast<int64_t*>(params.token_ids)[i] = token;
    } else {
      static_cast<int32_t*>(params.token_ids)[i] = static_cast<int32_t>(token);
    }
  }

  void emit_logprob(int64_t slot, double logprob) const {
    if (params.logprobs != nullptr) {
      params.logprobs[index * params.width + slot] = static_cast<float>(logprob);
    }
  }

  /// A row of the target that was read, and what became of its draft.
  struct Row {
    Phase target;
    bool has_law;
    /// Not OK: the row holds no law.
    Status law_status = Status::kOk;
    /// Of the request, if it ends here.
    Status status = Status::kOk;
    /// -1 where there is no draft.
    int64_t x = -1;
    bool valid = false;
    /// Where greedy or without a law, and where the rule emits it.
    int64_t argmax = -1;
    /// Of p in the residual.
    double weight = 1.0;
    Final final = Final::kTarget;
  };

  Row read(int64_t slot) {
    Row row;
    row.target.row = row_of(params.target, first_row + slot, scale);
    row.target.stats = lane.target_stats;
    row.has_law = !greedy || params.logsumexp != nullptr || params.logprobs != nullptr;
    row.target.kind = row.has_law ? Phase::kStats : Phase::kArgmax;
    run_stats(&row.target, filters);
    if (params.thresholds != nullptr) params.thresholds[first_row + slot] = row.target.row.threshold;
    const RowMax largest = row_max_from_blocks(lane.target_stats, run.num_blocks);
    if (row.has_law) {
      row.target.law = row_law_from_blocks(scale, largest, lane.target_stats, run.num_blocks);
      if (params.logsumexp != nullptr) params.logsumexp[first_row + slot] = row.target.law.logsumexp;
    }
    if (largest.non_finite) {
      row.law_status = Status::kNonFiniteTarget;
    } else if (!(largest.max > -__builtin_inff())) {
      row.law_status = Status::kMaskedTarget;
    }
    row.status = row.law_status;
    if (greedy || row.law_status != Status::kOk) row.argmax = argmax_of(row.target.row, largest.max);
    if (slot < num_drafts && row.law_status == Status::kOk) {
      row.x = at(params.draft_token_ids, first_draft + slot);
      row.valid = row.x >= 0 && row.x < params.vocab_size;
      if (row.x != -1 && !row.valid) row.status = Status::kInvalidDraftId;
    }
    return row;
  }

  void emit_of_row(const Row& row, int64_t slot, int64_t token) const {
    emit(slot, token);
    if (params.logprobs == nullptr) return;
    const bool usable = row.law_status == Status::kOk;
    emit_logprob(slot, usable ? row.target.law.log2_prob(logit_of(row, token)) * kLn2 : __builtin_nan(""));
  }

  static float logit_of(const Row& row, int64_t id) { return element(row.target.row, id); }

  /// Takes one row, or more with a look-ahead: how many drafts that accepts. 0: the request ends here.
  int64_t step(int64_t slot, Status* status) {
    if (slot == num_drafts && params.bonus_token_ids) {
      *status = emit_given_bonus(slot);
      return 0;
    }
    Row row = read(slot);
    if (params.rule == Rule::kExactMatch && !greedy) return match(slot, &row, status);
    if (row.valid && accepts(slot, &row)) {
      emit_of_row(row, slot, row.x);
      return 1;
    }
    if (params.fly_window_size > 0 && row.valid && defers(slot, &row)) {
      emit_of_row(row, slot, row.x);
      return 1 + params.fly_window_size;
    }
    *status = row.status;
    emit_of_row(row, slot, row.argmax >= 0 ? row.argmax : draw_residual(row, slot, status));
    return 0;
  }

  int64_t draw_residual(const Row& row, int64_t slot, Status* status) {
    Phase residual = row.target;
    if (row.weight != 1.0) residual.law.log2_total = residual.law.log2_total - log2_f64(row.weight);
    return draw(&residual, row.final, row.x, slot, status);
  }

  /// Exact match: a token of p is emitted, and the draft is accepted if it is that one.
  int64_t match(int64_t slot, Row* row, Status* status) {
    *status = row->status;
    if (row->valid && params.accept_probs != nullptr) {
      const double p = row->target.law.prob(logit_of(*row, row->x));
      params.accept_probs[first_draft + slot] = static_cast<float>(p);
    }
    const int64_t token =
        row->argmax >= 0 ? row->argmax : draw(&row->target, Final::kTarget, -1, slot, status);
    emit_of_row(*row, slot, token);
    return row->valid && token == row->x ? 1 : 0;
  }

  Status emit_given_bonus(int64_t slot) const {
    const int64_t token = at(params.bonus_token_ids, index);
    const bool valid = token >= 0 && token < params.vocab_size;
    emit(slot, valid ? token : -1);
    emit_logprob(slot, __builtin_nan(""));
    return valid || token == -1 ? Status::kOk : Status::kInvalidDraftId;
  }

  /// Whether the valid draft of a row is accepted by its own coin; otherwise what to draw from.
  bool accepts(int64_t slot, Row* row) {
    return has_lossy_rule(slot) ? accepts_by_lossy_rule(slot, row) : accepts_by_law(slot, row);
  }

  /// The same by the rules whose recovered tokens make up for what they accept, and by synthetic rates.
  bool accepts_by_law(int64_t slot, Row* row) {
    if (!greedy) return judge(row, slot);
    const bool equal = row->argmax == row->x;
    if (params.accept_probs != nullptr) params.accept_probs[first_draft + slot] = equal ? 1.0f : 0.0f;
    switch (params.rule) {
      case Rule::kRejectAll:
        return false;
      case Rule::kSynthetic:
        return accept_uniform(slot) < at(params.accept_rates, slot);
      default:
        return equal;
    }
  }

  bool has_lossy_rule(int64_t slot) const {
    return is_lossy(params.rule) && (!params.rule_mask || at(params.rule_mask, first_draft + slot));
  }

  /// By a rule that bends the law of what is emitted. docs/rules.md.
  bool accepts_by_lossy_rule(int64_t slot, Row* row) {
    const float logit = logit_of(*row, row->x);
    const double first = params.rule_parameters[0], second = params.rule_parameters[1];
    switch (params.rule) {
      case Rule::kLenience:
        row->weight = 1.0 / first;
        return accepts_by_law(slot, row) || (greedy && is_within(*row, logit, first));
      case Rule::kMargin:
        return accepts_by_law(slot, row) || is_one_of_two(*row, logit, first);
      default:
        break;
    }
    // For the sake of the acceptance probability alone.
    const bool is_argmax = (greedy || params.accept_probs != nullptr) && accepts_by_law(slot, row);
    row->status = Status::kOk;
    if (params.rule == Rule::kThresholds) {
      row->final = Final::kTargetWithoutDraft;
      if (greedy) return is_argmax;
      const double p = row->target.law.prob(logit);
      return p > 0.0 && (p >= first || accept_uniform(slot) * second < p);
    }
    const float largest = row_max_from_blocks(lane.target_stats, run.num_blocks).max;
    const bool accepted = params.rule == Rule::kTopN ? is_in_top_n(row, logit, largest)
                          : greedy                   ? is_argmax
                                                     : is_typical(*row, logit);
    if (!accepted && row->argmax < 0) row->argmax = argmax_of(row->target.row, largest);
    return accepted;
  }

  /// Greedy lenience: whether p(x) is no smaller than a part of the largest p.
  bool is_within(const Row& row, float logit, double part) const {
    const float largest = row_max_from_blocks(lane.target_stats, run.num_blocks).max;
    return (static_cast<double>(logit) - static_cast<double>(largest)) *
               static_cast<double>(row.target.row.scale) >=
           log2_f64(part);
  }

  bool is_typical(const Row& row, float logit) const {
    const double p = row.target.law.prob(logit);
    const double epsilon = params.rule_parameters[0], delta = params.rule_parameters[1];
    return p > epsilon || p > delta * exp2_f64(-entropy_of_row(run, row.target) * kLog2E);
  }

  bool is_in_top_n(Row* row, float logit, float largest) {
    if (!row->has_law) read_law(row);
    const auto n = static_cast<int64_t>(params.rule_parameters[0]);
    const double gap = row->target.law.prob(largest) - row->target.law.prob(logit);
    return logit > -__builtin_inff() && gap <= params.rule_parameters[1] &&
           count_larger(run, row->target, logit, n) < n;
  }

  /// Whether a logit is one of the two largest, and these are close: positive, and their ratio above theta.
  bool is_one_of_two(const Row& row, float logit, double theta) const {
    const LargestLogits two = largest_logits(row, 2);
    return two.size == 2 && logit >= two.values[1] && two.values[1] > 0.0f &&
           static_cast<double>(two.values[1]) > theta * static_cast<double>(two.values[0]);
  }

  /// FLy: whether a rejected draft is accepted all the same, since the target is undecided at its row and
  /// accepts the drafts of the window that follows. Emits these.
  bool defers(int64_t slot, Row* row) {
    const int64_t window = params.fly_window_size;
    if (window >= num_drafts - slot || !(logit_of(*row, row->x) > -__builtin_inff())) return false;
    if (!row->has_law) read_law(row);
    if (!(entropy_of(*row) >= params.fly_entropy_threshold)) return false;
    for (int64_t ahead = slot + 1; ahead <= slot + window; ++ahead) {
      Row next = read(ahead);
      if (!next.valid || !accepts(ahead, &next)) {
        take_back(slot, ahead, row);
        return false;
      }
      emit_of_row(next, ahead, next.x);
    }
    return true;
  }

  void read_law(Row* row) {
    row->target.kind = Phase::kStats;
    run_phase(run, lane, row->target);
    const RowMax largest = row_max_from_blocks(lane.target_stats, run.num_blocks);
    row->target.law = row_law_from_blocks(scale, largest, lane.target_stats, run.num_blocks);
    row->has_law = true;
  }

  /// Entropy of a row over its most probable ids.
  double entropy_of(const Row& row) const {
    const int64_t k =
        params.fly_entropy_top_k < params.vocab_size ? params.fly_entropy_top_k : params.vocab_size;
    return entropy_of_largest(row.target.law, largest_logits(row, static_cast<int>(k)));
  }

  /// The k largest logits of a row. They lie in the blocks with the largest maxima.
  LargestLogits largest_logits(const Row& row, int k) const {
    LargestLogits maxima(k), largest(k);
    for (int block = 0; block < run.num_blocks; ++block) maxima.offer(lane.target_stats[block].max);
    for (int block = 0; block < run.num_blocks; ++block) {
      const float max = lane.target_stats[block].max;
      if (max < maxima.floor() || !(max > largest.floor())) continue;
      float logits[kBlockSize];
      const int n = block_length(run, block);
      float_block(row.target.row, static_cast<int64_t>(block) * kBlockSize, n, logits);
      for (int i = 0; i < n; ++i) largest.offer(logits[i]);
    }
    return largest;
  }

  /// Undoes a look-ahead that was rejected at slot `end`: `row` decides the request after all.
  void take_back(int64_t slot, int64_t end, Row* row) {
    for (int64_t ahead = slot + 1; ahead <= end && params.accept_probs != nullptr; ++ahead) {
      params.accept_probs[first_draft + ahead] = __builtin_nanf("");
    }
    // The rows ahead were read into the place of this one's statistics.
    row->target.draft_stats = nullptr;
    if (!greedy) run_phase(run, lane, row->target);
  }

  /// Whether the draft of a row is accepted; otherwise what to draw from.
  bool judge(Row* row, int64_t slot) {
    const double p = row->target.law.prob(logit_of(*row, row->x));
    const bool by_law = params.rule == Rule::kTokenLevel || is_lossy(params.rule);
    const double coin = params.rule != Rule::kRejectAll ? accept_uniform(slot) : 1.0;
    // No q is above 1: a coin below p accepts whatever q is, and the draft row need not be read.
    const bool accepted = params.rule == Rule::kSynthetic ? coin < at(params.accept_rates, slot)
                                                          : by_law && coin < p * row->weight;
    float* accept_prob = params.accept_probs != nullptr ? params.accept_probs + first_draft + slot : nullptr;
    if (!has_law) {
      row->final = Final::kTargetWithoutDraft;
      if (accept_prob != nullptr) *accept_prob = static_cast<float>(p);
      return accepted;
    }
    if (accepted && accept_prob == nullptr) return true;
    const double q = draft_prob(slot, row->x, &row->target);
    if (q != q) {
      // The one-hot law is exact for every drafter.
      row->final = Final::kTargetWithoutDraft;
      if (!accepted) row->status = Status::kUnusableDraftLaw;
      return accepted;
    }
    row->final = params.draft_law == DraftLawKind::kSupport ? Final::kSupportResidual : Final::kDenseResidual;
    if (accept_prob != nullptr) *accept_prob = static_cast<float>(p < q ? p / q : 1.0);
    return accepted || (by_law && coin * q < p * row->weight);
  }

  void finish(int64_t num_accepted, Status status) const {
    for (int64_t slot = num_accepted + 1; slot < params.width; ++slot) {
      emit(slot, -1);
      emit_logprob(slot, __builtin_nan(""));
    }
    const int64_t num_rows = num_drafts + (params.has_bonus_rows ? 1 : 0);
    for (int64_t slot = num_accepted + 1; slot < num_rows && params.logsumexp != nullptr; ++slot) {
      params.logsumexp[first_row + slot] = __builtin_nan("");
    }
    if (params.num_accepted != nullptr) params.num_accepted[index] = static_cast<int32_t>(num_accepted);
    params.status[index] = static_cast<int32_t>(status);
  }
};

}  // namespace

#include "cpu/kernels/block_rule.kernel.h"
#include "cpu/kernels/sparse_sample.kernel.h"

namespace {

void run_request(ChainRun& run, Lane& lane, int64_t r) {
  Request request(run, lane, r);
  if (run.params->accept_probs != nullptr) {
    for (int64_t slot = 0; slot < request.num_drafts; ++slot) {
      run.params->accept_probs[request.first_draft + slot] = __builtin_nanf("");
    }
  }
  Status status = Status::kOk;
  int64_t slot = 0;
  if (run.params->rule == Rule::kBlock && !request.greedy) {
    slot = BlockRule(request).run(&status);
  } else if (run.params->law_size > 0) {
    SparseSample(request).run(&status);
  } else {
    while (const int64_t accepted = request.step(slot, &status)) slot += accepted;
  }
  request.finish(slot, status);
}

}  // namespace

void run_worker(ChainRun& run, int worker) {
  Lane& own = run.lanes[worker];
  for (;;) {
    const int64_t r = run.next_request.fetch_add(1, std::memory_order_relaxed);
    if (r >= run.params->batch) break;
    run_request(run, own, r);
    run.unfinished_requests.fetch_sub(1, std::memory_order_acq_rel);
  }
  int spins = 0;
  while (run.unfinished_requests.load(std::memory_order_acquire) > 0) {
    bool helped = false;
    for (int other = 0; other < run.num_workers; ++other) {
      Lane& lane = run.lanes[other];
      const Blocks blocks = other == worker ? Blocks{} : lane.claim(run.num_workers, /*from_front=*/false);
      if (blocks.empty()) continue;
      run_blocks(run, lane.phase, blocks);
      lane.finish(blocks);
      helped = true;
    }
    if (helped) {
      spins = 0;
    } else {
      relax(&spins);
    }
  }
}

// Statistics of rows of logits. Included once per tier through foreach_isa.h.

#include "cpu/kernels/rows.kernel.h"

namespace {

/// Of numbers: the vocabulary of a tier has no smaller one of two.
F32 smaller(F32 a, F32 b) {
  const F32 zero = set1(0.0f);
  return sub(zero, max(sub(zero, a), sub(zero, b)));
}

/// The largest two elements, of which NaN may be missing or not.
template <class T>
TopTwo block_top_two(const T* x, int rows) {
  F32 first[kInStep], second[kInStep];
  for (int u = 0; u < kInStep; ++u) first[u] = second[u] = set1(-__builtin_inff());
  for (int i = 0; i < rows * kNumLanes; i += kStepSize) {
    F32 values[kInStep];
    load_step(x + i, values);
    for (int u = 0; u < kInStep; ++u) {
      second[u] = max(smaller(values[u], first[u]), second[u]);
      first[u] = max(values[u], first[u]);
    }
  }
  TopTwo top;
  for (int u = 0; u < kInStep; ++u) {
    float lanes[F32::kLanes];
    store(lanes, first[u]);
    for (int l = 0; l < F32::kLanes; ++l) top.offer(lanes[l]);
    store(lanes, second[u]);
    for (int l = 0; l < F32::kLanes; ++l) top.offer(lanes[l]);
  }
  return top;
}

/// Largest elements, and the sums of the weights, bit for bit those of block_stats, and of their moments.
template <class T>
BlockStatistics block_statistics(const T* x, int rows, float scale) {
  const TopTwo top = block_top_two(x, rows);
  if (!(top.first > -__builtin_inff()) || top.first == __builtin_inff()) {
    return {top, block_argmax(x, rows).sum, 0.0f};
  }
  const Exp2 exp2(top.first, scale);
  alignas(64) float sum_lanes[kNumLanes], moment_lanes[kNumLanes];
  {
    const DenormalsOff environment;
    for (int lane = 0; lane < kNumLanes; lane += kStepSize) {
      F32 sums[kInStep], moments[kInStep];
      for (int u = 0; u < kInStep; ++u) sums[u] = moments[u] = set1(0.0f);
      for (int i = lane; i < rows * kNumLanes; i += kNumLanes) {
        F32 values[kInStep], polynomial[kInStep], power[kInStep];
        load_step(x + i, values);
        exp2.factors(values, polynomial, power);
        for (int u = 0; u < kInStep; ++u) {
          sums[u] = fma(polynomial[u], power[u], sums[u]);
          const F32 above = max(exp2.floor, sub(values[u], exp2.reference));
          moments[u] = fma(mul(polynomial[u], power[u]), above, moments[u]);
        }
      }
      store_step<T>(sum_lanes + lane, sums);
      store_step<T>(moment_lanes + lane, moments);
    }
  }
  return {top, tree_sum(sum_lanes), tree_sum(moment_lanes)};
}

/// Sums of min(p, q) and of max(p - q, 0) over one block.
template <class Target, class Draft>
Overlap block_overlap(const Target& target, const Draft& draft, int rows) {
  using Element = typename Target::Element;
  static_assert(std::is_same_v<Element, typename Draft::Element>, "steps of one order");
  alignas(64) float common_lanes[kNumLanes], excess_lanes[kNumLanes];
  {
    const DenormalsOff environment;
    for (int lane = 0; lane < kNumLanes; lane += kStepSize) {
      F32 common[kInStep], excess[kInStep];
      for (int u = 0; u < kInStep; ++u) common[u] = excess[u] = set1(0.0f);
      for (int i = lane; i < rows * kNumLanes; i += kNumLanes) {
        F32 p[kInStep], q[kInStep];
        target.step(i, p);
        draft.step(i, q);
        for (int u = 0; u < kInStep; ++u) {
          common[u] = add(common[u], smaller(p[u], q[u]));
          excess[u] = add(excess[u], max(set1(0.0f), sub(p[u], q[u])));
        }
      }
      store_step<Element>(common_lanes + lane, common);
      store_step<Element>(excess_lanes + lane, excess);
    }
  }
  return {static_cast<double>(tree_sum(common_lanes)), static_cast<double>(tree_sum(excess_lanes))};
}

/// A row of logits once it was read.
struct ReadRow {
  RowRef row;
  BlockStatistics* blocks;
  RowLaw law;
  TopTwo top;
  RowTotals totals;
};

struct RowReader {
  const RowStatisticsParams& params;

  /// The row's law at a temperature, and what its blocks say.
  void read(ReadRow* read, float temperature) const {
    const float scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
    const int num_blocks = params.num_blocks();
    RowMax largest = {-__builtin_inff(), false};
    TopTwo top;
    for (int block = 0; block < num_blocks; ++block) {
      float padded[kBlockSize];
      const BlockStatistics stats =
          visit_block(read->row, static_cast<int64_t>(block) * kBlockSize, params.block_length(block), padded,
                      [&](const auto* x, int rows) { return block_statistics(x, rows, scale); });
      read->blocks[block] = stats;
      top.offer(stats.top.first);
      top.offer(stats.top.second);
      if (stats.sum != stats.sum) largest.non_finite = true;
    }
    largest.max = top.first;
    RowTotals totals;
    for (int block = 0; block < num_blocks; ++block) {
      const BlockStatistics& stats = read->blocks[block];
      if (!(stats.sum > 0.0f)) continue;
      totals.add(static_cast<double>(stats.sum), block_energy(stats, top.first, scale),
                 block_weight(stats, top.first, scale));
    }
    read->law = row_law_from_total(scale, largest, totals.total);
    read->top = top;
    read->totals = totals;
  }

  /// The lowest id with the largest logit that is not NaN; 0 if there is none.
  int64_t argmax(const ReadRow& read) const {
    for (int block = 0; block < params.num_blocks(); ++block) {
      if (read.blocks[block].top.first != read.top.first) continue;
      const int n = params.block_length(block);
      const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
      float padded[kBlockSize];
      const int found = visit_block(read.row, begin, n, padded, [&](const auto* x, int rows) {
        return first_equal(x, rows, read.top.first);
      });
      if (found < n) return begin + found;
    }
    return 0;
  }

  /// Calls visit with the source of the probabilities of one block.
  template <class T, class Visit>
  static auto visit_probs(const T* x, const ReadRow& read, int block, const Visit& visit) {
    const float max = read.blocks[block].top.first;
    if (max == -__builtin_inff()) return visit(NoProbs<T>());
    return visit(ProbsOfLogits<T>(x, max, read.law.scale, static_cast<float>(read.law.prob(max))));
  }

  template <class T>
  static Overlap overlap_of_elements(const ReadRow& target, const ReadRow& draft, int block, const T* x,
                                     const T* y, int rows) {
    return visit_probs(x, target, block, [&](const auto& p) {
      return visit_probs(y, draft, block, [&](const auto& q) { return block_overlap(p, q, rows); });
    });
  }

  Overlap overlap_of_block(const ReadRow& target, const ReadRow& draft, int block) const {
    const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
    const int n = params.block_length(block);
    if (target.row.dtype == draft.row.dtype && n % kNumLanes == 0) {
      return visit_row(target.row, [&](const auto* x) {
        const auto* y = static_cast<decltype(x)>(draft.row.data);
        return overlap_of_elements(target, draft, block, x + begin, y + begin, n / kNumLanes);
      });
    }
    float padded_target[kBlockSize], padded_draft[kBlockSize];
    const int rows =
        visit_row(target.row, [&](const auto* x) { return pad_block(x + begin, n, padded_target); });
    visit_row(draft.row, [&](const auto* y) { return pad_block(y + begin, n, padded_draft); });
    return overlap_of_elements<float>(target, draft, block, padded_target, padded_draft, rows);
  }

  /// Of the laws that verification would use.
  void overlap(const ReadRow& target, ReadRow* draft, int64_t row) const {
    const float draft_temperature = params.draft_temperature_of(row);
    read(draft, draft_temperature);
    draft->law = row_law_from_logsumexp(draft->law.scale, draft->law.logsumexp);
    if (!target.law.usable()) return write_no_overlap(params, row, /*is_draft=*/false);
    const bool target_is_greedy = is_greedy(params.temperature_of(row));
    if (is_greedy(draft_temperature)) {
      const int64_t id = argmax(*draft);
      if (target_is_greedy) return write_overlap(params, row, overlap_of_one_hot(id == argmax(target)));
      return write_overlap(params, row, overlap_of_one_hot(target.law.prob(element(target.row, id))));
    }
    if (!draft->law.usable()) return write_no_overlap(params, row, /*is_draft=*/true);
    if (target_is_greedy) {
      const float logit = element(draft->row, argmax(target));
      return write_overlap(params, row, overlap_of_one_hot(draft->law.prob(logit)));
    }
    Overlap sum;
    for (int block = 0; block < params.num_blocks(); ++block) {
      const Overlap part = overlap_of_block(target, *draft, block);
      sum.common = sum.common + part.common;
      sum.excess = sum.excess + part.excess;
    }
    write_overlap(params, row, sum);
  }
};

}  // namespace

void statistics_of_rows(const RowStatisticsParams& params, int64_t begin, int64_t end,
                        BlockStatistics* workspace) {
  const RowReader reader = {params};
  for (int64_t row = begin; row < end; ++row) {
    const int64_t target_row = params.target_row(row);
    if (target_row < 0) {
      write_no_row(params, row);
      continue;
    }
    ReadRow target, draft;
    target.row = row_of(params.target, target_row);
    target.blocks = workspace;
    reader.read(&target, params.temperature_of(row));
    write_statistics(params, row, target.law, target.top, target.totals);
    if (!params.has_draft()) continue;
    draft.row = row_of(params.draft, row);
    draft.blocks = workspace + params.num_blocks();
    reader.overlap(target, &draft, row);
  }
}

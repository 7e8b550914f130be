// The draw from the most likely ids of a row, whose law is handed over. Included by chain.kernel.h.

namespace {

/// An id of a law, and its logit.
struct SupportId {
  float logit;
  int64_t id;
};

/// Appends the ids of a row in [floor, below), by rising id, until there are `most`; returns how many there
/// are then. The phase has left maxima.
int collect(const ChainRun& run, const Phase& phase, float floor, float below, SupportId* ids, int found,
            int most) {
  for (int block = 0; block < run.num_blocks && found < most; ++block) {
    if (!(phase.stats[block].max >= floor)) continue;
    const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
    float padded[kBlockSize];
    visit_block(phase.row, begin, block_length(run, block), padded, [&](const auto* x, int rows) {
      int indices[kLargestLawSize];
      const int room = most - found;
      const int in_block = gather_in_block(x, rows, phase.filters->maxima + block * kPartsPerBlock, floor,
                                           below, indices, room);
      for (int i = 0; i < in_block && i < room; ++i) {
        ids[found++] = {to_float(x[indices[i]]), begin + indices[i]};
      }
    });
  }
  return found;
}

/// By falling logit; what ties stays in order.
void sort(SupportId* ids, int count) {
  for (int i = 1; i < count; ++i) {
    const SupportId moved = ids[i];
    int place = i;
    for (; place > 0 && ids[place - 1].logit < moved.logit; --place) ids[place] = ids[place - 1];
    ids[place] = moved;
  }
}

/// Draws the token of one row.
struct SparseSample {
  Request& request;
  const ChainParams& params;
  int law_size;

  explicit SparseSample(Request& of_row)
      : request(of_row), params(of_row.params), law_size(static_cast<int>(params.law_size)) {}

  void run(Status* status) {
    if (!request.greedy && draw()) return;
    const Request::Row row = request.read(0);
    *status = row.status;
    request.emit_of_row(row, 0, row.argmax);
    put_law(0, row.argmax, 0.0f);
    put_padding(1);
  }

  void put_law(int place, int64_t id, float logprob) const {
    put(params.law_ids, request.index, place, id);
    params.law_logprobs[request.index * law_size + place] = logprob;
  }

  void put_padding(int first) const {
    for (int i = first; i < law_size; ++i) put_law(i, -1, -__builtin_inff());
  }

  /// Where the row is cut: by its filters, and so that no more than law_size ids are above the cut.
  float find_cut(const Phase& phase, float max) const {
    const float by_filters = request.find_threshold_of(phase, max, request.filters);
    const float lowest = by_filters > -__FLT_MAX__ ? by_filters : -__FLT_MAX__;
    Count at_least(law_size);
    const float by_size =
        search(request.run, phase, max, lowest, guess_of_top_k(request.run, phase, max, law_size), at_least);
    return (by_size > by_filters ? by_size : by_filters) + 0.0f;
  }

  /// False where the row holds no law.
  bool draw() {
    Phase phase;
    phase.row = row_of(params.target, request.first_row, request.scale);
    phase.stats = request.lane.target_stats;
    const RowMax largest = request.find_maxima(&phase, request.filters);
    if (largest.non_finite || !(largest.max > -__builtin_inff())) return false;

    const float cut = find_cut(phase, largest.max);
    const float lowest = cut > -__FLT_MAX__ ? cut : -__FLT_MAX__;
    SupportId ids[kLargestLawSize];
    int count = collect(request.run, phase, after(lowest), after(largest.max), ids, 0, law_size);
    count = collect(request.run, phase, lowest, after(lowest), ids, count, law_size);
    sort(ids, count);

    double log2_weights[kLargestLawSize], probs[kLargestLawSize];
    double total = 0.0;
    for (int i = 0; i < count; ++i) {
      log2_weights[i] = log2_support_weight(ids[i].logit, largest.max, request.scale);
      total = total + exp2_f64(log2_weights[i]);
    }
    const double log2_total = log2_f64(total);
    double sum = 0.0;
    for (int i = 0; i < count; ++i) {
      const float logprob = support_logprob(log2_weights[i], log2_total);
      put_law(i, ids[i].id, logprob);
      probs[i] = support_prob(logprob);
      sum = sum + probs[i];
    }
    put_padding(count);

    const double threshold = support_number(request.final_draw(0, 0)) * sum;
    double prefix = 0.0;
    int chosen = 0;
    for (int i = 0; i < count; ++i) {
      // Were none left past the threshold, the last one with a probability would stay chosen.
      if (probs[i] > 0.0) chosen = i;
      prefix = prefix + probs[i];
      if (prefix > threshold) break;
    }
    request.emit(0, ids[chosen].id);
    params.logprobs[request.index] = support_logprob(log2_weights[chosen], log2_total);
    params.logsumexp[request.index] = support_logsumexp(largest.max, request.scale, log2_total);
    params.thresholds[request.index] = cut;
    return true;
  }
};

}  // namespace

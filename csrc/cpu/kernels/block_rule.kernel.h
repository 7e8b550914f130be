// Block verification (Sun et al., arXiv 2403.10444) of a request that samples. Included by chain.kernel.h.
//
// With P(-1) = 1 and P(s) = min(1, P(s - 1) * p(x) / q(x)) for the draft x in slot s, the drafts up to slot s
// are kept with probability h(s) = Z / (Z + 1 - P(s)), where Z is the sum of max(P(s) * p - q, 0) at the slot
// behind; in the last slot with h = P. From the last slot on, the first one whose coin is below h decides.
// As h <= P, a coin that is not below P decides against its slot without Z. docs/rules.md.

namespace {

class BlockRule {
 public:
  explicit BlockRule(Request& request)
      : r_(request),
        params_(request.params),
        slots_(request.lane.slots),
        has_seeds_(!request.params.accept_uniforms) {}

  /// Returns how many drafts are accepted.
  int64_t run(Status* status) {
    read_chain();
    int64_t accepted = end_;
    while (accepted > 0 && !wins(accepted - 1, status)) --accepted;
    for (int64_t slot = 0; slot < accepted; ++slot) emit(slot, slots_[slot].x);
    if (accepted < end_) {
      select(accepted);
      emit(accepted, token_ >= 0 ? token_ : recovered(accepted, status));
    } else {
      end_of_chain(status);
    }
    return accepted;
  }

 private:
  /// Statistics of rows go to the place of this slot.
  void select(int64_t slot) {
    r_.lane.target_stats = r_.lane.stats_by_slot + 2 * slot * r_.run.num_blocks;
    r_.lane.draft_stats = r_.lane.target_stats + r_.run.num_blocks;
  }

  /// Reads the rows of all drafts that may be accepted, and that of the slot behind them.
  void read_chain() {
    double chance = 1.0;
    for (; end_ < r_.num_drafts; ++end_) {
      select(end_);
      const Request::Row row = r_.read(end_);
      if (!row.valid) {
        last_ = row;
        return;
      }
      BlockSlot& slot = slots_[end_];
      slot.target = row.target;
      slot.x = row.x;
      slot.p = row.target.law.prob(Request::logit_of(row, row.x));
      double q = r_.has_law ? r_.draft_prob(end_, slot.x, &slot.target) : 1.0;
      // The one-hot law is exact for every drafter.
      slot.is_unusable = q != q;
      slot.one_hot = !r_.has_law || slot.is_unusable;
      if (slot.one_hot) q = 1.0;
      chance = next_chance(chance, slot.p, q);
      slot.chance = chance;
      slot.coin = r_.accept_uniform(end_);
      if (params_.accept_probs != nullptr) {
        params_.accept_probs[r_.first_draft + end_] = static_cast<float>(chance);
      } else if (!(slot.coin < chance) && !may_win_behind(end_, chance)) {
        ++end_;  // its coin has lost, so that its slot never counts as the last
        return;
      }
    }
  }

  /// Whether the coin of a slot behind this one may be below what the chance there can be: no p is above 1.
  bool may_win_behind(int64_t slot, double chance) {
    for (int64_t behind = slot + 1; behind < r_.num_drafts && chance > 0.0; ++behind) {
      chance = next_chance(chance, 1.0, least_draft_prob(behind));
      // A margin for a p of 1 and its rounding.
      if (r_.accept_uniform(behind) < chance * (1.0 + 0x1p-20)) return true;
    }
    return false;
  }

  /// What q(x) is at least, without a pass over the draft row: 0 where only that would tell.
  double least_draft_prob(int64_t slot) {
    if (!r_.has_law) return 1.0;
    if (params_.draft_law == DraftLawKind::kLogits && !params_.draft_logsumexp) return 0.0;
    const int64_t x = at(params_.draft_token_ids, r_.first_draft + slot);
    if (x < 0 || x >= params_.vocab_size) return 1.0;
    Phase phase;
    const double q = r_.draft_prob(slot, x, &phase);
    return q == q ? q : 1.0;
  }

  /// Whether the drafts up to this slot are accepted, once those up to a later one are not.
  bool wins(int64_t s, Status* status) {
    const BlockSlot& slot = slots_[s];
    if (!(slot.coin < slot.chance)) return false;
    if (s + 1 == end_) return true;
    const BlockSlot& next = slots_[s + 1];
    select(s + 1);
    scaled_ = scaled(next.target, slot.chance);
    if (next.one_hot) return block_accepts(slot.coin, slot.chance, slot.chance * rest_of(next.p));
    if (params_.draft_law == DraftLawKind::kSupport) {
      return block_accepts(slot.coin, slot.chance, mass_beyond_support(s + 1, slot.chance));
    }
    return has_seeds_ ? thins(s, status) : passes(s, slot.coin, r_.final_draw(s + 1, 0), status);
  }

  /// P * p in the place of p.
  static Phase scaled(Phase target, double chance) {
    target.law.log2_total = target.law.log2_total - log2_f64(chance);
    return target;
  }

  /// Z of a sparse draft law: what P * p has outside of the support, and beyond q inside.
  double mass_beyond_support(int64_t slot, double chance) const {
    const Phase& target = slots_[slot].target;
    double inside = 0.0, beyond = 0.0;
    for (int64_t j = 0; j < params_.draft_support_size; ++j) {
      const int64_t id = at(r_.support_ids, slot, j);
      if (id < 0 || id >= params_.vocab_size) continue;
      // Entries of an id that is listed more than once are added, where it comes first.
      bool is_first = true;
      double q = 0.0;
      for (int64_t i = 0; i < params_.draft_support_size; ++i) {
        if (at(r_.support_ids, slot, i) != id) continue;
        is_first = is_first && i >= j;
        q = q + exp2_f64(at(r_.support_logprobs, slot, i) * kLog2E);
      }
      if (!is_first) continue;
      const double p = target.law.prob(element(target.row, id));
      inside = inside + p;
      const double rest = chance * p - q;
      if (rest > 0.0) beyond = beyond + rest;
    }
    return chance * rest_of(inside) + beyond;
  }

  /// Number `number` of a slot. Not those at the position of the next token: what decides here must not be
  /// met again by a step that begins there.
  double slot_uniform(int64_t slot, int64_t number) const {
    return uniform(at(params_.seeds, r_.entry), Stream::kBlock, slot * kBlockNumbersPerSlot + number,
                   at(params_.positions, r_.index));
  }

  /// Without a pass over the rows, with dense draft laws: an attempt fails with probability 1 - P, finds y
  /// with max(P * p(y) - q(y), 0), and else is made again. So a token is found with probability h, and has
  /// the law of what is to be emitted.
  bool thins(int64_t s, Status* status) {
    const BlockSlot& slot = slots_[s];
    const Phase& target = slots_[s + 1].target;
    r_.target_masses(target.law);
    const double total = r_.total_mass();
    for (int attempt = 0; attempt < kThinningAttempts; ++attempt) {
      // The coin of the slot is the first number of the first attempt.
      const double u = attempt == 0 ? slot.coin : slot_uniform(s, 2 * attempt);
      if (!(u < slot.chance)) return false;
      const int64_t y =
          r_.pick(target, Request::Final::kTarget, -1, -1, total, TokenDraw::from(u / slot.chance));
      const double p = slot.chance * target.law.prob(element(target.row, y));
      const double q = r_.dense_prob(target, y);
      if (!is_finite(q)) *status = Status::kUnusableDraftLaw;
      if (!is_finite(q) || slot_uniform(s, 2 * attempt + 1) * p < p - q) {
        token_ = y;
        return true;
      }
    }
    return passes(s, slot_uniform(s, 2 * kThinningAttempts),
                  TokenDraw::from(slot_uniform(s, 2 * kThinningAttempts + 1)), status);
  }

  /// With a pass over the rows: the coin decides by Z, and the token is drawn.
  bool passes(int64_t s, double coin, const TokenDraw& token, Status* status) {
    scaled_.kind = Phase::kResidual;
    scaled_.masses = r_.lane.masses;
    run_phase(r_.run, r_.lane, scaled_);
    const double z = r_.total_mass();
    // NaN: the draft row is not usable, and its slot counts as the end of the chain.
    if (z == z && !block_accepts(coin, slots_[s].chance, z)) return false;
    token_ = r_.draw_from_masses(scaled_, Request::Final::kDenseResidual, -1, s + 1, token, status);
    return true;
  }

  /// A token where the drafts end that are accepted and none was found on the way.
  int64_t recovered(int64_t accepted, Status* status) {
    const BlockSlot& slot = slots_[accepted];
    Phase residual = accepted > 0 ? scaled_ : slot.target;
    Request::Final final = Request::Final::kDenseResidual;
    if (slot.one_hot) {
      final = Request::Final::kTargetWithoutDraft;
      residual = slot.target;
      if (slot.is_unusable) *status = Status::kUnusableDraftLaw;
    } else if (params_.draft_law == DraftLawKind::kSupport) {
      final = Request::Final::kSupportResidual;
    }
    return r_.draw(&residual, final, slot.x, accepted, status);
  }

  /// Every draft that counts is accepted: a bonus token, or what stands in its place.
  void end_of_chain(Status* status) {
    if (end_ == r_.num_drafts && params_.bonus_token_ids) {
      *status = r_.emit_given_bonus(end_);
      return;
    }
    select(end_);
    if (end_ == r_.num_drafts) last_ = r_.read(end_);
    *status = last_.status;
    const int64_t token =
        last_.argmax >= 0 ? last_.argmax : r_.draw(&last_.target, Request::Final::kTarget, -1, end_, status);
    r_.emit_of_row(last_, end_, token);
  }

  void emit(int64_t slot, int64_t token) const {
    const Phase& target = slots_[slot].target;
    r_.emit(slot, token);
    r_.emit_logprob(slot, target.law.log2_prob(element(target.row, token)) * kLn2);
  }

  Request& r_;
  const ChainParams& params_;
  BlockSlot* slots_;
  bool has_seeds_;
  /// The drafts in slots before this one were read.
  int64_t end_ = 0;
  /// The row behind them.
  Request::Row last_;
  /// P * p at the slot behind the one that was looked at last.
  Phase scaled_;
  /// To be emitted, if it was found on the way.
  int64_t token_ = -1;
};

}  // namespace

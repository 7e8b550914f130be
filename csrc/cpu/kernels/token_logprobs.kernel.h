// Log-probabilities, ranks and likeliest ids of rows of logits. Included once per tier through foreach_isa.h.

#include "cpu/kernels/rows.kernel.h"

namespace {

/// How many elements are not below `value`.
template <class T>
int64_t count_not_below(const T* x, int rows, float value) {
  const F32 least = set1(value);
  int64_t count = 0;
  for (int i = 0; i < rows * kNumLanes; i += F32::kLanes) {
    const F32 values = load(x + i);
    // The larger of the two, `least` where an element is NaN.
    count += __builtin_popcount(equal_mask(max(values, least), values));
  }
  return count;
}

/// Whether any of n elements is no NaN.
template <class T>
bool has_number(const T* x, int n) {
  for (int i = 0; i < n; ++i) {
    const float value = to_float(x[i]);
    if (value == value) return true;
  }
  return false;
}

/// The largest keys of a row, in falling order.
struct Listing {
  uint64_t keys[kMaxTopN];
  int capacity;
  int size;

  uint64_t floor() const { return size < capacity ? 0 : keys[capacity - 1]; }

  void offer(uint64_t key) {
    if (key <= floor()) return;
    int i = size < capacity ? size++ : capacity - 1;
    for (; i > 0 && keys[i - 1] < key; --i) keys[i] = keys[i - 1];
    keys[i] = key;
  }

  /// Offers the n elements of a block whose first id is `begin`.
  template <class T>
  void offer_block(const T* x, int n, int64_t begin) {
    constexpr uint32_t kAll = F32::kLanes == 32 ? ~0u : (1u << F32::kLanes) - 1;
    for (int i = 0; i < n;) {
      if (i + F32::kLanes <= n) {
        // Ids come in rising order: one with the logit of the last in the list comes too late. Nothing is
        // skipped while that is NaN.
        const F32 values = load(x + i), floors = set1(logit_of_key(floor()));
        if (equal_mask(max(values, floors), floors) == kAll) {
          i += F32::kLanes;
          continue;
        }
      }
      const int end = i + F32::kLanes < n ? i + F32::kLanes : n;
      for (; i < end; ++i) offer(listing_key(to_float(x[i]), begin + i));
    }
  }
};

struct TokenReader {
  const TokenLogprobsParams& params;
  BlockStats* blocks;

  /// Reads the row: its law, and how many logits are not below that of the token.
  RowLaw read(const RowRef& row, float scale, float token_logit, int64_t* rank) const {
    const int num_blocks = params.num_blocks();
    *rank = 0;
    for (int block = 0; block < num_blocks; ++block) {
      const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
      const int n = params.block_length(block);
      const bool has_next = block + 1 < num_blocks && n == kBlockSize;
      float padded[kBlockSize];
      blocks[block] = visit_block(row, begin, n, padded, [&](const auto* x, int rows) {
        BlockStats stats = block_stats(x, rows, scale, has_next ? x + kBlockSize : nullptr);
        // Behind blocks that are masked. It changes no law: no maximum of a row is NaN.
        if (stats.max == -__builtin_inff() && !has_number(x, n)) stats.max = __builtin_nanf("");
        if (token_logit == token_logit) *rank += count_not_below(x, rows, token_logit);
        // The padding is -inf.
        if (token_logit == -__builtin_inff()) *rank -= rows * kNumLanes - n;
        return stats;
      });
    }
    return row_law_from_blocks(scale, row_max_from_blocks(blocks, num_blocks), blocks, num_blocks);
  }

  /// Lists the likeliest ids. They lie in the blocks with the largest maxima.
  void list(const RowRef& row, Listing* listing) const {
    Listing maxima;
    maxima.capacity = listing->capacity = params.top_n;
    maxima.size = listing->size = 0;
    for (int block = 0; block < params.num_blocks(); ++block) {
      maxima.offer(listing_key(blocks[block].max, block));
    }
    for (int block = 0; block < params.num_blocks(); ++block) {
      if (listing_key(blocks[block].max, block) < maxima.floor()) continue;
      const int64_t begin = static_cast<int64_t>(block) * kBlockSize;
      visit_row(row,
                [&](const auto* x) { listing->offer_block(x + begin, params.block_length(block), begin); });
    }
  }

  void write(int64_t row, const TokenRow& token) const {
    if (token.logits_row < 0) return write_nothing(params, row);
    const float temperature = static_cast<float>(at(params.temperature, token.entry));
    const float scale = log2_scale(is_greedy(temperature) ? 1.0f : temperature);
    const RowRef logits = row_of(params.logits, token.logits_row);
    const bool is_id = token.token >= 0 && token.token < params.vocab_size;
    const float own = is_id ? element(logits, token.token) : __builtin_nanf("");
    int64_t rank;
    const RowLaw law = read(logits, scale, own, &rank);
    write_own_token(params, row, token, law, own, rank);
    if (params.top_n == 0) return;
    Listing listing;
    list(logits, &listing);
    for (int i = 0; i < params.top_n; ++i) {
      write_token(params, row, 1 + i, id_of_key(listing.keys[i]), law, logit_of_key(listing.keys[i]));
    }
  }
};

}  // namespace

void logprobs_of_rows(const TokenLogprobsParams& params, const TokenRow* tokens, int64_t begin, int64_t end,
                      BlockStats* workspace) {
  const TokenReader reader = {params, workspace};
  for (int64_t row = begin; row < end; ++row) reader.write(row, tokens[row]);
}

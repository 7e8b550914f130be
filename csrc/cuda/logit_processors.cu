// Changes to rows of logits. Launches follow each other: biases, penalties, masks.

#include "cuda/logit_processors.h"

#include <algorithm>

#include "cuda/cta.cuh"
#include "cuda/launch.h"

namespace specdec_ops::cuda {
namespace {

/// Of an id's count: it occurs in the prompt, and it was penalised.
constexpr uint32_t kInPrompt = 1u << 31, kIsDone = 1u << 30;
/// CTAs that penalise. Each has a table of the vocabulary, for one request after another.
constexpr int64_t kMaxTables = 128;

struct ProcessorWorkspace {
  /// [tables, vocab_size]: how often each id occurs in the output.
  uint32_t* counts;
  int64_t num_tables;
  /// [batch, num_words]: the ids that a request is held to.
  uint32_t* allowed;
};

int64_t num_tables_of(const LogitProcessors& apply) {
  return apply.has_penalties ? std::min(apply.batch, kMaxTables) : 0;
}

/// A thread to an entry of a list of a request.
__global__ void __launch_bounds__(kCtaThreads) add_biases(int64_t num_ctas, LogitProcessors apply) {
  const int64_t num_tasks = apply.batch * apply.bias_ids.width;
  for (int64_t task = first_thread_task(); task < num_tasks; task += num_ctas * kCtaThreads) {
    apply.add_bias(task / apply.bias_ids.width, task % apply.bias_ids.width);
  }
}

/// Calls visit(id) for the tokens of a request, each in one thread of the CTA.
template <class Visit>
__device__ void for_each_token(const LogitProcessors& apply, const TokenLists& tokens, int64_t request,
                               const Visit& visit) {
  const int64_t length = tokens.length(request);
  for (int64_t i = threadIdx.x; i < length; i += kCtaThreads) {
    const int64_t id = at(tokens.ids, request, i);
    if (apply.is_id(id)) visit(id);
  }
}
template <class Visit>
__device__ void for_each_draft(const LogitProcessors& apply, int64_t request, const Visit& visit) {
  const int64_t num_drafts = apply.drafts_of(request).size();
  for (int64_t slot = threadIdx.x; slot < num_drafts; slot += kCtaThreads) {
    const int64_t id = apply.distinct_draft(request, slot);
    if (id >= 0) visit(id);
  }
}

/// A CTA to a request, and then the next.
__global__ void __launch_bounds__(kCtaThreads)
    penalise_requests(int64_t num_ctas, LogitProcessors apply, ProcessorWorkspace workspace) {
  uint32_t* counts = workspace.counts + blockIdx.x * apply.vocab_size;
  for (int64_t id = threadIdx.x; id < apply.vocab_size; id += kCtaThreads) counts[id] = 0;
  for (int64_t request = blockIdx.x; request < apply.batch; request += num_ctas) {
    const LogitProcessors::Penalties penalties = apply.penalties_of(request);
    if (penalties.are_neutral()) continue;
    __syncthreads();
    for_each_token(apply, apply.prompt, request, [&](int64_t id) { atomicOr(counts + id, kInPrompt); });
    for_each_token(apply, apply.output, request, [&](int64_t id) { atomicAdd(counts + id, 1u); });
    __syncthreads();
    // Whoever comes first to an id takes it.
    const auto penalise = [&](int64_t id) {
      const uint32_t count = atomicOr(counts + id, kIsDone);
      if ((count & kIsDone) != 0) return;
      apply.penalise(penalties, request, id, count != 0, count & ~kInPrompt);
    };
    for_each_token(apply, apply.prompt, request, penalise);
    for_each_token(apply, apply.output, request, penalise);
    for_each_draft(apply, request, penalise);
    __syncthreads();
    const auto forget = [&](int64_t id) { counts[id] = 0; };
    for_each_token(apply, apply.prompt, request, forget);
    for_each_token(apply, apply.output, request, forget);
    for_each_draft(apply, request, forget);
  }
}

/// A CTA to a request. One without ids is held to nothing: all of its bits are 1.
__global__ void __launch_bounds__(kCtaThreads)
    pack_allowed(int64_t num_ctas, LogitProcessors apply, ProcessorWorkspace workspace) {
  const int64_t num_words = apply.num_words();
  for (int64_t request = blockIdx.x; request < apply.batch; request += num_ctas) {
    bool has_ids = false;
    for (int64_t j = threadIdx.x; j < apply.allowed.width; j += kCtaThreads) {
      has_ids |= apply.is_id(at(apply.allowed.ids, request, j));
    }
    const bool is_held = __syncthreads_or(has_ids) != 0;
    uint32_t* words = workspace.allowed + request * num_words;
    for (int64_t word = threadIdx.x; word < num_words; word += kCtaThreads) words[word] = is_held ? 0 : ~0u;
    __syncthreads();
    for (int64_t j = threadIdx.x; j < apply.allowed.width; j += kCtaThreads) {
      const int64_t id = at(apply.allowed.ids, request, j);
      if (apply.is_id(id)) atomicOr(words + id / 32, 1u << id % 32);
    }
  }
}

/// A CTA to so many ids of a slot of a request.
constexpr int64_t kIdsPerCta = 16 * kCtaThreads;

__global__ void __launch_bounds__(kCtaThreads)
    mask_rows(int64_t num_ctas, LogitProcessors apply, ProcessorWorkspace workspace, int64_t parts) {
  const int64_t num_tasks = apply.batch * parts;
  for (int64_t task = blockIdx.x; task < num_tasks; task += num_ctas) {
    const int64_t request = task / parts, begin = task % parts * kIdsPerCta;
    const int64_t end = begin + kIdsPerCta < apply.vocab_size ? begin + kIdsPerCta : apply.vocab_size;
    const Span drafts = apply.drafts_of(request);
    for (int64_t slot = 0; slot <= drafts.size(); ++slot) {
      const int64_t row_index = drafts.begin + request + slot;
      const MutableRow row = apply.row(row_index);
      for (int64_t id = begin + threadIdx.x; id < end; id += kCtaThreads) {
        uint32_t bits = apply.grammar_word(row_index, id / 32);
        if (apply.allowed) bits &= workspace.allowed[request * apply.num_words() + id / 32];
        if ((bits >> id % 32 & 1) == 0) row.mask(id);
      }
    }
  }
}

/// A thread to a stop token or a bad word of a request.
__global__ void __launch_bounds__(kCtaThreads) mask_tokens(int64_t num_ctas, LogitProcessors apply) {
  const int64_t width = apply.stops.width + apply.num_bad_words;
  const int64_t num_tasks = apply.batch * width;
  for (int64_t task = first_thread_task(); task < num_tasks; task += num_ctas * kCtaThreads) {
    const int64_t request = task / width, j = task % width;
    if (j < apply.stops.width) {
      apply.mask_stop(request, j);
    } else {
      apply.mask_bad_word(request, j - apply.stops.width);
    }
  }
}

}  // namespace

int64_t logit_processors_workspace_size(const LogitProcessors& apply) {
  const int64_t allowed = apply.allowed ? apply.batch * apply.num_words() : 0;
  return (num_tables_of(apply) * apply.vocab_size + allowed) * static_cast<int64_t>(sizeof(uint32_t));
}

cudaError_t launch_logit_processors(const LogitProcessors& apply, void* memory, cudaStream_t stream) {
  ProcessorWorkspace workspace;
  workspace.counts = static_cast<uint32_t*>(memory);
  workspace.num_tables = num_tables_of(apply);
  workspace.allowed = workspace.counts + workspace.num_tables * apply.vocab_size;
  const int64_t num_biases = apply.batch * apply.bias_ids.width;
  cudaError_t error = launch(add_biases, ctas_of_threads(num_biases), kCtaThreads, stream, apply);
  if (error != cudaSuccess) return error;
  error = launch(penalise_requests, workspace.num_tables, kCtaThreads, stream, apply, workspace);
  if (error != cudaSuccess) return error;
  if (apply.allowed) {
    error = launch(pack_allowed, apply.batch, kCtaThreads, stream, apply, workspace);
    if (error != cudaSuccess) return error;
  }
  if (apply.allowed || apply.grammar_bitmask != nullptr) {
    const int64_t parts = (apply.vocab_size + kIdsPerCta - 1) / kIdsPerCta;
    error = launch(mask_rows, apply.batch * parts, kCtaThreads, stream, apply, workspace, parts);
    if (error != cudaSuccess) return error;
  }
  const int64_t num_tokens = apply.batch * (apply.stops.width + apply.num_bad_words);
  return launch(mask_tokens, ctas_of_threads(num_tokens), kCtaThreads, stream, apply);
}

}  // namespace specdec_ops::cuda

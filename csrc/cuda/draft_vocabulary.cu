// Draft ids and logits in the target's vocabulary.

#include "cuda/draft_vocabulary.h"

#include "common/mutable_row.h"
#include "cuda/blocks.cuh"
#include "cuda/cta.cuh"
#include "cuda/launch.h"

namespace specdec_ops::cuda {
namespace {

/// A thread to an id.
__global__ void __launch_bounds__(kCtaThreads) map_ids(int64_t num_ctas, MapDraftTokens map) {
  for (int64_t index = first_thread_task(); index < map.num_ids; index += num_ctas * kCtaThreads) map(index);
}

/// A thread to a target id.
__global__ void __launch_bounds__(kCtaThreads) clear_lists(int64_t num_ctas, ExpandDraftLogits expand) {
  for (int64_t target = first_thread_task(); target < expand.vocab_size; target += num_ctas * kCtaThreads) {
    expand.first[target] = -1;
  }
}

/// A thread to a draft id. In which order a list is put together does not matter.
__global__ void __launch_bounds__(kCtaThreads) link_lists(int64_t num_ctas, ExpandDraftLogits expand) {
  for (int64_t id = first_thread_task(); id < expand.vocabulary.size; id += num_ctas * kCtaThreads) {
    const int64_t target = expand.vocabulary.target_of(id);
    // What leads out of the vocabulary is left out.
    if (target < 0 || target >= expand.vocab_size) continue;
    expand.next[id] = atomicExch(expand.first + target, static_cast<int32_t>(id));
  }
}

/// A CTA to so many target ids of a row.
constexpr int64_t kIdsPerCta = 8 * kCtaThreads;

__global__ void __launch_bounds__(kCtaThreads)
    expand_rows(int64_t num_ctas, ExpandDraftLogits expand, DType expanded_dtype, int64_t parts,
                int64_t num_tasks) {
  for (int64_t task = blockIdx.x; task < num_tasks; task += num_ctas) {
    const int64_t row = task / parts, begin = task % parts * kIdsPerCta;
    const int64_t end = begin + kIdsPerCta < expand.vocab_size ? begin + kIdsPerCta : expand.vocab_size;
    const RowRef draft = row_of(expand.draft, row);
    const MutableRow expanded{expand.expanded, expanded_dtype};
    const auto temperature = static_cast<float>(at(expand.temperature, row));
    for (int64_t target = begin + threadIdx.x; target < end; target += kCtaThreads) {
      const float logit =
          expand.combined(temperature, target, [&](int32_t id) { return element(draft, id); });
      expanded.set(row * expand.expanded_stride + target, logit);
    }
  }
}

}  // namespace

cudaError_t launch_map_draft_tokens(const MapDraftTokens& map, cudaStream_t stream) {
  return launch(map_ids, ctas_of_threads(map.num_ids), kCtaThreads, stream, map);
}

int64_t expand_draft_logits_workspace_size(const ExpandDraftLogits& expand) {
  return (expand.vocab_size + expand.vocabulary.size) * static_cast<int64_t>(sizeof(int32_t));
}

cudaError_t launch_expand_draft_logits(const ExpandDraftLogits& shapes, DType expanded_dtype, void* workspace,
                                       cudaStream_t stream) {
  ExpandDraftLogits expand = shapes;
  expand.first = static_cast<int32_t*>(workspace);
  expand.next = expand.first + expand.vocab_size;
  cudaError_t error = launch(clear_lists, ctas_of_threads(expand.vocab_size), kCtaThreads, stream, expand);
  if (error != cudaSuccess) return error;
  error = launch(link_lists, ctas_of_threads(expand.vocabulary.size), kCtaThreads, stream, expand);
  if (error != cudaSuccess) return error;
  const int64_t parts = (expand.vocab_size + kIdsPerCta - 1) / kIdsPerCta;
  const int64_t num_tasks = parts * expand.num_rows;
  return launch(expand_rows, num_tasks, kCtaThreads, stream, expand, expanded_dtype, parts, num_tasks);
}

}  // namespace specdec_ops::cuda

#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "common/allocate.h"
#include "common/checks.h"
#include "common/row_statistics.h"
#include "common/tensor_views.h"

/// A Backend says whether the values in tensors can be read here (kValuesOnHost), names the checks of the op
/// (checks), and reads the rows (row_statistics).
namespace specdec_ops {

/// Rows of logits that an op is asked about, all of them or those that `indices` name; returns their number.
/// Indices in host memory are in [-1, rows).
template <class Backend>
int64_t set_row_indices(const Checks& checks, const Tensor& logits, const OptionalTensor& indices,
                        IntView* view) {
  checks.row_dtype(logits, "logits");
  checks.require(logits.dim() == 2, "logits must be [rows, width], got ", shape_of(logits));
  checks.contiguous_rows(logits, "logits");
  if (!indices) return logits.size(0);
  checks.integer(*indices, "row_indices");
  checks.require(indices->dim() == 1, "row_indices must be [num_rows], got ", shape_of(*indices));
  *view = int_view(*indices);
  for (int64_t i = 0; Backend::kValuesOnHost && i < indices->size(0); ++i) {
    const int64_t index = at(*view, i);
    checks.require(index >= -1 && index < logits.size(0), "row_indices must be in [-1, ", logits.size(0),
                   "), got ", index, " at index ", i);
  }
  return indices->size(0);
}

template <class Backend>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>> row_statistics(
    const Tensor& logits, const Tensor& temperature, const OptionalTensor& draft_logits,
    const OptionalTensor& draft_temperature, const OptionalTensor& row_indices,
    std::optional<int64_t> vocab_size) {
  const Checks checks = Backend::checks("row_statistics", logits);
  RowStatisticsParams params;
  params.num_rows = set_row_indices<Backend>(checks, logits, row_indices, &params.row_indices);
  params.target = rows_view(logits);
  params.num_target_rows = logits.size(0);
  params.vocab_size = checks.vocab_size(vocab_size, logits, "logits");
  checks.dtype(temperature, "temperature", {ScalarType::Float}, "float32");
  checks.vector(temperature, "temperature", "[num_rows]", params.num_rows);
  params.temperature = params.draft_temperature = real_view(temperature);
  checks.require(!draft_temperature || draft_logits,
                 "draft_temperature must be given with draft_logits, got it alone");
  if (draft_logits) {
    checks.rows(*draft_logits, "draft_logits", "[num_rows, width]", params.num_rows);
    checks.require(draft_logits->size(1) >= params.vocab_size || params.num_rows == 0,
                   "draft_logits must have at least vocab_size = ", params.vocab_size, " columns, got ",
                   draft_logits->size(1));
    params.draft = rows_view(*draft_logits);
  }
  if (draft_temperature) {
    checks.dtype(*draft_temperature, "draft_temperature", {ScalarType::Float}, "float32");
    checks.vector(*draft_temperature, "draft_temperature", "[num_rows]", params.num_rows);
    params.draft_temperature = real_view(*draft_temperature);
  }

  const auto output = [&](ScalarType dtype) { return empty_beside(logits, {params.num_rows}, dtype); };
  const auto floats = [](Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); };
  Tensor logsumexp = output(ScalarType::Double), max_prob = output(ScalarType::Float);
  Tensor margin = output(ScalarType::Float), entropy = output(ScalarType::Float);
  Tensor status = output(ScalarType::Int);
  params.logsumexp = static_cast<double*>(logsumexp.mutable_data_ptr());
  params.max_prob = floats(max_prob);
  params.margin = floats(margin);
  params.entropy = floats(entropy);
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  std::vector<Tensor> of_pairs;
  if (draft_logits) {
    params.accept_prob = floats(of_pairs.emplace_back(output(ScalarType::Float)));
    params.total_variation = floats(of_pairs.emplace_back(output(ScalarType::Float)));
  }
  if (params.num_rows > 0) Backend::row_statistics(checks, params, logits);
  return {std::move(logsumexp), std::move(max_prob), std::move(margin),
          std::move(entropy),   std::move(status),   std::move(of_pairs)};
}

}  // namespace specdec_ops

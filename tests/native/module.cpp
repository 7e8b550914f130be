// The raw kernels of each tier for pytest: numpy arrays in and out, no PyTorch between.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <type_traits>
#include <vector>

#include "common/philox.h"
#include "common/row_law.h"
#include "cpu/kernels/float_environment.h"
#include "cpu/kernels/isa.h"
#include "cpu/kernels/types.h"

#define SPECDEC_KERNEL "primitives.kernel.h"
#include "cpu/kernels/foreach_isa.h"

namespace py = pybind11;
using namespace specdec_ops;
using namespace specdec_ops::cpu;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

struct Primitives {
  decltype(&scalar::tier_block_stats) block_stats;
  decltype(&scalar::tier_weights) weights;
  decltype(&scalar::tier_to_float32) to_float32;
  decltype(&scalar::tier_pick) pick;
  decltype(&scalar::tier_residual) residual;
};

#define SPECDEC_PRIMITIVES(tier)                                                                            \
  Primitives {                                                                                              \
    tier::tier_block_stats, tier::tier_weights, tier::tier_to_float32, tier::tier_pick, tier::tier_residual \
  }

Primitives primitives_of(const std::string& tier) {
  std::vector<std::string> names;
  for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
  if (std::find(names.begin(), names.end(), tier) == names.end()) throw py::value_error("no tier " + tier);
#if defined(__x86_64__)
  if (tier == "avx512") return SPECDEC_PRIMITIVES(avx512);
  if (tier == "avx2") return SPECDEC_PRIMITIVES(avx2);
#endif
  return SPECDEC_PRIMITIVES(scalar);
}

/// float32 arrays as they are, uint16 arrays as bfloat16 or float16.
struct Elements {
  py::array array;
  DType dtype;
  int n;

  Elements(const py::array& given, const std::string& name) {
    dtype = name == "float32" ? DType::kFloat32 : name == "bfloat16" ? DType::kBFloat16 : DType::kFloat16;
    if (dtype == DType::kFloat32) {
      array = Array<float>::ensure(given);
    } else {
      array = Array<uint16_t>::ensure(given);
    }
    n = static_cast<int>(array.size());
    if (n < 1 || n > kBlockSize) throw py::value_error("between 1 and 4096 elements");
  }
};

}  // namespace

PYBIND11_MODULE(specdec_ops_native, m) {
  m.def("tiers", [] {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(name_of(isa));
    return names;
  });
  m.attr("thinning_attempts") = kThinningAttempts;
  m.def("philox4x32", [](uint64_t key, std::array<uint32_t, 4> c) {
    const PhiloxBlock block = philox4x32(key, {{c[0], c[1], c[2], c[3]}});
    return std::vector<uint32_t>(block.words, block.words + 4);
  });
  m.def("uniform", [](int64_t seed, uint32_t stream, int64_t slot, int64_t position) {
    return uniform(seed, static_cast<Stream>(stream), slot, position);
  });
  m.def("exp2", py::vectorize([](double y) { return exp2_f64(y); }));
  m.def("log2", py::vectorize([](double x) { return log2_f64(x); }));
  m.def("log2_scale", [](float temperature) { return log2_scale(temperature); });
  m.def("block_stats",
        [](const std::string& tier, const py::array& x, const std::string& dtype, float scale) {
          const Elements elements(x, dtype);
          BlockStats stats;
          primitives_of(tier).block_stats(elements.array.data(), elements.dtype, elements.n, scale, &stats);
          return std::make_pair(stats.max, stats.sum);
        });
  m.def("weights", [](const std::string& tier, const py::array& x, const std::string& dtype, float reference,
                      float scale) {
    const Elements elements(x, dtype);
    Array<float> weights(elements.n);
    primitives_of(tier).weights(elements.array.data(), elements.dtype, elements.n, reference, scale,
                                weights.mutable_data());
    return weights;
  });
  m.def("to_float32", [](const std::string& tier, const py::array& x, const std::string& dtype) {
    const Elements elements(x, dtype);
    Array<float> values(elements.n);
    primitives_of(tier).to_float32(elements.array.data(), elements.dtype, elements.n, values.mutable_data());
    return values;
  });
  m.def("pick", [](const std::string& tier, const Array<float>& weights, double chunk, double id) {
    if (weights.size() < 1 || weights.size() > kBlockSize)
      throw py::value_error("between 1 and 4096 elements");
    return primitives_of(tier).pick(weights.data(), static_cast<int>(weights.size()), chunk, id);
  });
  m.def("residual", [](const std::string& tier, const Array<float>& p, const Array<float>& q) {
    if (p.size() != q.size() || p.size() < 1 || p.size() > kBlockSize)
      throw py::value_error("two equal sizes");
    Array<float> residual(p.size());
    const float sum =
        primitives_of(tier).residual(p.data(), q.data(), static_cast<int>(p.size()), residual.mutable_data());
    return std::make_pair(residual, sum);
  });
}

// The floor of the benchmarks: reads a list of rows once, at memory speed, on the threads that torch uses.

#include <cstddef>
#include <cstdint>

namespace {

using Lane = std::uint64_t __attribute__((vector_size(32), aligned(1)));

constexpr std::size_t kLanes = 8;
constexpr std::size_t kStep = kLanes * sizeof(Lane);
constexpr std::size_t kPrefetchBytes = 1024;

std::uint64_t read_range(const unsigned char* data, std::size_t bytes) {
  Lane seen[kLanes] = {};
  std::size_t i = 0;
  for (; i + kStep <= bytes; i += kStep) {
    for (std::size_t line = 0; line < kStep; line += 64) __builtin_prefetch(data + i + kPrefetchBytes + line);
    for (std::size_t j = 0; j < kLanes; ++j)
      seen[j] |= *reinterpret_cast<const Lane*>(data + i + j * sizeof(Lane));
  }
  std::uint64_t all = 0;
  for (const Lane& lane : seen) all |= lane[0] | lane[1] | lane[2] | lane[3];
  for (; i < bytes; ++i) all |= data[i];
  return all;
}

}  // namespace

// ORs every byte of `num_rows` rows of `row_bytes` each; the concatenation is cut into one range per thread.
extern "C" std::uint64_t read_rows(const void* const* rows, std::int64_t num_rows, std::int64_t row_bytes,
                                   int threads) {
  const std::int64_t total = num_rows * row_bytes;
  std::uint64_t all = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(| : all)
  for (int t = 0; t < threads; ++t) {
    std::int64_t begin = total / threads * t;
    const std::int64_t end = t + 1 == threads ? total : total / threads * (t + 1);
    while (begin < end) {
      const std::int64_t row = begin / row_bytes;
      const std::int64_t stop = end < (row + 1) * row_bytes ? end : (row + 1) * row_bytes;
      all |= read_range(static_cast<const unsigned char*>(rows[row]) + (begin - row * row_bytes),
                        static_cast<std::size_t>(stop - begin));
      begin = stop;
    }
  }
  return all;
}

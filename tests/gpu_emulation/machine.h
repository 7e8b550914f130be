#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

/// A GPU on one thread of a CPU. The threads of a CTA are fibers, which run until they meet: at a collective
/// of their warp, at a barrier of their CTA. Whose turn it is depends on a seed. What a GPU leaves undefined
/// is an error here: lanes that meet at different collectives, a deadlock, writes past shared memory.
namespace emulation {

constexpr int kLanes = 32;
/// Threads of a CTA at most.
constexpr int kMaxThreads = 256;

/// A call of a collective in device code, for messages and to tell calls from each other.
struct Site {
  const char* function;
  int line;
};

/// What the lanes of a warp brought to a collective.
struct Lanes {
  uint64_t values[kLanes];
  /// A bit to a lane that was there.
  uint32_t present;
};

/// What a launch asks for.
struct Grid {
  std::function<void()> kernel;
  unsigned num_ctas;
  int num_threads;
  size_t dynamic_shared;
  /// Its CTAs may start while those of the grid before it run.
  bool is_early;
};

// ---- For the host ----

/// Follows the grids that were launched before, like everything on one stream.
void launch(const Grid& grid);
/// Runs what was launched. Throws std::runtime_error, and forgets the rest, where a kernel is at fault.
void synchronize();
/// The order in which CTAs, warps and lanes run; 0: as they are numbered, one CTA after another.
void set_seed(uint64_t seed);
/// A number below `count`, by the seed.
unsigned pick(unsigned count);

// ---- For device code ----

/// Returns when all lanes of the mask that have not ended are here.
const Lanes& meet_warp(uint32_t mask, uint64_t value, Site site);
/// Returns when all threads of the CTA that have not ended are here: in how many the condition holds.
int meet_cta(bool condition, Site site);
/// Returns when the grids before this one are done.
void wait_for_previous_grids();
/// Lets others run.
void pass();
void* dynamic_shared();
/// 16 bytes: now, or when the thread calls finish_copies.
void copy_later(void* destination, const void* source);
void finish_copies();
/// Ends the run with a message.
[[noreturn]] void fail(const char* message, Site site);
int lane_index();

}  // namespace emulation

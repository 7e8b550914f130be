#include "machine.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <new>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime_api.h"

Index threadIdx, blockIdx, blockDim;

// Variables that are __shared__, and where the linker says that they lie.
extern "C" __attribute__((weak, visibility("hidden"))) char __start_emulated_shared[],
    __stop_emulated_shared[];

namespace emulation {
namespace {

constexpr size_t kStackSize = 128 << 10;
/// CTAs that run at once.
constexpr size_t kResidentCtas = 5;
constexpr int kMaxWarps = kMaxThreads / kLanes;
/// Steps without a thread that gets further than to let others run.
constexpr int kMostIdleSteps = 1 << 22;
/// NaN in every type, and no index.
constexpr int kPoison = 0xFF;
constexpr size_t kGuardSize = 256;
constexpr unsigned char kGuard = 0xA5;

size_t static_shared_size() { return static_cast<size_t>(__stop_emulated_shared - __start_emulated_shared); }

std::string text_of(Site site) { return std::string(site.function) + " line " + std::to_string(site.line); }

struct Copy {
  void* destination;
  const void* source;
};

struct Thread {
  jmp_buf context;
  Site site;
  uint32_t mask;
  uint64_t value;
  std::vector<Copy> copies;
};

/// A bit to a lane, which is in one of these states or has ended.
struct Warp {
  uint32_t ready, at_warp, at_cta, at_grid;
  Lanes lanes;

  bool is_done() const { return (ready | at_warp | at_cta | at_grid) == 0; }
};

struct QueuedGrid {
  Grid grid;
  std::vector<unsigned> order;
  size_t num_started = 0, num_done = 0;

  bool is_done() const { return num_done == grid.num_ctas; }
};

/// A place for a CTA. Its fibers live on from one CTA to the next.
struct Cta {
  Thread threads[kMaxThreads];
  Warp warps[kMaxWarps];
  QueuedGrid* grid = nullptr;
  unsigned index;
  int num_holding;
  /// The variables that are __shared__, while other CTAs run.
  std::vector<char> statics;
  std::vector<unsigned char> shared;
  char* stacks;

  Cta() : statics(static_shared_size()) {
    void* memory = mmap(nullptr, kStackSize * kMaxThreads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    stacks = static_cast<char*>(memory);
  }
  ~Cta() { munmap(stacks, kStackSize * kMaxThreads); }
  Cta(const Cta&) = delete;
  Cta& operator=(const Cta&) = delete;

  int num_warps() const { return grid->grid.num_threads / kLanes; }
  bool is_done() const {
    return std::all_of(warps, warps + num_warps(), [](const Warp& warp) { return warp.is_done(); });
  }
  unsigned char* dynamic_shared() {
    const auto address = reinterpret_cast<uintptr_t>(shared.data()) + kGuardSize;
    return reinterpret_cast<unsigned char*>((address + 127) / 128 * 128);
  }
};

/// The state of the emulation; a process has one. `turn` is the scheduler's place to come back to.
struct Machine {
  jmp_buf turn;
  std::deque<QueuedGrid> grids;
  std::vector<std::unique_ptr<Cta>> free_places, running;
  Cta* current = nullptr;
  int thread = 0;
  /// Whether the current thread met others or ended, and what is wrong with it.
  bool got_on = false;
  std::string error;
  uint64_t random = 0;

  Warp& warp() { return current->warps[thread / kLanes]; }
  uint32_t lane_bit() const { return 1u << thread % kLanes; }
  Thread& self() { return current->threads[thread]; }
};
Machine m;

void back_to_scheduler() {
  if (_setjmp(m.self().context) == 0) _longjmp(m.turn, 1);
}

/// What a fiber does: the kernel, for one CTA after another.
void live() {
  back_to_scheduler();
  for (;;) {
    m.current->grid->grid.kernel();
    m.self().copies.clear();
    m.warp().ready &= ~m.lane_bit();
    m.got_on = true;
    back_to_scheduler();
  }
}

void resume(Cta& cta, int thread) {
  m.thread = thread;
  threadIdx.x = static_cast<unsigned>(thread);
  if (_setjmp(m.turn) == 0) _longjmp(cta.threads[thread].context, 1);
  if (!m.error.empty()) throw std::runtime_error(m.error);
}

/// Makes a CTA the one whose variables are in place.
void enter(Cta* cta) {
  if (m.current == cta) return;
  if (m.current != nullptr) {
    memcpy(m.current->statics.data(), __start_emulated_shared, static_shared_size());
  }
  memcpy(__start_emulated_shared, cta->statics.data(), static_shared_size());
  m.current = cta;
  blockIdx.x = cta->index;
  blockDim.x = static_cast<unsigned>(cta->grid->grid.num_threads);
}

std::unique_ptr<Cta> new_place() {
  auto place = std::make_unique<Cta>();
  Cta* before = m.current;
  m.current = place.get();
  for (m.thread = 0; m.thread < kMaxThreads; ++m.thread) {
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = place->stacks + kStackSize * static_cast<size_t>(m.thread);
    context.uc_stack.ss_size = kStackSize;
    context.uc_link = nullptr;
    makecontext(&context, live, 0);
    if (_setjmp(m.turn) == 0) setcontext(&context);
  }
  m.current = before;
  return place;
}

void start_cta(QueuedGrid& grid) {
  std::unique_ptr<Cta> cta;
  if (m.free_places.empty()) {
    cta = new_place();
  } else {
    cta = std::move(m.free_places.back());
    m.free_places.pop_back();
  }
  cta->grid = &grid;
  cta->index = grid.order[grid.num_started++];
  memset(cta->statics.data(), kPoison, cta->statics.size());
  cta->shared.assign(grid.grid.dynamic_shared + 2 * kGuardSize + 128, kGuard);
  memset(cta->dynamic_shared(), kPoison, grid.grid.dynamic_shared);
  for (int w = 0; w < cta->num_warps(); ++w) cta->warps[w] = {~0u, 0, 0, 0, {}};
  m.running.push_back(std::move(cta));
}

/// Starts CTAs where there is room. The first grid always gets a place.
void fill_places() {
  const size_t most = m.random == 0 ? 1 : kResidentCtas;
  while (m.running.size() < most) {
    QueuedGrid& first = m.grids[0];
    QueuedGrid* second = m.grids.size() > 1 && m.grids[1].grid.is_early ? &m.grids[1] : nullptr;
    const bool has_first = first.num_started < first.grid.num_ctas;
    const bool has_second = second != nullptr && second->num_started < second->grid.num_ctas &&
                            (!has_first || m.running.size() + 1 < most);
    if (!has_first && !has_second) return;
    if (has_first && has_second) {
      start_cta(pick(2) == 0 ? first : *second);
    } else {
      start_cta(has_first ? first : *second);
    }
  }
}

[[noreturn]] void diverge(const Thread& a, const Thread& b, const char* of) {
  throw std::runtime_error(std::string("threads of a ") + of +
                           " are at different collectives: " + text_of(a.site) + ", and " + text_of(b.site));
}

bool same(const Thread& a, const Thread& b) {
  return a.site.line == b.site.line && strcmp(a.site.function, b.site.function) == 0 && a.mask == b.mask;
}

/// Lets the lanes of a warp go on that have met.
void settle_warp(Cta& cta, int w) {
  Warp& warp = cta.warps[w];
  if (warp.ready != 0 || warp.at_warp == 0) return;
  const Thread* threads = cta.threads + w * kLanes;
  const Thread& first = threads[__builtin_ctz(warp.at_warp)];
  for (int lane = 0; lane < kLanes; ++lane) {
    if ((warp.at_warp | warp.at_cta) >> lane & 1 && !same(threads[lane], first)) {
      diverge(first, threads[lane], "warp");
    }
  }
  // Lanes that have ended do not count.
  const uint32_t missing = warp.at_grid & first.mask;
  if (missing != 0) return;
  for (int lane = 0; lane < kLanes; ++lane) warp.lanes.values[lane] = threads[lane].value;
  warp.lanes.present = warp.at_warp;
  warp.ready = warp.at_warp;
  warp.at_warp = 0;
}

/// Lets the threads of a CTA go on that have met.
void settle_cta(Cta& cta) {
  const Thread* first = nullptr;
  int num_holding = 0;
  for (int t = 0; t < cta.grid->grid.num_threads; ++t) {
    const Warp& warp = cta.warps[t / kLanes];
    if ((warp.ready | warp.at_warp | warp.at_grid) != 0) return;
    if ((warp.at_cta >> t % kLanes & 1) == 0) continue;
    const Thread& thread = cta.threads[t];
    if (first == nullptr) first = &thread;
    if (!same(thread, *first)) diverge(*first, thread, "CTA");
    num_holding += thread.value != 0 ? 1 : 0;
  }
  cta.num_holding = num_holding;
  for (int w = 0; w < cta.num_warps(); ++w) {
    cta.warps[w].ready = cta.warps[w].at_cta;
    cta.warps[w].at_cta = 0;
  }
}

/// Runs each lane of a warp until it waits for another.
void run_warp(Cta& cta, int w) {
  enter(&cta);
  const unsigned start = pick(kLanes), step = 1 + 2 * pick(kLanes / 2);
  for (unsigned i = 0; i < kLanes; ++i) {
    const unsigned lane = (start + i * step) % kLanes;
    if (cta.warps[w].ready >> lane & 1) resume(cta, w * kLanes + static_cast<int>(lane));
  }
  settle_warp(cta, w);
  settle_cta(cta);
}

void end_cta(size_t place) {
  std::unique_ptr<Cta> cta = std::move(m.running[place]);
  m.running.erase(m.running.begin() + static_cast<std::ptrdiff_t>(place));
  if (m.current == cta.get()) m.current = nullptr;
  const unsigned char* shared = cta->dynamic_shared();
  const auto is_guard = [](unsigned char byte) { return byte == kGuard; };
  const unsigned char* end = cta->shared.data() + cta->shared.size();
  if (!std::all_of(const_cast<const unsigned char*>(cta->shared.data()), shared, is_guard) ||
      !std::all_of(shared + cta->grid->grid.dynamic_shared, end, is_guard)) {
    throw std::runtime_error("a CTA has written past its shared memory");
  }
  ++cta->grid->num_done;
  m.free_places.push_back(std::move(cta));
}

/// Forgets grids that are done, and lets those go on that waited for them.
void end_grids() {
  while (!m.grids.empty() && m.grids.front().is_done()) {
    m.grids.pop_front();
    for (const auto& cta : m.running) {
      for (int w = 0; w < cta->num_warps(); ++w) {
        cta->warps[w].ready |= cta->warps[w].at_grid;
        cta->warps[w].at_grid = 0;
      }
    }
  }
}

/// A warp of a CTA that runs.
struct Turn {
  size_t place;
  int warp;
};

void run_grids() {
  int idle_steps = 0;
  // How many steps a warp goes on for, about: some races need one that is far ahead of the others.
  const unsigned persistence = 2u << 3 * pick(3);
  Turn turn = {0, 0};
  for (end_grids(); !m.grids.empty(); end_grids()) {
    fill_places();
    std::array<Turn, kResidentCtas * kMaxWarps> turns;
    unsigned num_turns = 0;
    for (size_t place = 0; place < m.running.size(); ++place) {
      for (int w = 0; w < m.running[place]->num_warps(); ++w) {
        if (m.running[place]->warps[w].ready != 0) turns[num_turns++] = {place, w};
      }
    }
    m.got_on = false;
    if (num_turns > 0) {
      const bool can_go_on =
          turn.place < m.running.size() && m.running[turn.place]->warps[turn.warp].ready != 0;
      if (!can_go_on || pick(persistence) == 0) turn = turns[pick(num_turns)];
      run_warp(*m.running[turn.place], turn.warp);
      if (m.running[turn.place]->is_done()) end_cta(turn.place);
    }
    idle_steps = m.got_on ? 0 : idle_steps + 1;
    if (num_turns == 0 || idle_steps > kMostIdleSteps) {
      std::string where;
      for (const auto& cta : m.running) where += "; " + text_of(cta->threads[0].site);
      throw std::runtime_error("no thread can go on" + where);
    }
  }
}

}  // namespace

void launch(const Grid& grid) {
  if (grid.num_threads < 1 || grid.num_threads > kMaxThreads || grid.num_threads % kLanes != 0) {
    throw std::runtime_error("a CTA must have whole warps, at most eight");
  }
  QueuedGrid& queued = m.grids.emplace_back();
  queued.grid = grid;
  queued.order.resize(grid.num_ctas);
  std::iota(queued.order.begin(), queued.order.end(), 0u);
  for (size_t i = queued.order.size(); i > 1; --i) {
    std::swap(queued.order[i - 1], queued.order[m.random == 0 ? i - 1 : pick(static_cast<unsigned>(i))]);
  }
}

void synchronize() {
  try {
    run_grids();
  } catch (...) {
    m.grids.clear();
    m.running.clear();
    m.free_places.clear();
    m.current = nullptr;
    m.error.clear();
    throw;
  }
}

void set_seed(uint64_t seed) { m.random = seed; }

unsigned pick(unsigned count) {
  // xorshift64, which keeps 0.
  m.random ^= m.random << 13;
  m.random ^= m.random >> 7;
  m.random ^= m.random << 17;
  return static_cast<unsigned>((m.random >> 32) % count);
}

const Lanes& meet_warp(uint32_t mask, uint64_t value, Site site) {
  Thread& self = m.self();
  self.site = site;
  self.mask = mask;
  self.value = value;
  Warp& warp = m.warp();
  if ((mask & m.lane_bit()) == 0) fail("a lane is not in its own mask", site);
  warp.ready &= ~m.lane_bit();
  warp.at_warp |= m.lane_bit();
  m.got_on = true;
  back_to_scheduler();
  return warp.lanes;
}

int meet_cta(bool condition, Site site) {
  Thread& self = m.self();
  self.site = site;
  self.mask = ~0u;
  self.value = condition;
  m.warp().ready &= ~m.lane_bit();
  m.warp().at_cta |= m.lane_bit();
  m.got_on = true;
  back_to_scheduler();
  return m.current->num_holding;
}

void wait_for_previous_grids() {
  if (m.current->grid == &m.grids.front()) return;
  m.warp().ready &= ~m.lane_bit();
  m.warp().at_grid |= m.lane_bit();
  m.got_on = true;
  back_to_scheduler();
}

void pass() { back_to_scheduler(); }

void* dynamic_shared() { return m.current->dynamic_shared(); }

void copy_later(void* destination, const void* source) {
  if (pick(2) == 0) {
    m.self().copies.push_back({destination, source});
  } else {
    memcpy(destination, source, 16);
  }
}

void finish_copies() {
  for (const Copy& copy : m.self().copies) memcpy(copy.destination, copy.source, 16);
  m.self().copies.clear();
}

void fail(const char* message, Site site) {
  m.error = std::string(message) + ": " + text_of(site);
  back_to_scheduler();
  __builtin_unreachable();
}

int lane_index() { return m.thread % kLanes; }

}  // namespace emulation

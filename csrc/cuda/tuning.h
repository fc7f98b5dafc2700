// SPDX-License-Identifier: Apache-2.0
// How the kernels are launched. The numbers are of an H200, in whose CUDA graphs an empty kernel
// takes 0.7 us; no choice changes a bit of any result. A block that lets dependents launch costs it
// 1.2 ns (0.6 without), whatever its size: 200,000 blocks take longer than what they move.
//
// Built with VLLM_FL_TUNE, every choice can be replaced from Python, `_C_cuda.tune(key, value)`,
// so that one run on a GPU compares them (benchmarks/gpu/tune.py). Without it they are constants.
#pragma once

#include "gpu.h"

namespace vllm_fl {

enum Choice {
  kNormVectors,    // vectors of 16 bytes per thread: 1, 2, 4
  kNormWarp,       // 1: a warp for each row, where it can hold it; 0: a block
  kNormWarpRows,   // rows per block where a row has a warp or less
  kGatedThreads,   // of a block
  kRotaryThreads,  // of a block
  kFusedThreads,   // of a block, for norm and rotary in one
  kCacheThreads,   // of a block
  kCacheSides,     // of a thread: 2, keys and values; 1, all keys and then all values
  kDependent,      // 1: programmatic dependent launch
  kChoices
};

#if defined(VLLM_FL_TUNE)
constexpr const char* choice_names[kChoices] = {
    "norm_vectors",   "norm_warp",     "norm_warp_rows", "gated_threads",
    "rotary_threads", "fused_threads", "cache_threads",  "cache_sides",
    "dependent"};
extern int choices[kChoices];
inline int chosen(Choice choice, int otherwise) {
  return choices[choice] < 0 ? otherwise : choices[choice];
}
#else
constexpr int chosen(Choice, int otherwise) { return otherwise; }
#endif

inline bool launches_depend() { return chosen(kDependent, 1) != 0; }

// Threads with which every multiprocessor of an H200 has one warp, and half of what it holds.
constexpr int64_t kBusy = 132 * 32, kFull = 132 * 1024;

inline int rounded_up_to_warps(int64_t n) {
  return static_cast<int>(divided_up(n, kWarp) * kWarp);
}

// ------------------------------------------------------------------------------------- norms

struct NormShape {
  int threads;  // of a row: a power of two up to 32, so many lanes of a warp; or the block
  int vectors;  // of 16 bytes, of each thread
  int rows;     // of a block
  bool is_block;
};

// How many vectors a thread of a block has. Few rows wait for one another's latencies: the fewest
// warps that two loads each cover the row with start soonest and meet soonest. Many rows are a
// matter of how many fit into a multiprocessor at once, for which sums and norms differ.
inline int norm_vectors(int64_t vectors, int64_t rows, bool adds) {
  constexpr int64_t multiprocessors = 132;
  const bool few = rows <= 2 * multiprocessors, many = rows >= 1024;
  if (adds) {
    if (vectors <= 256) return 1;
    if (few) return 2;
    return vectors <= (many ? 512 : 0) || vectors > 768 ? 4 : 1;
  }
  if (vectors <= 128) return 1;
  if (vectors <= 256 || few) return 2;
  return vectors <= 512 && !many ? 2 : 4;
}

inline NormShape norm_shape(int64_t vectors, int64_t rows, bool adds) {
  NormShape shape{};
  const bool warp = vectors <= 4 * kWarp && chosen(kNormWarp, !adds && rows >= 16384) != 0;
  if (vectors <= kWarp || warp) {
    shape.vectors = vectors <= kWarp ? 1 : 4;
    shape.threads = power_of_two_from(vectors < kWarp ? vectors : kWarp);
    const int threads = rows * shape.threads >= kBusy ? 8 * kWarp : 4 * kWarp;
    shape.rows = chosen(kNormWarpRows, threads / shape.threads);
    const int least = kWarp / shape.threads;  // a block has whole warps
    if (shape.rows < least) shape.rows = least;
    return shape;
  }
  shape.is_block = true;
  shape.rows = 1;
  shape.vectors = chosen(kNormVectors, norm_vectors(vectors, rows, adds));
  if (vectors > kMaxThreads) shape.vectors = 4;
  shape.threads = rounded_up_to_warps(divided_up(vectors, shape.vectors));
  return shape;
}

// ------------------------------------------------------------------------------- activations

struct GatedLaunch {
  int columns, rows;  // the block's threads, each with one vector
};

// vectors: of a row of the result.
inline GatedLaunch gated_launch(int64_t vectors, int64_t rows) {
  GatedLaunch launch{};
  const int threads = chosen(kGatedThreads, vectors * rows >= 4 * kFull ? 512 : 128);
  // As many chunks as `threads` make necessary, all of about the same size.
  const int64_t chunks = divided_up(vectors, threads);
  launch.columns = static_cast<int>(divided_up(vectors, chunks));
  if (launch.columns > kWarp) launch.columns = rounded_up_to_warps(launch.columns);
  launch.rows = launch.columns >= threads ? 1 : threads / launch.columns;
  if (launch.rows > rows) launch.rows = static_cast<int>(rows);
  return launch;
}

// ------------------------------------------------------------------------------------- rotary

struct RotaryLaunch {
  int columns, rows;  // the block's threads: units of a head, heads
};

inline RotaryLaunch rotary_launch(int units, int64_t heads, int64_t tokens) {
  RotaryLaunch launch{};
  const int threads = chosen(kRotaryThreads, units * heads * tokens < kFull ? 64 : 128);
  launch.columns = units;
  const int most = units < threads ? threads / units : 1;
  launch.rows = static_cast<int>(divided_up(heads, divided_up(heads, most)));
  return launch;
}

// Norm and rotary in one: heads of a block, each of which has `lanes` threads.
inline int fused_rows(int lanes, int64_t heads, int64_t tokens) {
  const int threads = chosen(kFusedThreads, lanes * heads * tokens < kFull ? 64 : 128);
  const int least = kWarp / lanes;  // a block has whole warps
  const int most = threads / lanes < least ? least : threads / lanes;
  const int rows = static_cast<int>(divided_up(heads, divided_up(heads, most)));
  return static_cast<int>(divided_up(rows, least)) * least;
}

// -------------------------------------------------------------------------------------- cache

// Memory is fastest where one stream is read and one is written.
inline int cache_sides(int64_t items, int64_t tokens) {
  return chosen(kCacheSides, items * tokens < 4 * kFull ? 2 : 1);
}

inline int cache_threads(int64_t items, int64_t tokens, int sides) {
  return chosen(kCacheThreads, items * tokens < kFull ? 64 : sides == 2 ? 128 : 256);
}

}  // namespace vllm_fl

// SPDX-License-Identifier: Apache-2.0
// How the kernels are launched. What decides the order of a sum (`NormShape`) depends on the row's
// size and the dtype alone; all else may depend on the number of rows too.
//
// Built with VLLM_FL_TUNE, every choice can be replaced from Python, `_C_cuda.tune(key, value)`,
// so that one run on a GPU compares them (benchmarks/gpu/tune.py). Without it they are constants.
#pragma once

#include "gpu.h"

namespace vllm_fl {

enum Choice {
  kNormVectors,    // vectors of 16 bytes per thread: 1, 2, 4
  kNormWarp,       // 1: a warp for each row, where it can hold it; 0: a block
  kNormVariant,    // 0: plain; 1: streaming loads and stores; 2: persistent blocks; 3: both
  kNormWarpRows,   // rows per block where a row has a warp or less
  kNormPerSm,      // threads per multiprocessor of persistent blocks
  kGatedThreads,   // of a block
  kGatedUnroll,    // vectors per thread: 1, 2
  kGatedStream,    // 1: streaming loads and stores
  kRotaryThreads,  // of a block
  kRotaryHeads,    // per thread: 1, 2, 4
  kFusedThreads,   // of a block, for norm and rotary in one
  kFusedHeads,     // per thread: 1, 2, 4
  kCacheThreads,   // of a block
  kDependent,      // 1: programmatic dependent launch
  kChoices
};

#if defined(VLLM_FL_TUNE)
constexpr const char* choice_names[kChoices] = {
    "norm_vectors",   "norm_warp",    "norm_variant",  "norm_warp_rows", "norm_per_sm",
    "gated_threads",  "gated_unroll", "gated_stream",  "rotary_threads", "rotary_heads",
    "fused_threads",  "fused_heads", "cache_threads", "dependent"};
extern int choices[kChoices];
inline int chosen(Choice choice, int otherwise) {
  return choices[choice] < 0 ? otherwise : choices[choice];
}
#else
constexpr int chosen(Choice, int otherwise) { return otherwise; }
#endif

// Multiprocessors of the current device.
int multiprocessors();

inline bool launches_depend() { return chosen(kDependent, 1) != 0; }

// Threads with which every multiprocessor of an H200 has one warp, and half of what it holds.
constexpr int64_t kBusy = 132 * 32, kFull = 132 * 1024;

inline int rounded_up_to_warps(int64_t n) {
  return static_cast<int>(divided_up(n, kWarp) * kWarp);
}

// ------------------------------------------------------------------------------------- norms

// Which thread sums which elements of a row: vector i is of thread i % threads.
struct NormShape {
  int threads;  // a power of two up to 32: so many lanes of a warp; else the block
  int vectors;  // of each thread
  bool is_block;
};

// Measured on an H200: a row that one load of each thread covers starts soonest, and blocks of few
// threads with four loads each leave the fewest threads of a multiprocessor without a block.
inline int norm_vectors(int64_t vectors, bool adds) {
  if (adds) return vectors <= 256 || (vectors > 512 && vectors <= 768) ? 1 : 4;
  return vectors <= 128 ? 1 : vectors <= 256 ? 2 : 4;
}

inline NormShape norm_shape(int64_t hidden, int lanes, bool adds) {
  const int64_t vectors = divided_up(hidden, lanes);
  const bool fits_warp = vectors <= 4 * kWarp;
  const bool warp = fits_warp && chosen(kNormWarp, vectors <= kWarp) != 0;
  if (vectors <= kWarp || warp) {
    const int threads = power_of_two_from(vectors < kWarp ? vectors : kWarp);
    return {threads, power_of_two_from(divided_up(vectors, threads)), false};
  }
  int each = chosen(kNormVectors, norm_vectors(vectors, adds));
  while (divided_up(vectors, each) > kMaxThreads) each *= 2;
  return {rounded_up_to_warps(divided_up(vectors, each)), each, true};
}

struct NormLaunch {
  int variant;
  int rows_per_block;      // where it is no block for each row
  int64_t max_blocks;      // of persistent ones
};

inline NormLaunch norm_launch(const NormShape& shape, int64_t rows) {
  NormLaunch launch{};
  launch.variant = chosen(kNormVariant, 0);
  const int threads = rows * shape.threads >= kBusy ? 8 * kWarp : 4 * kWarp;
  launch.rows_per_block = shape.is_block ? 1 : chosen(kNormWarpRows, threads / shape.threads);
  const int least = kWarp / shape.threads;  // a block has whole warps
  if (!shape.is_block && launch.rows_per_block < least) launch.rows_per_block = least;
  const int per_sm = chosen(kNormPerSm, 2048) / (shape.is_block ? shape.threads : 4 * kWarp);
  launch.max_blocks = static_cast<int64_t>(multiprocessors()) * (per_sm < 1 ? 1 : per_sm);
  return launch;
}

// ------------------------------------------------------------------------------- activations

struct GatedLaunch {
  int unroll;
  bool stream;
  int columns, rows;  // the block's threads
};

// vectors: of a row of the result.
inline GatedLaunch gated_launch(int64_t vectors, int64_t rows) {
  const int64_t all = vectors * rows;
  GatedLaunch launch{};
  launch.unroll = chosen(kGatedUnroll, 1);
  launch.stream = chosen(kGatedStream, 0) != 0;
  const int threads = chosen(kGatedThreads, all >= 4 * kFull ? 512 : 128);
  // As many chunks as `threads` make necessary, all of about the same size.
  const int64_t each = divided_up(vectors, launch.unroll);
  const int64_t chunks = divided_up(each, threads);
  launch.columns = static_cast<int>(divided_up(each, chunks));
  if (launch.columns > kWarp) launch.columns = rounded_up_to_warps(launch.columns);
  launch.rows = launch.columns >= threads ? 1 : threads / launch.columns;
  if (launch.rows > rows) launch.rows = static_cast<int>(rows);
  return launch;
}

// ------------------------------------------------------------------------------------- rotary

struct RotaryLaunch {
  int heads;          // of each thread
  int columns, rows;  // the block's threads: units of a head, heads
};

inline RotaryLaunch rotary_launch(int units, int64_t heads, int64_t tokens) {
  RotaryLaunch launch{};
  const int64_t all = units * heads * tokens;
  const int threads = chosen(kRotaryThreads, all >= kFull ? 32 : all >= kBusy ? 256 : 128);
  launch.heads = chosen(kRotaryHeads, all >= kFull ? 4 : 1);
  launch.columns = units < threads ? units : threads;
  const int64_t each = divided_up(heads, launch.heads);
  const int most = threads / launch.columns;
  const int64_t chunks = divided_up(each, most);
  launch.rows = static_cast<int>(divided_up(each, chunks));
  return launch;
}

// Norm and rotary in one.
struct FusedLaunch {
  int heads;  // of each thread
  int rows;   // of the block's threads, each of `lanes` for its heads
};

inline FusedLaunch fused_launch(int lanes, int64_t heads, int64_t tokens, bool many) {
  const int64_t all = lanes * heads * tokens;
  FusedLaunch launch{};
  launch.heads = many ? chosen(kFusedHeads, all >= kFull ? 4 : 1) : 1;
  const int threads = chosen(kFusedThreads, 64);
  const int least = kWarp / lanes;  // a block has whole warps
  launch.rows = threads / lanes < least ? least : threads / lanes;
  return launch;
}

// -------------------------------------------------------------------------------------- cache

inline int cache_threads(int64_t items, int64_t tokens) {
  return chosen(kCacheThreads, items * tokens < kFull ? 64 : 128);
}

}  // namespace vllm_fl

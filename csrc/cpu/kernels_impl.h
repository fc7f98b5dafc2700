// SPDX-License-Identifier: Apache-2.0
// The kernels, in the instruction set of the file that includes this. A row is computed in an
// order that depends on its size alone, so a row's result is the same in any batch, on any
// number of threads and at any address.
//
// What is computed in float32 is rounded where the reference in PyTorch rounds, which has a tensor
// of half precision there. So in half precision a result is the reference's, bit for bit, but
// where the sum of squares or the exponential differ in their last place.
#pragma once

#include "kernels.h"
#include "vec.h"

namespace {

using namespace vllm_fl;

template <class Activation, class T>
void gated(const Gated& a, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; row++) {
    const T* first = static_cast<const T*>(a.x) + a.rows.offset(row);
    const T* gate = a.gate_last ? first + a.width : first;
    const T* up = a.gate_last ? first : first + a.width;
    T* out = static_cast<T*>(a.out) + row * a.width;
    for_vectors(a.width, [&](int64_t i, auto count) {
      Floats value = rounded<T>(Activation::gate(load(gate + i, count)));
      store(out + i, value * load(up + i, count), count);
    });
  }
}

template <class T>
struct Plain {
  const T* x;

  template <class Count>
  Floats at(int64_t i, Count count) const {
    return load(x + i, count);
  }
};

template <class T>
struct Added {
  const T* x;
  const T* y;

  template <class Count>
  Floats at(int64_t i, Count count) const {
    return load(x + i, count) + load(y + i, count);
  }
};

template <class Source>
float sum_of_squares(const Source& source, int64_t n) {
  Floats sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int k = 0; k < 4; k++) {
      Floats v = source.at(i + k * kLanes, Full{});
      sums[k] += v * v;
    }
  }
  for_vectors(n - i, [&](int64_t j, auto count) {
    Floats v = source.at(i + j, count);
    sums[0] += v * v;
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class Source>
float inverse_root(const Source& source, int64_t averaged, float epsilon) {
  float mean = sum_of_squares(source, averaged) / static_cast<float>(averaged);
  return 1.0f / __builtin_sqrtf(mean + epsilon);
}

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};

// The scaled value times the weight. The product is one of the weight's dtype; with an offset
// (Gemma) it is one of float32.
template <class T, class W, class Count>
Floats weighted(Floats v, const W* weight, float offset, Count count) {
  Floats w = load(weight, count);
  if (offset != 0.0f) return v * (w + offset);
  v = rounded<W>(v) * w;
  return Same<T, W>::value ? v : rounded<W>(v);
}

template <class T, class W>
void norm(const Norm& a, int64_t begin, int64_t end) {
  const W* weight = static_cast<const W*>(a.weight);
  for (int64_t row = begin; row < end; row++) {
    const T* x = static_cast<const T*>(a.x) + a.x_rows.offset(row);
    T* out = static_cast<T*>(a.out) + a.out_rows.offset(row);
    if (a.residual == nullptr) {
      Plain<T> source{x};
      float scale = inverse_root(source, a.averaged, a.epsilon);
      for_vectors(a.hidden, [&](int64_t i, auto count) {
        Floats v = source.at(i, count) * scale;
        if (weight != nullptr) v = weighted<T>(v, weight + i, a.weight_offset, count);
        store(out + i, v, count);
      });
    } else {
      Added<T> source{x, static_cast<const T*>(a.residual) + a.residual_rows.offset(row)};
      T* total = static_cast<T*>(a.total) + a.total_rows.offset(row);
      float scale = inverse_root(source, a.averaged, a.epsilon);
      // The sum is taken again instead of kept; out and total may be x and the residual.
      for_vectors(a.hidden, [&](int64_t i, auto count) {
        Floats v = source.at(i, count);
        store(total + i, v, count);
        v *= scale;
        if (weight != nullptr) v = weighted<T>(v, weight + i, a.weight_offset, count);
        store(out + i, v, count);
      });
    }
  }
}

// All heads of a row at once, so that cosines and sines are read once.
template <class T, class C>
void turn_neox(T* row, int64_t heads, const Rotary& a, const C* cos, const C* sin) {
  for_vectors(a.half, [&](int64_t i, auto count) {
    Floats c = load(cos + i, count), s = load(sin + i, count);
    for (int64_t h = 0; h < heads; h++) {
      T* low = row + h * a.head_size + i;
      T* high = low + a.half;
      Floats x = load(low, count), y = load(high, count);
      store(low, x * c - y * s, count);
      store(high, y * c + x * s, count);
    }
  });
}

template <class T, class C>
void turn_gptj(T* row, int64_t heads, const Rotary& a, const C* cos, const C* sin) {
  for_vectors(2 * a.half, [&](int64_t i, auto count) {
    int64_t pair = i / 2, pairs = a.half - pair;
    if (pairs > kLanes / 2) pairs = kLanes / 2;
    Floats c = doubled(load(cos + pair, pairs));
    Floats s = alternating(doubled(load(sin + pair, pairs)));
    for (int64_t h = 0; h < heads; h++) {
      T* x = row + h * a.head_size + i;
      Floats v = load(x, count);
      store(x, v * c + swapped(v) * s, count);
    }
  });
}

template <class T, class C>
void rotary(const Rotary& a, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; token++) {
    const C* cos = static_cast<const C*>(a.cache) + a.positions[token] * a.cache_stride;
    const C* sin = cos + a.half;
    for (const Turned& side : a.turned) {
      if (side.data == nullptr) continue;
      for (int64_t r = 0; r < side.rows_per_token; r++) {
        T* row = static_cast<T*>(side.data) + side.rows.offset(token * side.rows_per_token + r);
        if (a.is_neox) {
          turn_neox(row, side.heads_per_row, a, cos, sin);
        } else {
          turn_gptj(row, side.heads_per_row, a, cos, sin);
        }
      }
    }
  }
}

// What `norm` and then `rotary` give: a normed value is rounded to T before it is rotated.
template <class T, class W, class C>
void norm_and_turn(T* head, float scale, const W* weight, const QkNormRope& a, const C* cos,
                   const C* sin) {
  Plain<T> source{head};
  auto normed = [&](int64_t i, auto count) {
    return rounded<T>(weighted<T>(source.at(i, count) * scale, weight + i, 0.0f, count));
  };
  const int64_t turned = 2 * a.half;
  if (a.is_neox) {
    for_vectors(a.half, [&](int64_t i, auto count) {
      Floats c = load(cos + i, count), s = load(sin + i, count);
      Floats x = normed(i, count), y = normed(i + a.half, count);
      store(head + i, x * c - y * s, count);
      store(head + i + a.half, y * c + x * s, count);
    });
  } else {
    for_vectors(turned, [&](int64_t i, auto count) {
      int64_t pair = i / 2, pairs = a.half - pair;
      if (pairs > kLanes / 2) pairs = kLanes / 2;
      Floats c = doubled(load(cos + pair, pairs));
      Floats s = alternating(doubled(load(sin + pair, pairs)));
      Floats v = normed(i, count);
      store(head + i, v * c + swapped(v) * s, count);
    });
  }
  for_vectors(a.head_dim - turned, [&](int64_t i, auto count) {
    store(head + turned + i, normed(turned + i, count), count);
  });
}

// The roots of some heads come first: each waits long for its sum, and so they wait together (12
// heads of 64 in bfloat16, 512 tokens: 118 us instead of 220).
constexpr int64_t kHeadsAtOnce = 32;

template <class T, class W>
void qk_norm_rope(const QkNormRope& a, int64_t begin, int64_t end) {
  float scales[kHeadsAtOnce];
  const int64_t heads = a.q_heads + a.k_heads;
  const W* q_weight = static_cast<const W*>(a.q_weight);
  const W* k_weight = static_cast<const W*>(a.k_weight);
  for (int64_t token = begin; token < end; token++) {
    const T* cos = static_cast<const T*>(a.cache) + a.positions[token] * a.cache_stride;
    const T* sin = cos + a.half;
    T* row = static_cast<T*>(a.qkv) + a.rows.offset(token);
    for (int64_t first = 0; first < heads; first += kHeadsAtOnce) {
      const int64_t last = first + kHeadsAtOnce < heads ? first + kHeadsAtOnce : heads;
      for (int64_t h = first; h < last; h++) {
        Plain<T> source{row + h * a.head_dim};
        scales[h - first] = inverse_root(source, a.head_dim, a.epsilon);
      }
      for (int64_t h = first; h < last; h++) {
        norm_and_turn(row + h * a.head_dim, scales[h - first],
                      h < a.q_heads ? q_weight : k_weight, a, cos, sin);
      }
    }
  }
}

}  // namespace

#define VLLM_FL_EACH(kernel, ...) \
  { kernel<__VA_ARGS__ float>, kernel<__VA_ARGS__ BFloat16>, kernel<__VA_ARGS__ Float16> }
#define VLLM_FL_EACH_PAIR(kernel)                                       \
  {                                                                     \
    VLLM_FL_EACH(kernel, float, ), VLLM_FL_EACH(kernel, BFloat16, ),    \
        VLLM_FL_EACH(kernel, Float16, )                                 \
  }
#define VLLM_FL_KERNELS(name)                                                       \
  {                                                                                 \
    name, VLLM_FL_EACH(gated, Silu, ), VLLM_FL_EACH(gated, GeluErf, ),              \
        VLLM_FL_EACH(gated, GeluTanh, ), VLLM_FL_EACH_PAIR(norm), VLLM_FL_EACH_PAIR(rotary), \
        {{qk_norm_rope<float, float>, qk_norm_rope<float, float>},                  \
         {qk_norm_rope<BFloat16, BFloat16>, qk_norm_rope<BFloat16, float>},         \
         {qk_norm_rope<Float16, Float16>, qk_norm_rope<Float16, float>}}            \
  }

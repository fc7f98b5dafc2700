// SPDX-License-Identifier: Apache-2.0
#include "bound.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>

#include "../ops.h"

namespace vllm_fl {
namespace {

using at::Tensor;
using Names = std::unordered_set<std::string>;
using Text = c10::string_view;
using MaybeTensor = std::optional<Tensor>;

// The bindings that are direct. A set is never changed, and never freed: a call may read it.
std::atomic<const Names*> direct_names{new Names()};

bool is_direct(Text binding) {
  const Names& names = *direct_names.load(std::memory_order_acquire);
  return names.find(std::string(binding.data(), binding.size())) != names.end();
}

Maybe borrowed(const MaybeTensor& t) { return t ? &*t : nullptr; }

// The operator in Python.
template <class Signature>
c10::TypedOperatorHandle<Signature> opaque(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor silu_and_mul_bound(const Tensor& x, Text binding) {
  if (is_direct(binding) && gated_refusal(x).empty()) return Tensor(gated(Activation::kSilu, x));
  static const auto other = opaque<Tensor(const Tensor&, Text)>("vllm_fl::silu_and_mul");
  return other.call(x, binding);
}

Tensor rms_norm_bound(const Tensor& x, const MaybeTensor& weight, double epsilon,
                      std::optional<int64_t> variance_size, Text binding) {
  if (is_direct(binding) && rms_norm_refusal(x, borrowed(weight), variance_size).empty()) {
    return Tensor(rms_norm(x, borrowed(weight), epsilon, variance_size, 0));
  }
  static const auto other = opaque<Tensor(const Tensor&, const MaybeTensor&, double,
                                          std::optional<int64_t>, Text)>("vllm_fl::rms_norm");
  return other.call(x, weight, epsilon, variance_size, binding);
}

void fused_add_rms_norm_bound(Tensor& x, Tensor& residual, const MaybeTensor& weight,
                              double epsilon, std::optional<int64_t> variance_size,
                              Text binding) {
  if (is_direct(binding) &&
      fused_add_rms_norm_refusal(x, residual, borrowed(weight), variance_size).empty()) {
    // Where it cannot write in place, nothing was written.
    if (fused_add_rms_norm(x, residual, borrowed(weight), epsilon, variance_size, 0)
            .first.is_same(x)) {
      return;
    }
  }
  static const auto other =
      opaque<void(Tensor&, Tensor&, const MaybeTensor&, double, std::optional<int64_t>, Text)>(
          "vllm_fl::fused_add_rms_norm_");
  other.call(x, residual, weight, epsilon, variance_size, binding);
}

}  // namespace

void set_direct(const std::string& binding, bool on) {
  static std::mutex changing;
  const std::lock_guard<std::mutex> lock(changing);
  const Names& before = *direct_names.load(std::memory_order_acquire);
  if ((before.count(binding) != 0) == on) return;
  Names* after = new Names(before);
  if (on) {
    after->insert(binding);
  } else {
    after->erase(binding);
  }
  direct_names.store(after, std::memory_order_release);
}

void define_bound(torch::Library& library) {
  const std::vector<at::Tag> tags{at::Tag::needs_fixed_stride_order, at::Tag::pt2_compliant_tag};
  library.def("silu_and_mul.bound(Tensor x, *, str binding) -> Tensor", tags);
  library.def(
      "rms_norm.bound(Tensor x, Tensor? weight, float epsilon, int? variance_size=None, *, "
      "str binding) -> Tensor",
      tags);
  library.def(
      "fused_add_rms_norm_.bound(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, "
      "float epsilon, int? variance_size=None, *, str binding) -> ()",
      tags);
}

void implement_bound(torch::Library& library) {
  library.impl("silu_and_mul.bound", silu_and_mul_bound);
  library.impl("rms_norm.bound", rms_norm_bound);
  library.impl("fused_add_rms_norm_.bound", fused_add_rms_norm_bound);
}

}  // namespace vllm_fl

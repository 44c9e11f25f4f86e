// What the operators of this library share: element types, gradients, threads, chunks of rows.
#pragma once

#include "memory.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace mindspeed {

using at::Tensor;

// fp32, bf16 and fp16: what the kernels take; everything else runs the reference.
inline bool vectorizable(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

// body(T()) for the type of a tensor that is vectorizable.
#define MINDSPEED_WITH_TYPE(TYPE, ...) \
  AT_DISPATCH_SWITCH( \
      TYPE, \
      "mindspeed", \
      AT_DISPATCH_CASE(at::kFloat, __VA_ARGS__) AT_DISPATCH_CASE(at::kBFloat16, __VA_ARGS__) \
          AT_DISPATCH_CASE(at::kHalf, __VA_ARGS__))

// Whether a call of an operator on these tensors has to be recorded.
template <class... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  const auto asks = [](const auto& tensor) {
    if constexpr (std::is_same_v<std::decay_t<decltype(tensor)>, Tensor>) {
      return tensor.defined() && tensor.requires_grad();
    } else {
      return tensor.has_value() && tensor->defined() && tensor->requires_grad();
    }
  };
  return at::GradMode::is_enabled() && (asks(tensors) || ...);
}

// Numbers that a thread is worth starting for.
constexpr int64_t GRAIN = 32768;

// body(begin, end) over [0, count) on torch's threads, where one item costs as much as `cost` numbers of a stream;
// what is too small for a second thread runs on the calling one.
template <class Body>
void parallel(int64_t count, int64_t cost, Body body) {
  at::parallel_for(0, count, std::max<int64_t>(1, GRAIN / std::max<int64_t>(cost, 1)), body);
}

// Rows cut into chunks for sums over rows: the cut depends on the shape alone, so that results do not depend on the
// number of threads.
struct Chunks {
  int64_t rows;
  int64_t count;
  int64_t begin(int64_t chunk) const { return chunk * rows / count; }
};

inline Chunks chunks_of(int64_t rows) {
  return {rows, std::min(rows, std::clamp<int64_t>(rows / 64, 16, 128))};
}

// Whether rows of results are stored past the caches: they are aligned, and would take half of the last cache.
inline bool streamed(const Tensor &result, int64_t width) {
  const int64_t row = width * static_cast<int64_t>(result.element_size());
  return static_cast<int64_t>(result.nbytes()) >= last_cache_bytes() / 2 && row % 64 == 0;
}

} // namespace mindspeed

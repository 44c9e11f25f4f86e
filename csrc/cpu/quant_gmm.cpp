// Grouped product of int8 matrices with exact integer sums; scale, bias and activation on the sums. See
// mindspeed/ops/quant_gmm.py.

#include "blocked_product.h"
#include "group_list.h"
#include "memory.h"
#include "operators.h"
#include "reference.h"
#include "rounded.h"
#include "vectors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#if !defined(__AVX512VNNI__)
#error "this source needs AVX-512 VNNI: mindspeed/ops/instruction_sets.yaml"
#endif

namespace mindspeed {
namespace {

using Optional = std::optional<Tensor>;
using QuantGmm = Tensor(const Tensor &, const Tensor &, const Tensor &, const Optional &, const Optional &,
                        const Tensor &, at::ScalarType, int64_t, bool);

const auto &quant_operator() {
  static const auto op = find_operator<QuantGmm>("mindspeed::quant_gmm");
  return op;
}

enum Activation : int64_t { none = 0, relu = 1, gelu_tanh = 2, fast_gelu = 4, silu = 5 };

Floats activated(Floats y, int64_t activation) {
  switch (activation) {
  case relu:
    return _mm512_max_ps(_mm512_setzero_ps(), y); // a NaN, being the second operand, stays
  case gelu_tanh: // 0.5 (1 + tanh(u)) is sigmoid(2 u)
    return y * sigmoid(y * Floats(1.5957691216f) * (Floats(1.0f) + Floats(0.044715f) * y * y));
  case fast_gelu:
    return y * sigmoid(Floats(1.702f) * y);
  case silu:
    return y * sigmoid(y);
  default:
    return y;
  }
}

// Sixteen sums with their bias, in fp32: rounded once, from the exact number.
__m512 biased(const uint32_t *sums, const int32_t *bias, __mmask16 mask) {
  const __m512i numbers = _mm512_load_si512(sums);
  if (bias == nullptr)
    return _mm512_cvtepi32_ps(numbers);
  const __m512i added = _mm512_maskz_loadu_epi32(mask, bias);
  const auto half = [](__m256i a, __m256i b) -> __m256 {
    return _mm512_cvtepi64_ps(_mm512_add_epi64(_mm512_cvtepi32_epi64(a), _mm512_cvtepi32_epi64(b)));
  };
  const __m256 low = half(_mm512_castsi512_si256(numbers), _mm512_castsi512_si256(added));
  const __m256 high = half(_mm512_extracti64x4_epi64(numbers, 1), _mm512_extracti64x4_epi64(added, 1));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}

// What becomes of the sums of a tile.
template <class T> struct Quantized {
  T *out;
  const float *scale;     // [experts, columns]
  const float *per_token; // [rows] or null
  const int32_t *bias;    // [experts, columns] or null
  const int64_t *starts;  // of each expert, a row
  int64_t columns, activation;

  static constexpr bool adds = false;
  void expect(int64_t, int64_t, int64_t, int64_t, int64_t) const {}

  void operator()(int64_t expert, int64_t row, int64_t column, int64_t rows, int64_t width,
                  const uint32_t *tile) const {
    for (int64_t c = 0; c < width; c += 16) {
      const __mmask16 mask = first16(width - c);
      const int64_t at = expert * columns + column + c;
      const __m512 factor = _mm512_maskz_loadu_ps(mask, scale + at);
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t to = starts[expert] + row + r;
        const __m512 sum = biased(tile + r * kTileColumns + c, bias == nullptr ? nullptr : bias + at, mask);
        __m512 y = _mm512_mul_ps(sum, factor);
        if (per_token != nullptr)
          y = _mm512_mul_ps(y, _mm512_set1_ps(per_token[to]));
        store(out + to * columns + column + c, activated(y, activation), mask);
      }
    }
  }
};

template <class T, class... Rest> void multiply_into(const Tensor &out, const std::vector<Product> &products, Rest... rest) {
  multiply_all<QuadDot, Quads<true>, Quads<false>>(products, Quantized<T>{out.mutable_data_ptr<T>(), rest...});
}

// Scales as fp32: an int64 one has the bits of an fp32 number in its lower half.
Tensor float_scale(const Tensor &scale) {
  if (scale.scalar_type() != at::kLong)
    return scale.to(at::kFloat).contiguous();
  return scale.contiguous().to(at::kInt).view(at::kFloat);
}

bool takes(const Tensor &x, const Tensor &weight, int64_t activation, at::ScalarType dtype) {
  constexpr int64_t longest = 131071; // products of two int8 whose sum an int32 always holds
  const bool known = activation == none || activation == relu || activation == gelu_tanh || activation == fast_gelu ||
                     activation == silu;
  const bool result = dtype == at::kChar || dtype == at::kBFloat16 || dtype == at::kHalf;
  return known && result && x.scalar_type() == at::kChar && weight.scalar_type() == at::kChar && x.size(1) <= longest;
}

Tensor quant_gmm(const Tensor &x, const Tensor &weight, const Tensor &scale, const Optional &per_token,
                 const Optional &bias, const Tensor &groups, at::ScalarType dtype, int64_t activation, bool cumulative) {
  const auto bounds = group_bounds(groups, x.size(0), cumulative);
  if (!bounds || !takes(x, weight, activation, dtype))
    return call_reference(quant_operator(), x, weight, scale, per_token, bias, groups, dtype, activation, cumulative);
  const int64_t experts = weight.size(0), columns = weight.size(2);
  const Tensor out = fresh({x.size(0), columns}, x.options().dtype(dtype));
  const Tensor scales = float_scale(scale), factors = per_token ? per_token->contiguous() : Tensor();
  const Tensor added = bias ? bias->contiguous() : Tensor();
  std::vector<Product> products;
  for (int64_t e = 0; e < experts; ++e)
    products.push_back({{x.const_data_ptr<int8_t>() + (*bounds)[e] * x.stride(0), x.stride(0), x.stride(1)},
                        {weight.const_data_ptr<int8_t>() + e * weight.stride(0), weight.stride(2), weight.stride(1)},
                        (*bounds)[e + 1] - (*bounds)[e], columns, x.size(1)});
  const auto multiply = [&](auto number) {
    multiply_into<decltype(number)>(out, products, scales.const_data_ptr<float>(),
                                    per_token ? factors.const_data_ptr<float>() : nullptr,
                                    bias ? added.const_data_ptr<int32_t>() : nullptr, bounds->data(), columns,
                                    activation);
  };
  if (dtype == at::kChar)
    multiply(int8_t());
  else if (dtype == at::kHalf)
    multiply(c10::Half());
  else
    multiply(c10::BFloat16());
  return out;
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("quant_gmm", quant_gmm); }

} // namespace
} // namespace mindspeed

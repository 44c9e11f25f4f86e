#include "grouped_product.h"

#include "blocked_product.h"

#include <c10/util/Exception.h>

#if MINDSPEED_AVX512
namespace mindspeed {
namespace {

// Rounded to nearest even; what is not a number stays so.
__m256i rounded(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 unordered = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(up, unordered, _mm512_set1_epi32(0x7FC00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
}

// Whole vectors are stored without a mask, which costs more than the store itself on some processors.
void store(float *to, __m512 values, __mmask16 mask) {
  if (mask == 0xFFFF)
    _mm512_storeu_ps(to, values);
  else
    _mm512_mask_storeu_ps(to, mask, values);
}

void store_halves(void *to, __m256i values, __mmask16 mask) {
  if (mask == 0xFFFF)
    _mm256_storeu_si256(static_cast<__m256i *>(to), values);
  else
    _mm256_mask_storeu_epi16(to, mask, values);
}

void store(c10::BFloat16 *to, __m512 values, __mmask16 mask) { store_halves(to, rounded(values), mask); }

void store(c10::Half *to, __m512 values, __mmask16 mask) {
  store_halves(to, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), mask);
}

// Ask for the memory of a part of a matrix before it is written.
template <class Number>
void expect_part(const Destination &to, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const char *at = reinterpret_cast<const char *>(static_cast<Number *>(to.data) + row * to.stride + column);
  for (int64_t r = 0; r < rows; ++r, at += to.stride * sizeof(Number))
    for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(Number)); byte += 64)
      __builtin_prefetch(at + byte, 1);
}

template <class Number> struct Store {
  const Destination *destinations;
  void expect(int64_t product, int64_t row, int64_t column, int64_t rows, int64_t columns) const {
    expect_part<Number>(destinations[product], row, column, rows, columns);
  }
  void operator()(int64_t product, int64_t row, int64_t column, int64_t rows, int64_t columns,
                  const uint32_t *tile) const {
    const Destination &to = destinations[product];
    Number *at = static_cast<Number *>(to.data) + row * to.stride + column;
    for (int64_t c = 0; c < columns; c += 16) {
      const __mmask16 mask = first16(columns - c);
      const __m512 bias = to.bias == nullptr ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, to.bias + column + c);
      for (int64_t r = 0; r < rows; ++r)
        store(at + r * to.stride + c, _mm512_add_ps(_mm512_load_ps(tile + r * kTileColumns + c), bias), mask);
    }
  }
};

struct Add {
  const Destination *destinations;
  void expect(int64_t product, int64_t row, int64_t column, int64_t rows, int64_t columns) const {
    expect_part<float>(destinations[product], row, column, rows, columns);
  }
  void operator()(int64_t product, int64_t row, int64_t column, int64_t rows, int64_t columns,
                  const uint32_t *tile) const {
    const Destination &to = destinations[product];
    float *at = static_cast<float *>(to.data) + row * to.stride + column;
    for (int64_t c = 0; c < columns; c += 16) {
      const __mmask16 mask = first16(columns - c);
      for (int64_t r = 0; r < rows; ++r) {
        float *there = at + r * to.stride + c;
        const __m512 sum = _mm512_load_ps(tile + r * kTileColumns + c);
        store(there, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, there), sum), mask);
      }
    }
  }
};

template <class Number, class Finish> void multiply_as_floats(const std::vector<Product> &products, Finish finish) {
  multiply_all<SingleDot, Numbers<Number>, Numbers<Number>>(products, finish);
}

template <class Finish> void multiply_pairs(const std::vector<Product> &products, Finish finish) {
#if defined(__AVX512BF16__)
  multiply_all<PairDot, Pairs, Pairs>(products, finish);
#else
  multiply_as_floats<c10::BFloat16>(products, finish);
#endif
}

} // namespace

bool multiplies(at::ScalarType type) {
  return type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
}

void multiply_and_store(at::ScalarType type, const std::vector<Product> &products, const std::vector<Destination> &to) {
  if (type == at::kBFloat16)
    multiply_pairs(products, Store<c10::BFloat16>{to.data()});
  else if (type == at::kHalf)
    multiply_as_floats<c10::Half>(products, Store<c10::Half>{to.data()});
  else
    multiply_as_floats<float>(products, Store<float>{to.data()});
}

void multiply_and_add(at::ScalarType type, const std::vector<Product> &products, const std::vector<Destination> &to) {
  if (type == at::kBFloat16)
    multiply_pairs(products, Add{to.data()});
  else if (type == at::kHalf)
    multiply_as_floats<c10::Half>(products, Add{to.data()});
  else
    multiply_as_floats<float>(products, Add{to.data()});
}

} // namespace mindspeed
#else
namespace mindspeed {

bool multiplies(at::ScalarType) { return false; }

void multiply_and_store(at::ScalarType type, const std::vector<Product> &, const std::vector<Destination> &) {
  TORCH_CHECK(false, "no product of ", type, " on this processor");
}

void multiply_and_add(at::ScalarType type, const std::vector<Product> &, const std::vector<Destination> &) {
  TORCH_CHECK(false, "no product of ", type, " on this processor");
}

} // namespace mindspeed
#endif

#include "grouped_product.h"

#include "blocked_product.h"
#include "rounded.h"

#include <ATen/core/Tensor.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/from_blob.h>
#include <torch/library.h>

#include <set>
#include <string>
#include <tuple>

namespace mindspeed {
namespace {

// Ask for the memory of a part of a matrix before it is written.
template <class Number>
void expect_part(const Destination &to, int64_t row, int64_t column, int64_t rows, int64_t columns) {
  const char *at = reinterpret_cast<const char *>(static_cast<Number *>(to.data) + row * to.stride + column);
  for (int64_t r = 0; r < rows; ++r, at += to.stride * sizeof(Number))
    for (int64_t byte = 0; byte < columns * static_cast<int64_t>(sizeof(Number)); byte += 64)
      __builtin_prefetch(at + byte, 1);
}

template <class Number> struct Store {
  static constexpr bool adds = false;
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
  static constexpr bool adds = true;
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

// The most multiplications of a small product, for which the costs of a call count.
constexpr int64_t kSmall = int64_t{1} << 24;

std::set<std::tuple<std::string, at::ScalarType, bool>> of_library;

void choose_library(std::string op, at::ScalarType type, bool small, bool chosen) {
  if (chosen)
    of_library.insert({op, type, small});
  else
    of_library.erase({op, type, small});
}

TORCH_LIBRARY(mindspeed_kernels, m) {
  m.def("choose_library(str op, ScalarType type, bool small, bool chosen) -> ()", choose_library);
}

at::Tensor matrix(const Operand &x, int64_t outer, int64_t inner, at::ScalarType type) {
  return at::from_blob(const_cast<void *>(x.data), {outer, inner}, {x.outer_stride, x.inner_stride}, type);
}

// Half-precision numbers are multiplied as they are and summed in fp32, for which the library wants rows of neighbours.
template <class Number> void add_wide(const at::Tensor &a, const at::Tensor &b, float *to, int64_t stride) {
  const at::Tensor left = a.contiguous(), right = b.contiguous();
  at::native::cpublas::brgemm(a.size(0), b.size(1), a.size(1), left.stride(0), right.stride(0), stride, true,
                              left.const_data_ptr<Number>(), right.const_data_ptr<Number>(), to, false);
}

} // namespace

bool left_to_library(const char *op, at::ScalarType type, int64_t multiplications, int64_t products) {
  return !of_library.empty() && of_library.count({op, type, multiplications <= kSmall * products}) != 0;
}

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

void add_products_of_library(at::ScalarType type, const std::vector<Product> &products,
                             const std::vector<Destination> &to) {
  for (size_t i = 0; i < products.size(); ++i) {
    const Product &product = products[i];
    const at::Tensor a = matrix(product.a, product.rows, product.inner, type);
    const at::Tensor b = matrix(product.b, product.columns, product.inner, type).t();
    float *sum = static_cast<float *>(to[i].data);
    if (type == at::kBFloat16)
      add_wide<c10::BFloat16>(a, b, sum, to[i].stride);
    else if (type == at::kHalf)
      add_wide<c10::Half>(a, b, sum, to[i].stride);
    else
      at::from_blob(sum, {product.rows, product.columns}, {to[i].stride, 1}, at::kFloat).addmm_(a, b);
  }
}

} // namespace mindspeed

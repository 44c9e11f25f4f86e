// Products of many small matrices of floating-point numbers on all threads, summed in fp32 and rounded once.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace mindspeed {

// A matrix of a product: element (outer, inner) is at data[outer * outer_stride + inner * inner_stride], the product
// summing over the inner one.
struct Operand {
  const void *data;
  int64_t outer_stride;
  int64_t inner_stride;
};

// C [rows, columns] is the product of A and B, which share `inner` numbers.
struct Product {
  Operand a, b;
  int64_t rows, columns, inner;
};

// Where C goes: its rows lie `stride` numbers apart, its columns are neighbours. `bias` [columns], if any, is added.
struct Destination {
  void *data;
  int64_t stride;
  const float *bias;
};

// Whether `multiply` takes matrices of this type on this processor.
bool multiplies(at::ScalarType type);

// Whether an operator leaves products of this type to the library of torch, which was measured to be faster on this
// processor for small products or for large ones. It is told when the operators are loaded. `multiplications` are those
// of all `products` together.
bool left_to_library(const char *op, at::ScalarType type, int64_t multiplications, int64_t products);

// Store every product, of matrices of `type`, as numbers of that type; or add it to a C of fp32 numbers.
void multiply_and_store(at::ScalarType type, const std::vector<Product> &products, const std::vector<Destination> &to);
void multiply_and_add(at::ScalarType type, const std::vector<Product> &products, const std::vector<Destination> &to);

// Add every product as `multiply_and_add` does, computed by the library of torch.
void add_products_of_library(at::ScalarType type, const std::vector<Product> &products,
                             const std::vector<Destination> &to);

} // namespace mindspeed

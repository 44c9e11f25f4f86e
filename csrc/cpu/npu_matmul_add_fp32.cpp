// Weight gradient of a linear layer added in place: grad += grad_output^T total_input, summed and kept in fp32. See
// mindspeed/ops/npu_matmul_add_fp32.py.

#include "grouped_product.h"
#include "operators.h"
#include "reference.h"

#include <torch/library.h>

#include <utility>

namespace mindspeed {
namespace {

using Add = void(const Tensor &, const Tensor &, Tensor &);

const auto &add_operator() {
  static const auto op = find_operator<Add>("mindspeed::npu_matmul_add_fp32");
  return op;
}

void add(const Tensor &total_input, const Tensor &grad_output, Tensor &grad) {
  const bool taken = multiplies(total_input.scalar_type()) && grad_output.scalar_type() == total_input.scalar_type() &&
                     grad.scalar_type() == at::kFloat && (grad.stride(1) == 1 || grad.stride(0) == 1);
  if (!taken) {
    call_reference(add_operator(), total_input, grad_output, grad);
    return;
  }
  Product product{{grad_output.const_data_ptr(), grad_output.stride(1), grad_output.stride(0)},
                  {total_input.const_data_ptr(), total_input.stride(1), total_input.stride(0)},
                  grad.size(0), grad.size(1), total_input.size(0)};
  Destination to{grad.mutable_data_ptr(), grad.stride(0), nullptr};
  if (grad.stride(1) != 1) { // the transposed product into the transposed buffer
    std::swap(product.a, product.b);
    std::swap(product.rows, product.columns);
    to.stride = grad.stride(1);
  }
  const int64_t multiplications = product.rows * product.columns * product.inner;
  if (multiplications == 0)
    return;
  const bool of_library = left_to_library("npu_matmul_add_fp32", total_input.scalar_type(), multiplications, 1);
  (of_library ? add_products_of_library : multiply_and_add)(total_input.scalar_type(), {product}, {to});
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("npu_matmul_add_fp32", add); }

} // namespace
} // namespace mindspeed

// Weight gradient of every group added in place: grad[e] += x_e^T dy_e, summed and kept in fp32. See
// mindspeed/ops/npu_groupmatmul_add_fp32.py.

#include "group_list.h"
#include "grouped_product.h"
#include "operators.h"
#include "reference.h"

#include <torch/library.h>

namespace mindspeed {
namespace {

using Add = void(const Tensor &, const Tensor &, const Tensor &, Tensor &);

const auto &add_operator() {
  static const auto op = find_operator<Add>("mindspeed::npu_groupmatmul_add_fp32");
  return op;
}

Operand transposed(const Tensor &x, int64_t row) {
  const char *data = static_cast<const char *>(x.const_data_ptr()) + row * x.stride(0) * x.element_size();
  return {data, x.stride(1), x.stride(0)};
}

void add(const Tensor &x, const Tensor &dy, const Tensor &groups, Tensor &grad) {
  const auto bounds = group_bounds(groups, x.size(0), true);
  const bool taken = multiplies(x.scalar_type()) && dy.scalar_type() == x.scalar_type() &&
                     grad.scalar_type() == at::kFloat && grad.is_contiguous();
  if (!bounds || !taken) {
    call_reference(add_operator(), x, dy, groups, grad);
    return;
  }
  const int64_t rows = x.size(1), columns = dy.size(1);
  std::vector<Product> products;
  std::vector<Destination> destinations;
  for (int64_t e = 0; e < groups.size(0); ++e) {
    const int64_t start = (*bounds)[e], inner = (*bounds)[e + 1] - start;
    if (rows * columns * inner == 0)
      continue;
    products.push_back({transposed(x, start), transposed(dy, start), rows, columns, inner});
    destinations.push_back({grad.mutable_data_ptr<float>() + e * rows * columns, columns, nullptr});
  }
  const bool of_library = left_to_library("npu_groupmatmul_add_fp32", x.scalar_type(), x.size(0) * rows * columns,
                                          groups.size(0));
  (of_library ? add_products_of_library : multiply_and_add)(x.scalar_type(), products, destinations);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("npu_groupmatmul_add_fp32", add); }

} // namespace
} // namespace mindspeed

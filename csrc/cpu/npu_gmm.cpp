// Grouped matrix product of mindspeed/ops/npu_gmm.py: forward, both gradients, the sum of rows for that of the bias.

#include "group_list.h"
#include "grouped_product.h"
#include "memory.h"
#include "operators.h"
#include "reference.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Gmm = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &, const Tensor &, bool);
using GmmSum = Tensor(const Tensor &, const Tensor &, const Tensor &, bool);
using GmmBias = Tensor(const Tensor &, const Tensor &, bool);

const auto &gmm_operator() {
  static const auto op = find_operator<Gmm>("mindspeed::npu_gmm");
  return op;
}

const auto &sum_operator() {
  static const auto op = find_operator<GmmSum>("mindspeed::npu_gmm_sum");
  return op;
}

const auto &bias_operator() {
  static const auto op = find_operator<GmmBias>("mindspeed::npu_gmm_bias");
  return op;
}

const char *at_row(const Tensor &x, int64_t row) {
  return static_cast<const char *>(x.const_data_ptr()) + row * x.stride(0) * x.element_size();
}

Tensor gmm(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Tensor &groups,
           bool cumulative) {
  const auto bounds = group_bounds(groups, x.size(0), cumulative);
  const bool taken = multiplies(x.scalar_type()) && weight.scalar_type() == x.scalar_type() &&
                     !(bias && bias->scalar_type() == at::kDouble);
  if (!bounds || !taken)
    return call_reference(gmm_operator(), x, weight, bias, groups, cumulative);
  const int64_t experts = weight.size(0), columns = weight.size(2);
  Tensor y = fresh({x.size(0), columns}, x.options());
  if (!bias && left_to_library("npu_gmm", x.scalar_type(), x.numel() * columns, experts)) {
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t start = (*bounds)[e], rows = (*bounds)[e + 1] - start;
      Tensor part = y.narrow(0, start, rows);
      at::mm_out(part, x.narrow(0, start, rows), weight[e]);
    }
    return y;
  }
  const Tensor added = bias ? bias->to(at::kFloat).contiguous() : Tensor();
  std::vector<Product> products(experts);
  std::vector<Destination> destinations(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = (*bounds)[e];
    products[e] = {{at_row(x, start), x.stride(0), x.stride(1)},
                   {at_row(weight, e), weight.stride(2), weight.stride(1)},
                   (*bounds)[e + 1] - start, columns, x.size(1)};
    destinations[e] = {static_cast<char *>(y.mutable_data_ptr()) + start * columns * y.element_size(), columns,
                       bias ? added.const_data_ptr<float>() + e * columns : nullptr};
  }
  multiply_and_store(x.scalar_type(), products, destinations);
  return y;
}

Tensor gmm_sum(const Tensor &x, const Tensor &dy, const Tensor &groups, bool cumulative) {
  const auto bounds = group_bounds(groups, x.size(0), cumulative);
  if (!bounds || !multiplies(x.scalar_type()) || dy.scalar_type() != x.scalar_type())
    return call_reference(sum_operator(), x, dy, groups, cumulative);
  const int64_t experts = groups.size(0), rows = x.size(1), columns = dy.size(1);
  const Tensor out = fresh({experts, rows, columns}, x.options());
  if (left_to_library("npu_gmm", x.scalar_type(), x.numel() * columns, experts)) {
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t start = (*bounds)[e], inner = (*bounds)[e + 1] - start;
      Tensor part = out[e];
      at::mm_out(part, x.narrow(0, start, inner).t(), dy.narrow(0, start, inner));
    }
    return out;
  }
  std::vector<Product> products(experts);
  std::vector<Destination> destinations(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = (*bounds)[e];
    products[e] = {{at_row(x, start), x.stride(1), x.stride(0)},
                   {at_row(dy, start), dy.stride(1), dy.stride(0)},
                   rows, columns, (*bounds)[e + 1] - start};
    destinations[e] = {static_cast<char *>(out.mutable_data_ptr()) + e * rows * columns * out.element_size(), columns,
                       nullptr};
  }
  multiply_and_store(x.scalar_type(), products, destinations);
  return out;
}

// A row of ones times the rows of each group.
Tensor gmm_bias(const Tensor &dy, const Tensor &groups, bool cumulative) {
  const auto bounds = group_bounds(groups, dy.size(0), cumulative);
  if (!bounds || !multiplies(dy.scalar_type()))
    return call_reference(bias_operator(), dy, groups, cumulative);
  const int64_t experts = groups.size(0), columns = dy.size(1);
  const Tensor one = at::ones({}, dy.options());
  const Tensor out = at::zeros({experts, columns}, dy.options().dtype(at::kFloat));
  std::vector<Product> products(experts);
  std::vector<Destination> destinations(experts);
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t start = (*bounds)[e];
    products[e] = {{one.const_data_ptr(), 0, 0},
                   {at_row(dy, start), dy.stride(1), dy.stride(0)},
                   1, columns, (*bounds)[e + 1] - start};
    destinations[e] = {out.mutable_data_ptr<float>() + e * columns, columns, nullptr};
  }
  multiply_and_add(dy.scalar_type(), products, destinations);
  return out;
}

struct GmmFunction : torch::autograd::Function<GmmFunction> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias,
                        const Tensor &groups, bool cumulative) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["cumulative"] = cumulative;
    if (bias)
      ctx->saved_data["bias"] = bias->scalar_type();
    ctx->save_for_backward({x, weight, groups});
    return gmm_operator().call(x, weight, bias, groups, cumulative);
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dy = grads[0], &x = saved[0], &weight = saved[1], &groups = saved[2];
    const bool cumulative = ctx->saved_data["cumulative"].toBool();
    Tensor dx, dweight, dbias;
    if (ctx->needs_input_grad(0))
      dx = gmm_operator().call(dy, weight.transpose(1, 2), std::nullopt, groups, cumulative);
    if (ctx->needs_input_grad(1))
      dweight = sum_operator().call(x, dy, groups, cumulative);
    if (ctx->saved_data.count("bias") && ctx->needs_input_grad(2))
      dbias = bias_operator().call(dy, groups, cumulative).to(ctx->saved_data["bias"].toScalarType());
    return {dx, dweight, dbias, Tensor(), Tensor()};
  }
};

struct SumFunction : torch::autograd::Function<SumFunction> {
  static Tensor forward(AutogradContext *ctx, const Tensor &x, const Tensor &dy, const Tensor &groups,
                        bool cumulative) {
    const at::AutoDispatchBelowADInplaceOrView below;
    ctx->saved_data["cumulative"] = cumulative;
    ctx->save_for_backward({x, dy, groups});
    return sum_operator().call(x, dy, groups, cumulative);
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &dout = grads[0], &x = saved[0], &dy = saved[1], &groups = saved[2];
    const bool cumulative = ctx->saved_data["cumulative"].toBool();
    Tensor dx, ddy;
    if (ctx->needs_input_grad(0))
      dx = gmm_operator().call(dy, dout.transpose(1, 2), std::nullopt, groups, cumulative);
    if (ctx->needs_input_grad(1))
      ddy = gmm_operator().call(x, dout, std::nullopt, groups, cumulative);
    return {dx, ddy, Tensor(), Tensor()};
  }
};

Tensor gmm_recorded(const Tensor &x, const Tensor &weight, const std::optional<Tensor> &bias, const Tensor &groups,
                    bool cumulative) {
  if (needs_gradient(x, weight, bias))
    return GmmFunction::apply(x, weight, bias, groups, cumulative);
  const at::AutoDispatchBelowADInplaceOrView below;
  return gmm_operator().call(x, weight, bias, groups, cumulative);
}

Tensor sum_recorded(const Tensor &x, const Tensor &dy, const Tensor &groups, bool cumulative) {
  if (needs_gradient(x, dy))
    return SumFunction::apply(x, dy, groups, cumulative);
  const at::AutoDispatchBelowADInplaceOrView below;
  return sum_operator().call(x, dy, groups, cumulative);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("npu_gmm", gmm);
  m.impl("npu_gmm_sum", gmm_sum);
  m.impl("npu_gmm_bias", gmm_bias);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, m) {
  m.impl("npu_gmm", gmm_recorded);
  m.impl("npu_gmm_sum", sum_recorded);
}

} // namespace
} // namespace mindspeed

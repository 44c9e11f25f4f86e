// Dropout, residual and LayerNorm or RMSNorm in one pass: z = x0 rowscale layerscale mask kept + residual and a norm of
// z; fp32 between the inputs and the results, each rounded once.
#include "memory.h"
#include "operators.h"
#include "pairs.h"
#include "reference.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <vector>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Maybe = std::optional<Tensor>;
using Four = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Six = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using Forward = Four(const Tensor &, const Maybe &, const Tensor &, const Maybe &, const Maybe &, const Maybe &,
                     const Maybe &, double, double, at::ScalarType, bool);
using Backward = Six(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                     const Maybe &, const Maybe &, const Maybe &, const Maybe &, double, bool);

const auto &forward_op() {
  static const auto op = find_operator<Forward>("mindspeed::npu_dropout_add_layer_norm");
  return op;
}

const auto &backward_op() {
  static const auto op = find_operator<Backward>("mindspeed::npu_dropout_add_layer_norm_backward");
  return op;
}

// z has the type of x0 or fp32; small operands may have any type that fp32 holds.
bool takes(const Tensor &x, at::ScalarType z, std::initializer_list<const Maybe *> small) {
  const bool all = std::all_of(small.begin(), small.end(), [](const Maybe *tensor) {
    return !tensor->has_value() || vectorizable((*tensor)->scalar_type());
  });
  return all && vectorizable(x.scalar_type()) && (z == x.scalar_type() || z == at::kFloat) && x.numel() > 0;
}

// A vector over the columns as fp32 in the order of pairs of T; empty without one.
template <class T> std::vector<float> columns(const Maybe &tensor) {
  if (!tensor.has_value())
    return {};
  const Tensor wide = tensor->to(at::kFloat).contiguous();
  std::vector<float> values(padded(wide.numel()));
  const float *from = wide.const_data_ptr<float>();
  each_pair(0, wide.numel(), [&](int64_t i, auto extent) { store_raw(values.data() + i, load_as<T>(from + i, extent)); });
  return values;
}

Tensor wide_rows(const Maybe &rowscale) {
  return rowscale.has_value() ? rowscale->to(at::kFloat).contiguous() : Tensor();
}

// What x0 is multiplied by.
struct Scales {
  const float *rows, *columns;
  const uint8_t *mask;
  float kept;
};

Scales scales_of(const Tensor &rowscale, const std::vector<float> &layerscale, const Tensor &mask, double p) {
  return {rowscale.defined() ? rowscale.const_data_ptr<float>() : nullptr,
          layerscale.empty() ? nullptr : layerscale.data(),
          mask.defined() ? mask.const_data_ptr<uint8_t>() : nullptr, p < 1 ? static_cast<float>(1 / (1 - p)) : 0.0f};
}

template <class T, class Extent>
Pair scaled(Pair values, const Scales &scales, int64_t row, int64_t i, int64_t width, Extent extent) {
  if (scales.rows)
    values = values * Pair(scales.rows[row]);
  if (scales.columns)
    values = values * load_raw(scales.columns + i);
  if (scales.mask)
    values = values * (load_bytes<T>(scales.mask + row * width + i, extent) * Pair(scales.kept));
  return values;
}

Tensor contiguous(const Maybe &tensor) { return tensor.has_value() ? tensor->contiguous() : Tensor(); }

// ---- forward ----

template <class T, class Z> struct ForwardRows {
  const T *x0;
  const Z *residual;
  const float *weight, *bias;
  Scales scales;
  T *out;
  Z *z;
  float *mean, *rstd;
  int64_t width;
  double epsilon;
  bool rms;
};

template <class T, class Z> void forward_row(const ForwardRows<T, Z> &rows, int64_t row, float *sum) {
  const int64_t width = rows.width, start = row * width;
  const bool rms = rows.rms;
  auto [total] = pair_sums<1>(width, [&](auto &totals, int64_t i, auto extent) {
    Pair z = scaled<T>(load_pair(rows.x0 + start + i, extent), rows.scales, row, i, width, extent);
    if (rows.residual)
      z = z + load_as<T>(rows.residual + start + i, extent);
    store_raw(sum + i, z);
    store_as<T>(rows.z + start + i, z, extent);
    totals[0] = rms ? fmadd(z, z, totals[0]) : totals[0] + z;
  });
  const float mean = rms ? 0.0f : static_cast<float>(total / width);
  const Pair centre(mean);
  if (!rms)
    total = pair_sums<1>(width, [&](auto &totals, int64_t i, auto extent) {
      const Pair centred = covered<T>(load_raw(sum + i) - centre, extent);
      totals[0] = fmadd(centred, centred, totals[0]);
    })[0];
  rows.mean[row] = mean;
  rows.rstd[row] = static_cast<float>(1.0 / std::sqrt(total / width + rows.epsilon));
  const Pair scale(rows.rstd[row]);
  each_pair(0, width, [&](int64_t i, auto extent) {
    Pair out = (load_raw(sum + i) - centre) * scale * load_raw(rows.weight + i);
    if (rows.bias)
      out = out + load_raw(rows.bias + i);
    store_pair(rows.out + start + i, out, extent);
  });
}

template <class T, class Z>
Four forward_typed(const Tensor &x0_, const Maybe &residual_, const Tensor &weight_, const Maybe &bias_,
                   const Maybe &rowscale_, const Maybe &layerscale_, const Maybe &mask_, double p, double epsilon,
                   bool rms) {
  const Tensor x0 = x0_.contiguous(), residual = contiguous(residual_), mask = contiguous(mask_),
               rowscale = wide_rows(rowscale_);
  const auto weight = columns<T>(weight_), bias = columns<T>(bias_), layerscale = columns<T>(layerscale_);
  auto shape = x0.sizes().vec();
  Tensor out = fresh(shape, x0.options()), z = fresh(shape, x0.options().dtype(c10::CppTypeToScalarType<Z>()));
  shape.back() = 1;
  Tensor mean = at::empty(shape, x0.options().dtype(at::kFloat)), rstd = at::empty(shape, mean.options());
  const ForwardRows<T, Z> rows{x0.const_data_ptr<T>(), residual.defined() ? residual.const_data_ptr<Z>() : nullptr,
                               weight.data(), bias.empty() ? nullptr : bias.data(),
                               scales_of(rowscale, layerscale, mask, p), out.mutable_data_ptr<T>(),
                               z.mutable_data_ptr<Z>(), mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                               x0.size(-1), epsilon, rms};
  parallel(rstd.numel(), rows.width, [&](int64_t begin, int64_t end) {
    std::vector<float> sum(padded(rows.width));
    for (int64_t row = begin; row < end; ++row)
      forward_row(rows, row, sum.data());
  });
  return {out, z, mean, rstd};
}

Four forward(const Tensor &x0, const Maybe &residual, const Tensor &weight, const Maybe &bias, const Maybe &rowscale,
             const Maybe &layerscale, const Maybe &mask, double p, double epsilon, at::ScalarType residual_dtype,
             bool rms) {
  const Maybe weights(weight);
  const bool same = !residual.has_value() || residual->scalar_type() == residual_dtype;
  if (!same || !takes(x0, residual_dtype, {&weights, &bias, &rowscale, &layerscale}))
    return call_reference(forward_op(), x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon,
                          residual_dtype, rms);
  return MINDSPEED_WITH_TYPE(x0.scalar_type(), [&] {
    const auto typed = residual_dtype == x0.scalar_type() ? forward_typed<scalar_t, scalar_t> : forward_typed<scalar_t, float>;
    return typed(x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon, rms);
  });
}

// ---- backward ----

template <class T, class Z> struct BackwardRows {
  const T *dout;
  const Z *dz, *z;
  const float *weight, *mean, *rstd;
  Scales scales;
  T *dx0;
  Z *dresidual;
  int64_t width;
  bool rms;
};

// COUNT rows from `first`: their two gradients, and what they add to those of weight and bias.
template <int COUNT, class T, class Z>
void backward_rows(const BackwardRows<T, Z> &rows, int64_t first, float *dweight, float *dbias) {
  const int64_t width = rows.width, start = first * width;
  const T *dout = rows.dout + start;
  const Z *z = rows.z + start, *dz = rows.dz ? rows.dz + start : nullptr;
  std::array<Pair, COUNT> mean, rstd, pull, centre;
  for (int row = 0; row < COUNT; ++row) {
    mean[row] = Pair(rows.mean[first + row]);
    rstd[row] = Pair(rows.rstd[first + row]);
  }
  const auto normalized = [&](int row, int64_t i, auto extent) {
    return (load_as<T>(z + row * width + i, extent) - mean[row]) * rstd[row];
  };
  for (int row = 0; row < COUNT; ++row) {
    const auto [dot, total] = pair_sums<2>(width, [&](auto &totals, int64_t i, auto extent) {
      const Pair g = load_pair(dout + row * width + i, extent) * load_raw(rows.weight + i);
      totals[0] = fmadd(g, normalized(row, i, extent), totals[0]);
      totals[1] = totals[1] + g;
    });
    pull[row] = Pair(static_cast<float>(dot / width));
    centre[row] = Pair(rows.rms ? 0.0f : static_cast<float>(total / width));
  }
  each_pair(0, width, [&](int64_t i, auto extent) {
    const Pair weight = load_raw(rows.weight + i);
    Pair of_weight = load_raw(dweight + i), of_bias = load_raw(dbias + i);
    for (int row = 0; row < COUNT; ++row) {
      const int64_t at = row * width + i;
      const Pair given = load_pair(dout + at, extent), n = normalized(row, i, extent);
      of_weight = fmadd(given, n, of_weight);
      of_bias = of_bias + given;
      Pair gradient = rstd[row] * (given * weight - centre[row] - n * pull[row]);
      if (dz)
        gradient = gradient + load_as<T>(dz + at, extent);
      store_as<T>(rows.dresidual + start + at, gradient, extent);
      store_pair(rows.dx0 + start + at, scaled<T>(gradient, rows.scales, first + row, i, width, extent), extent);
    }
    store_raw(dweight + i, of_weight);
    store_raw(dbias + i, of_bias);
  });
}

template <class T, class Z>
void backward_chunk(const BackwardRows<T, Z> &rows, int64_t begin, int64_t end, float *dweight, float *dbias) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4)
    backward_rows<4>(rows, row, dweight, dbias);
  for (; row < end; ++row)
    backward_rows<1>(rows, row, dweight, dbias);
}

// A gradient that nothing contributed to is one zero, seen everywhere.
bool is_zero(const Tensor &gradient) {
  const auto strides = gradient.strides();
  const bool one = std::all_of(strides.begin(), strides.end(), [](int64_t stride) { return stride == 0; });
  return one && gradient.flatten()[0].item<float>() == 0.0f;
}

template <class T, class Z>
Six backward_typed(const Tensor &dout_, const Tensor &dz_, const Tensor &z_, const Tensor &weight_, const Tensor &mean_,
                   const Tensor &rstd_, const Maybe &rowscale_, const Maybe &layerscale_, const Maybe &mask_, double p,
                   bool rms) {
  const Tensor dout = dout_.contiguous(), z = z_.contiguous(), mean = mean_.contiguous(), rstd = rstd_.contiguous(),
               mask = contiguous(mask_), rowscale = wide_rows(rowscale_);
  const Tensor dz = is_zero(dz_) ? Tensor() : dz_.contiguous();
  const auto weight = columns<T>(weight_), layerscale = columns<T>(layerscale_);
  Tensor dx0 = fresh(dout.sizes(), dout.options()), dresidual = fresh(z.sizes(), z.options());
  Tensor dweight = at::empty(weight_.sizes(), weight_.options()), dbias = at::empty(weight_.sizes(), weight_.options());
  const BackwardRows<T, Z> rows{dout.const_data_ptr<T>(), dz.defined() ? dz.const_data_ptr<Z>() : nullptr,
                                z.const_data_ptr<Z>(), weight.data(), mean.const_data_ptr<float>(),
                                rstd.const_data_ptr<float>(), scales_of(rowscale, layerscale, mask, p),
                                dx0.mutable_data_ptr<T>(), dresidual.mutable_data_ptr<Z>(), z.size(-1), rms};
  const Chunks chunks = chunks_of(rstd.numel());
  const int64_t row_length = padded(rows.width);
  std::vector<float> of_weight(chunks.count * row_length), of_bias(chunks.count * row_length);
  parallel(chunks.count, chunks.rows * rows.width / chunks.count, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      backward_chunk(rows, chunks.begin(chunk), chunks.begin(chunk + 1), of_weight.data() + chunk * row_length,
                     of_bias.data() + chunk * row_length);
  });
  MINDSPEED_WITH_TYPE(weight_.scalar_type(), [&] {
    add_pair_chunks<T>(of_weight.data(), chunks.count, rows.width, dweight.mutable_data_ptr<scalar_t>());
    add_pair_chunks<T>(of_bias.data(), chunks.count, rows.width, dbias.mutable_data_ptr<scalar_t>());
  });
  return {dx0, dresidual, dweight, dbias, at::empty({0}, dout.options()), at::empty({0}, dout.options())};
}

Six backward(const Tensor &dout, const Tensor &dz, const Tensor &z, const Tensor &weight, const Tensor &mean,
             const Tensor &rstd, const Maybe &x0, const Maybe &rowscale, const Maybe &layerscale, const Maybe &mask,
             double p, bool rms) {
  const Maybe weights(weight);
  const bool plain = !x0.has_value() && dz.scalar_type() == z.scalar_type() && mean.scalar_type() == at::kFloat;
  if (!plain || !takes(dout, z.scalar_type(), {&weights, &rowscale, &layerscale}))
    return call_reference(backward_op(), dout, dz, z, weight, mean, rstd, x0, rowscale, layerscale, mask, p, rms);
  return MINDSPEED_WITH_TYPE(dout.scalar_type(), [&] {
    const auto typed = z.scalar_type() == dout.scalar_type() ? backward_typed<scalar_t, scalar_t> : backward_typed<scalar_t, float>;
    return typed(dout, dz, z, weight, mean, rstd, rowscale, layerscale, mask, p, rms);
  });
}

// ---- autograd ----

// One zero, seen as a tensor like `other`.
Tensor zero_like(const Tensor &other) { return at::zeros({}, other.options()).expand_symint(other.sym_sizes()); }

bool asks(const Maybe &tensor) { return tensor.has_value() && tensor->requires_grad(); }

struct DropoutAddNorm : torch::autograd::Function<DropoutAddNorm> {
  static variable_list forward(AutogradContext *context, const Tensor &x0, const Maybe &residual, const Tensor &weight,
                               const Maybe &bias, const Maybe &rowscale, const Maybe &layerscale, const Maybe &mask,
                               double p, double epsilon, at::ScalarType residual_dtype, bool rms) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [out, z, mean, rstd] =
        forward_op().call(x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon, residual_dtype, rms);
    const bool of_scales = asks(rowscale) || asks(layerscale);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({mean, rstd});
    context->saved_data["p"] = p;
    context->saved_data["rms"] = rms;
    context->saved_data["residual"] = residual.has_value();
    if (bias.has_value())
      context->saved_data["bias"] = static_cast<int64_t>(bias->scalar_type());
    context->save_for_backward({z, weight, mean, rstd, of_scales ? x0 : Tensor(), rowscale.value_or(Tensor()),
                                layerscale.value_or(Tensor()), mask.value_or(Tensor())});
    context->saved_data["type"] = static_cast<int64_t>(x0.scalar_type());
    return {out, z, mean, rstd};
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    const auto saved = context->get_saved_variables();
    const auto maybe = [](const Tensor &tensor) { return tensor.defined() ? Maybe(tensor) : Maybe(); };
    const auto &data = context->saved_data;
    const Tensor &z = saved[0];
    const Tensor dz = gradients[1].defined() ? gradients[1] : zero_like(z);
    const Tensor dout = gradients[0].defined() ? gradients[0] : zero_like(z).to(static_cast<at::ScalarType>(data.at("type").toInt()));
    auto [dx0, dresidual, dweight, dbias, drow, dlayer] =
        backward_op().call(dout, dz, z, saved[1], saved[2], saved[3], maybe(saved[4]), maybe(saved[5]), maybe(saved[6]),
                           maybe(saved[7]), data.at("p").toDouble(), data.at("rms").toBool());
    const bool of_scales = saved[4].defined(), with_bias = data.count("bias") > 0;
    return {dx0,
            data.at("residual").toBool() ? dresidual : Tensor(),
            dweight,
            with_bias ? dbias.to(static_cast<at::ScalarType>(data.at("bias").toInt())) : Tensor(),
            of_scales && saved[5].defined() ? drow : Tensor(),
            of_scales && saved[6].defined() ? dlayer : Tensor(),
            Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Four differentiable(c10::DispatchKeySet keys, const Tensor &x0, const Maybe &residual, const Tensor &weight,
                    const Maybe &bias, const Maybe &rowscale, const Maybe &layerscale, const Maybe &mask, double p,
                    double epsilon, at::ScalarType residual_dtype, bool rms) {
  if (!needs_gradient(x0, residual, weight, bias, rowscale, layerscale))
    return forward_op().redispatch(keys & c10::after_autograd_keyset, x0, residual, weight, bias, rowscale, layerscale,
                                   mask, p, epsilon, residual_dtype, rms);
  auto results = DropoutAddNorm::apply(x0, residual, weight, bias, rowscale, layerscale, mask, p, epsilon,
                                       residual_dtype, rms);
  return {results[0], results[1], results[2], results[3]};
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) {
  library.impl("npu_dropout_add_layer_norm", forward);
  library.impl("npu_dropout_add_layer_norm_backward", backward);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, library) { library.impl("npu_dropout_add_layer_norm", differentiable); }

} // namespace
} // namespace mindspeed

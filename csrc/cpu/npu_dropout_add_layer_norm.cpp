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

// A vector over the columns as fp32 in the order of pairs of T; zeros without one.
template <class T> std::vector<float> columns(const Maybe &tensor, int64_t width) {
  std::vector<float> values(padded(width));
  if (!tensor.has_value())
    return values;
  const Tensor wide = tensor->to(at::kFloat).contiguous();
  const float *from = wide.const_data_ptr<float>();
  each_pair(0, wide.numel(), [&](int64_t i, auto extent) { store_raw(values.data() + i, load_as<T>(from + i, extent)); });
  return values;
}

template <class T> std::vector<float> columns_or_none(const Maybe &tensor, int64_t width) {
  return tensor.has_value() ? columns<T>(tensor, width) : std::vector<float>();
}

Tensor wide_rows(const Maybe &rowscale) {
  return rowscale.has_value() ? rowscale->to(at::kFloat).contiguous() : Tensor();
}

// What x0 is multiplied by.
struct Scales {
  const float *rows, *columns;
  const uint8_t *mask;
  float kept;

  bool any() const { return rows != nullptr || columns != nullptr || mask != nullptr; }
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

// COUNT rows from `first`: weight and bias are read once for all of them.
template <int COUNT, bool Scaled, bool Streamed, class T, class Z>
void forward_rows(const ForwardRows<T, Z> &rows, int64_t first) {
  const int64_t width = rows.width;
  const T *x0 = rows.x0;
  const Z *residual = rows.residual;
  const Scales scales = rows.scales;
  const auto sum = [=](int64_t row, int64_t i, auto extent) {
    Pair value = load_pair(x0 + row * width + i, extent);
    if constexpr (Scaled)
      value = scaled<T>(value, scales, row, i, width, extent);
    return residual == nullptr ? value : value + load_as<T>(residual + row * width + i, extent);
  };
  Z *z = rows.z;
  // z is stored, and it and the squares of its distances from `shift` are summed
  const auto sums_about = [=](int64_t row, float shift) {
    const Pair centre(shift);
    return pair_sums<2>(width, [=](auto &totals, int64_t i, auto extent) {
      const Pair value = sum(row, i, extent), distance = covered<T>(value - centre, extent);
      store_as<T>(z + row * width + i, value, extent);
      totals[0] = totals[0] + value;
      totals[1] = fmadd(distance, distance, totals[1]);
    });
  };
  std::array<Pair, COUNT> mean, rstd;
  for (int r = 0; r < COUNT; ++r) {
    const int64_t row = first + r, begin = std::min(width, LENGTH);
    // squares about the mean of the first few numbers; where that is far from the mean of all, again about the latter
    double mean_of_row = 0, variance = 0;
    float shift = 0.0f;
    if (!rows.rms) {
      const Pair start = sum(row, 0, Part{begin});
      shift = sum_of_lanes(start.first + start.second) / begin;
    }
    for (int turn = 0; turn < 2; ++turn) {
      const auto [total, squares] = sums_about(row, shift);
      mean_of_row = rows.rms ? 0.0 : total / width;
      const double offset = mean_of_row - shift;
      variance = squares / width - offset * offset;
      if (!(offset * offset > 16 * variance))
        break;
      shift = static_cast<float>(mean_of_row);
    }
    rows.mean[row] = static_cast<float>(mean_of_row);
    rows.rstd[row] = static_cast<float>(1.0 / std::sqrt(variance + rows.epsilon));
    mean[r] = Pair(rows.mean[row]);
    rstd[r] = Pair(rows.rstd[row]);
  }
  const float *weight = rows.weight, *bias = rows.bias;
  T *out = rows.out;
  each_pair(0, width, [=](int64_t i, auto extent) {
    const Pair scale = load_raw(weight + i), added = load_raw(bias + i);
    for (int r = 0; r < COUNT; ++r) {
      const int64_t at = (first + r) * width + i;
      Pair value;
      if constexpr (std::is_same_v<Z, float>) {
        value = load_as<T>(z + at, extent);
      } else {
        value = sum(first + r, i, extent);
      }
      write_pair<Streamed>(out + at, fmadd((value - mean[r]) * rstd[r], scale, added), extent);
    }
  });
}

template <bool Scaled, bool Streamed, class T, class Z> void forward_all(const ForwardRows<T, Z> &rows, int64_t count) {
  parallel(count, rows.width, [&](int64_t begin, int64_t end) {
    int64_t row = begin;
    for (; row + 4 <= end; row += 4)
      forward_rows<4, Scaled, Streamed>(rows, row);
    for (; row < end; ++row)
      forward_rows<1, Scaled, Streamed>(rows, row);
  });
}

template <class T, class Z>
Four forward_typed(const Tensor &x0_, const Maybe &residual_, const Tensor &weight_, const Maybe &bias_,
                   const Maybe &rowscale_, const Maybe &layerscale_, const Maybe &mask_, double p, double epsilon,
                   bool rms) {
  const Tensor x0 = x0_.contiguous(), residual = contiguous(residual_), mask = contiguous(mask_),
               rowscale = wide_rows(rowscale_);
  const int64_t width = x0.size(-1);
  const auto weight = columns<T>(weight_, width), bias = columns<T>(bias_, width), layerscale = columns_or_none<T>(layerscale_, width);
  auto shape = x0.sizes().vec();
  Tensor out = fresh(shape, x0.options()), z = fresh(shape, x0.options().dtype(c10::CppTypeToScalarType<Z>()));
  shape.back() = 1;
  Tensor mean = at::empty(shape, x0.options().dtype(at::kFloat)), rstd = at::empty(shape, mean.options());
  const ForwardRows<T, Z> rows{x0.const_data_ptr<T>(), residual.defined() ? residual.const_data_ptr<Z>() : nullptr,
                               weight.data(), bias.data(), scales_of(rowscale, layerscale, mask, p), out.mutable_data_ptr<T>(),
                               z.mutable_data_ptr<Z>(), mean.mutable_data_ptr<float>(), rstd.mutable_data_ptr<float>(),
                               width, epsilon, rms};
  const bool stream = streamed(out, width);
  const auto run = rows.scales.any() ? (stream ? forward_all<true, true, T, Z> : forward_all<true, false, T, Z>)
                                     : (stream ? forward_all<false, true, T, Z> : forward_all<false, false, T, Z>);
  run(rows, rstd.numel());
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

// COUNT rows from `first`: their two gradients, and what they add to those of weight and bias. With n = (z - mean) rstd and
// g = dout weight, that of z is rstd (g - the mean of g - n times the mean of g n).
template <int COUNT, bool Scaled, bool Streamed, class T, class Z>
void backward_rows(const BackwardRows<T, Z> &rows, int64_t first, float *dweight, float *dbias) {
  const int64_t width = rows.width, start = first * width;
  const T *dout = rows.dout + start;
  const Z *z = rows.z + start, *dz = rows.dz ? rows.dz + start : nullptr;
  const float *weights = rows.weight;
  std::array<Pair, COUNT> rstd, offset;
  for (int row = 0; row < COUNT; ++row) {
    rstd[row] = Pair(rows.rstd[first + row]);
    offset[row] = Pair(-rows.mean[first + row] * rows.rstd[first + row]);
  }
  const auto sums = pair_sums<2 * COUNT>(width, [=](auto &totals, int64_t i, auto extent) {
    const Pair weight = load_raw(weights + i);
    Pair of_weight = load_raw(dweight + i), of_bias = load_raw(dbias + i);
    for (int row = 0; row < COUNT; ++row) {
      const int64_t at = row * width + i;
      const Pair given = load_pair(dout + at, extent), g = given * weight;
      const Pair n = fmadd(load_as<T>(z + at, extent), rstd[row], offset[row]);
      of_weight = fmadd(given, n, of_weight);
      of_bias = of_bias + given;
      totals[2 * row] = fmadd(g, n, totals[2 * row]);
      totals[2 * row + 1] = totals[2 * row + 1] + g;
    }
    store_raw(dweight + i, of_weight);
    store_raw(dbias + i, of_bias);
  });
  // as g rstd + z pull + rest
  std::array<Pair, COUNT> pull, rest;
  for (int row = 0; row < COUNT; ++row) {
    const double r = rows.rstd[first + row], of_n = sums[2 * row] / width, of_g = rows.rms ? 0.0 : sums[2 * row + 1] / width;
    pull[row] = Pair(static_cast<float>(-r * r * of_n));
    rest[row] = Pair(static_cast<float>(r * (rows.mean[first + row] * r * of_n - of_g)));
  }
  const Scales scales = rows.scales;
  T *dx0 = rows.dx0 + start;
  Z *dresidual = rows.dresidual + start;
  each_pair(0, width, [=](int64_t i, auto extent) {
    const Pair weight = load_raw(weights + i);
    for (int row = 0; row < COUNT; ++row) {
      const int64_t at = row * width + i;
      const Pair from_sums = fmadd(load_as<T>(z + at, extent), pull[row], rest[row]);
      Pair gradient = fmadd(load_pair(dout + at, extent) * weight, rstd[row], from_sums);
      if (dz != nullptr)
        gradient = gradient + load_as<T>(dz + at, extent);
      if constexpr (std::is_same_v<T, Z>) {
        write_pair<Streamed>(dresidual + at, gradient, extent);
      } else {
        store_as<T>(dresidual + at, gradient, extent);
      }
      if constexpr (Scaled)
        gradient = scaled<T>(gradient, scales, first + row, i, width, extent);
      write_pair<Streamed>(dx0 + at, gradient, extent);
    }
  });
}

template <bool Scaled, bool Streamed, class T, class Z>
void backward_chunk(const BackwardRows<T, Z> &rows, int64_t begin, int64_t end, float *dweight, float *dbias) {
  int64_t row = begin;
  for (; row + 4 <= end; row += 4)
    backward_rows<4, Scaled, Streamed>(rows, row, dweight, dbias);
  for (; row < end; ++row)
    backward_rows<1, Scaled, Streamed>(rows, row, dweight, dbias);
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
  const int64_t width = z.size(-1);
  const auto weight = columns<T>(weight_, width), layerscale = columns_or_none<T>(layerscale_, width);
  Tensor dx0 = fresh(dout.sizes(), dout.options()), dresidual = fresh(z.sizes(), z.options());
  Tensor dweight = at::empty(weight_.sizes(), weight_.options()), dbias = at::empty(weight_.sizes(), weight_.options());
  const BackwardRows<T, Z> rows{dout.const_data_ptr<T>(), dz.defined() ? dz.const_data_ptr<Z>() : nullptr,
                                z.const_data_ptr<Z>(), weight.data(), mean.const_data_ptr<float>(),
                                rstd.const_data_ptr<float>(), scales_of(rowscale, layerscale, mask, p),
                                dx0.mutable_data_ptr<T>(), dresidual.mutable_data_ptr<Z>(), width, rms};
  const Chunks chunks = chunks_of(rstd.numel());
  const int64_t row_length = padded(width);
  const bool stream = streamed(dx0, width);
  const auto run = rows.scales.any() ? (stream ? backward_chunk<true, true, T, Z> : backward_chunk<true, false, T, Z>)
                                     : (stream ? backward_chunk<false, true, T, Z> : backward_chunk<false, false, T, Z>);
  std::vector<float> of_weight(chunks.count * row_length), of_bias(chunks.count * row_length);
  parallel(chunks.count, chunks.rows * width / chunks.count, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      run(rows, chunks.begin(chunk), chunks.begin(chunk + 1), of_weight.data() + chunk * row_length,
          of_bias.data() + chunk * row_length);
  });
  MINDSPEED_WITH_TYPE(weight_.scalar_type(), [&] {
    add_pair_chunks<T>(of_weight.data(), chunks.count, width, dweight.mutable_data_ptr<scalar_t>());
    add_pair_chunks<T>(of_bias.data(), chunks.count, width, dbias.mutable_data_ptr<scalar_t>());
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

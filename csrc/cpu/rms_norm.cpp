// RMSNorm, alone or of a sum: fp32 sums, each result rounded once. The formulas are those of mindspeed/ops/rms_norm.py.
#include "memory.h"
#include "operators.h"
#include "pairs.h"
#include "reference.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Two = std::tuple<Tensor, Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;
using Forward = Two(const Tensor &, const Tensor &, double);
using Backward = Two(const Tensor &, const Tensor &, const Tensor &, const Tensor &);
using ResidualForward = Three(const Tensor &, const Tensor &, const Tensor &, double);
using ResidualBackward = Two(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &);

const auto &forward_op() {
  static const auto op = find_operator<Forward>("mindspeed::rms_norm");
  return op;
}

const auto &backward_op() {
  static const auto op = find_operator<Backward>("mindspeed::rms_norm_backward");
  return op;
}

const auto &residual_op() {
  static const auto op = find_operator<ResidualForward>("mindspeed::rms_norm_residual");
  return op;
}

const auto &residual_backward_op() {
  static const auto op = find_operator<ResidualBackward>("mindspeed::rms_norm_residual_backward");
  return op;
}

bool takes(const Tensor &x, const Tensor &gamma) {
  return vectorizable(x.scalar_type()) && gamma.scalar_type() == x.scalar_type() && x.numel() > 0;
}

// ---- forward ----

// Rows of x, or of x + residual: `sum` receives the latter.
template <class T> struct ForwardRows {
  const T *x, *residual, *gamma;
  T *y, *sum;
  float *rstd;
  int64_t width;
  double epsilon;
};

template <bool Residual, bool Streamed, class T> void forward_row(const ForwardRows<T> &rows, int64_t row) {
  const int64_t start = row * rows.width;
  const T *x = rows.x + start, *residual = rows.residual + start;
  const auto element = [=](int64_t i, auto extent) {
    if constexpr (Residual) {
      return load_pair(x + i, extent) + load_pair(residual + i, extent);
    } else {
      return load_pair(x + i, extent);
    }
  };
  const auto [squares] = pair_sums<1>(rows.width, [&](auto &total, int64_t i, auto extent) {
    if constexpr (Residual) {
      const Pair value = element(i, extent);
      write_pair<Streamed>(rows.sum + start + i, value, extent);
      total[0] = fmadd(value, value, total[0]);
    } else {
      total[0] = add_squares(total[0], x + i, extent);
    }
  });
  rows.rstd[row] = static_cast<float>(1.0 / std::sqrt(squares / rows.width + rows.epsilon));
  const Pair scale(rows.rstd[row]);
  const T *gamma = rows.gamma;
  T *y = rows.y + start;
  const int64_t later = 2 * rows.width;
  each_pair(0, rows.width, [=](int64_t i, auto extent) {
    if constexpr (Streamed)
      ask_for_pairs(x + later + i);
    if constexpr (Streamed && Residual)
      ask_for_pairs(residual + later + i);
    write_pair<Streamed>(y + i, element(i, extent) * scale * load_pair(gamma + i, extent), extent);
  });
}

template <bool Residual, class T> void forward_rows(const ForwardRows<T> &rows, int64_t count, bool stream) {
  parallel(count, rows.width, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (stream) {
        forward_row<Residual, true>(rows, row);
      } else {
        forward_row<Residual, false>(rows, row);
      }
    }
  });
}

Tensor empty_rstd(const Tensor &x, const Tensor &gamma) {
  auto shape = x.sizes().vec();
  std::fill(shape.end() - gamma.dim(), shape.end(), 1);
  return at::empty(shape, x.options().dtype(at::kFloat));
}

Two forward(const Tensor &x_, const Tensor &gamma_, double epsilon) {
  if (!takes(x_, gamma_))
    return call_reference(forward_op(), x_, gamma_, epsilon);
  const Tensor x = x_.contiguous(), gamma = gamma_.contiguous();
  Tensor y = fresh(x.sizes(), x.options()), rstd = empty_rstd(x, gamma);
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    const ForwardRows<scalar_t> rows{x.const_data_ptr<scalar_t>(), nullptr, gamma.const_data_ptr<scalar_t>(),
                                     y.mutable_data_ptr<scalar_t>(), nullptr, rstd.mutable_data_ptr<float>(),
                                     gamma.numel(), epsilon};
    forward_rows<false>(rows, rstd.numel(), streamed(y, rows.width));
  });
  return {y, rstd};
}

Three residual_forward(const Tensor &x_, const Tensor &residual_, const Tensor &gamma_, double epsilon) {
  if (!takes(x_, gamma_))
    return call_reference(residual_op(), x_, residual_, gamma_, epsilon);
  const Tensor x = x_.contiguous(), residual = residual_.contiguous(), gamma = gamma_.contiguous();
  Tensor y = fresh(x.sizes(), x.options()), sum = fresh(x.sizes(), x.options()), rstd = empty_rstd(x, gamma);
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    const ForwardRows<scalar_t> rows{x.const_data_ptr<scalar_t>(), residual.const_data_ptr<scalar_t>(),
                                     gamma.const_data_ptr<scalar_t>(), y.mutable_data_ptr<scalar_t>(),
                                     sum.mutable_data_ptr<scalar_t>(), rstd.mutable_data_ptr<float>(),
                                     gamma.numel(), epsilon};
    forward_rows<true>(rows, rstd.numel(), streamed(y, rows.width));
  });
  return {y, sum, rstd};
}

// ---- backward ----

// `dsum` is the gradient of the sum itself, null where nothing but y is used.
template <class T> struct BackwardRows {
  const T *dy, *dsum, *x, *gamma;
  const float *rstd;
  T *dx;
  int64_t width;
};

// COUNT rows from `first`: gamma and its gradient are read and written once for all of them.
template <int COUNT, bool Sum, bool Streamed, class T>
void backward_rows(const BackwardRows<T> &rows, int64_t first, float *dgamma) {
  const int64_t width = rows.width, start = first * width;
  const T *dy = rows.dy + start, *x = rows.x + start, *dsum = rows.dsum + start, *gamma = rows.gamma;
  std::array<Pair, COUNT> rstd, pull;
  for (int row = 0; row < COUNT; ++row)
    rstd[row] = Pair(rows.rstd[first + row]);
  // dgamma += (dy x) r, and dots = the sums of (dy x) gamma
  const auto dots = pair_sums<COUNT>(width, [=](auto &totals, int64_t i, auto extent) {
    const Pair scale = load_pair(gamma + i, extent);
    Pair total = load_raw(dgamma + i);
    for (int row = 0; row < COUNT; ++row) {
      const int64_t at = row * width + i;
      if constexpr (Streamed)
        ask_for_pairs(dy + COUNT * width + at);
      const Pair product = load_pair(dy + at, extent) * load_pair(x + at, extent);
      total = fmadd(product, rstd[row], total);
      totals[row] = fmadd(product, scale, totals[row]);
    }
    store_raw(dgamma + i, total);
  });
  // dx = (dy r) gamma + x pull
  for (int row = 0; row < COUNT; ++row) {
    const float r = rows.rstd[first + row];
    pull[row] = Pair(static_cast<float>(-dots[row] * r * r * r / width));
  }
  T *dx = rows.dx + start;
  each_pair(0, width, [=](int64_t i, auto extent) {
    const Pair scale = load_pair(gamma + i, extent);
    for (int row = 0; row < COUNT; ++row) {
      const int64_t at = row * width + i;
      if constexpr (Streamed)
        ask_for_pairs(x + COUNT * width + at);
      if constexpr (Streamed && Sum)
        ask_for_pairs(dsum + COUNT * width + at);
      Pair gradient = fmadd(load_pair(dy + at, extent) * rstd[row], scale, load_pair(x + at, extent) * pull[row]);
      if constexpr (Sum)
        gradient = gradient + load_pair(dsum + at, extent);
      write_pair<Streamed>(dx + at, gradient, extent);
    }
  });
}

template <bool Sum, bool Streamed, class T>
void backward_chunk(const BackwardRows<T> &rows, int64_t begin, int64_t end, float *dgamma) {
  std::fill_n(dgamma, padded(rows.width), 0.0f);
  constexpr int TOGETHER = Streamed ? 2 : 4;
  int64_t row = begin;
  for (; row + TOGETHER <= end; row += TOGETHER)
    backward_rows<TOGETHER, Sum, Streamed>(rows, row, dgamma);
  for (; row < end; ++row)
    backward_rows<1, Sum, Streamed>(rows, row, dgamma);
}

// The gradients of x and gamma; that of gamma is summed in chunks of rows, then over the chunks.
template <bool Sum> Two backward(const Tensor &dy_, const Tensor *dsum_, const Tensor &x_, const Tensor &gamma_, const Tensor &rstd_) {
  const Tensor dy = dy_.contiguous(), x = x_.contiguous(), gamma = gamma_.contiguous(), rstd = rstd_.contiguous();
  const Tensor dsum = Sum ? dsum_->contiguous() : Tensor();
  Tensor dx = fresh(x.sizes(), x.options()), dgamma = at::empty(gamma.sizes(), gamma.options());
  const Chunks chunks = chunks_of(rstd.numel());
  const int64_t width = gamma.numel();
  Tensor partial = at::empty({chunks.count, padded(width)}, rstd.options());
  float *sums_of_chunks = partial.mutable_data_ptr<float>();
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    const BackwardRows<scalar_t> rows{dy.const_data_ptr<scalar_t>(), Sum ? dsum.const_data_ptr<scalar_t>() : nullptr,
                                      x.const_data_ptr<scalar_t>(), gamma.const_data_ptr<scalar_t>(),
                                      rstd.const_data_ptr<float>(), dx.mutable_data_ptr<scalar_t>(), width};
    const bool stream = streamed(dx, width);
    parallel(chunks.count, chunks.rows * width / chunks.count, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        float *total = sums_of_chunks + chunk * padded(width);
        if (stream) {
          backward_chunk<Sum, true>(rows, chunks.begin(chunk), chunks.begin(chunk + 1), total);
        } else {
          backward_chunk<Sum, false>(rows, chunks.begin(chunk), chunks.begin(chunk + 1), total);
        }
      }
    });
    add_pair_chunks<scalar_t>(sums_of_chunks, chunks.count, width, dgamma.mutable_data_ptr<scalar_t>());
  });
  return {dx, dgamma};
}

Two plain_backward(const Tensor &dy, const Tensor &x, const Tensor &gamma, const Tensor &rstd) {
  if (!takes(x, gamma) || dy.scalar_type() != x.scalar_type())
    return call_reference(backward_op(), dy, x, gamma, rstd);
  return backward<false>(dy, nullptr, x, gamma, rstd);
}

Two residual_backward(const Tensor &dy, const Tensor &dsum, const Tensor &sum, const Tensor &gamma, const Tensor &rstd) {
  if (!takes(sum, gamma) || dy.scalar_type() != sum.scalar_type() || dsum.scalar_type() != sum.scalar_type())
    return call_reference(residual_backward_op(), dy, dsum, sum, gamma, rstd);
  return backward<true>(dy, &dsum, sum, gamma, rstd);
}

// ---- autograd ----

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static variable_list forward(AutogradContext *context, const Tensor &x, const Tensor &gamma, double epsilon) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, rstd] = forward_op().call(x, gamma, epsilon);
    context->set_materialize_grads(false);
    context->mark_non_differentiable({rstd});
    context->save_for_backward({x, gamma, rstd});
    return {y, rstd};
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    if (!gradients[0].defined())
      return {Tensor(), Tensor(), Tensor()};
    const auto saved = context->get_saved_variables();
    auto [dx, dgamma] = backward_op().call(gradients[0], saved[0], saved[1], saved[2]);
    return {dx, dgamma, Tensor()};
  }
};

struct RmsNormResidual : torch::autograd::Function<RmsNormResidual> {
  static variable_list forward(AutogradContext *context, const Tensor &x, const Tensor &residual, const Tensor &gamma,
                               double epsilon) {
    at::AutoDispatchBelowADInplaceOrView guard;
    auto [y, sum, rstd] = residual_op().call(x, residual, gamma, epsilon);
    context->mark_non_differentiable({rstd});
    context->save_for_backward({sum, gamma, rstd});
    return {y, sum, rstd};
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    const auto saved = context->get_saved_variables();
    auto [dx, dgamma] = residual_backward_op().call(gradients[0], gradients[1], saved[0], saved[1], saved[2]);
    return {dx, dx, dgamma, Tensor()};
  }
};

Two differentiable(c10::DispatchKeySet keys, const Tensor &x, const Tensor &gamma, double epsilon) {
  if (!needs_gradient(x, gamma))
    return forward_op().redispatch(keys & c10::after_autograd_keyset, x, gamma, epsilon);
  auto results = RmsNorm::apply(x, gamma, epsilon);
  return {results[0], results[1]};
}

Three residual_differentiable(c10::DispatchKeySet keys, const Tensor &x, const Tensor &residual, const Tensor &gamma,
                              double epsilon) {
  if (!needs_gradient(x, residual, gamma))
    return residual_op().redispatch(keys & c10::after_autograd_keyset, x, residual, gamma, epsilon);
  auto results = RmsNormResidual::apply(x, residual, gamma, epsilon);
  return {results[0], results[1], results[2]};
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) {
  library.impl("rms_norm", forward);
  library.impl("rms_norm_backward", plain_backward);
  library.impl("rms_norm_residual", residual_forward);
  library.impl("rms_norm_residual_backward", residual_backward);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, library) {
  library.impl("rms_norm", differentiable);
  library.impl("rms_norm_residual", residual_differentiable);
}

} // namespace
} // namespace mindspeed

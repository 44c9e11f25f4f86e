// SwiGLU: with x = [a | b] along one dimension, y = a sigmoid(a) b; computed in fp32, rounded once.
#include "memory.h"
#include "operators.h"
#include "pairs.h"
#include "reference.h"
#include "rows.h"

#include <algorithm>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Forward = Tensor(const Tensor &, int64_t);
using Backward = Tensor(const Tensor &, const Tensor &, int64_t);

const auto &forward_op() {
  static const auto op = find_operator<Forward>("mindspeed::swiglu");
  return op;
}

const auto &backward_op() {
  static const auto op = find_operator<Backward>("mindspeed::swiglu_backward");
  return op;
}

// Numbers of a run that one thread computes at once.
constexpr int64_t PIECE = 4096;

// A contiguous x is rows of two runs, a and b, whatever the dimension that they lie along.
struct Runs {
  int64_t rows, length;
  std::vector<int64_t> halved;

  // How far behind a piece of dy the next one lies, and how far of a and b.
  int64_t next() const { return std::min(length, PIECE); }
  int64_t next_halves() const { return length > PIECE ? PIECE : 2 * length; }
};

Runs runs_of(const Tensor &x, int64_t dim) {
  dim = dim < 0 ? dim + x.dim() : dim;
  Runs runs{1, x.size(dim) / 2, x.sizes().vec()};
  runs.halved[dim] /= 2;
  for (int64_t d = 0; d < dim; ++d)
    runs.rows *= x.size(d);
  for (int64_t d = dim + 1; d < x.dim(); ++d)
    runs.length *= x.size(d);
  return runs;
}

// body(row, begin, end): all runs in pieces, so that also a single long row occupies all threads.
template <class Body> void each_piece(const Runs &runs, Body body) {
  const int64_t pieces = (runs.length + PIECE - 1) / PIECE;
  parallel(runs.rows * pieces, runs.length / pieces, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t start = piece % pieces * PIECE;
      body(piece / pieces, start, std::min(start + PIECE, runs.length));
    }
  });
}

template <bool Streamed, class T> void forward_runs(const Runs &runs, const T *x, T *y) {
  const int64_t next = runs.next_halves();
  each_piece(runs, [&](int64_t row, int64_t begin, int64_t end) {
    const T *a = x + row * 2 * runs.length, *b = a + runs.length;
    T *to = y + row * runs.length;
    each_pair(begin, end, [&](int64_t i, auto extent) {
      if constexpr (sizeof(T) == 2) // where arithmetic and not memory sets the pace
        ask_for_pairs(a + next + i, b + next + i);
      const Pair gate = load_pair(a + i, extent);
      write_pair<Streamed>(to + i, gate * sigmoid_for<T>(gate) * load_pair(b + i, extent), extent);
    });
  });
}

template <bool Streamed, class T> void backward_runs(const Runs &runs, const T *dy, const T *x, T *dx) {
  const int64_t next = runs.next(), next_halves = runs.next_halves();
  each_piece(runs, [&](int64_t row, int64_t begin, int64_t end) {
    const T *a = x + row * 2 * runs.length, *b = a + runs.length, *dys = dy + row * runs.length;
    T *da = dx + row * 2 * runs.length, *db = da + runs.length;
    each_pair(begin, end, [&](int64_t i, auto extent) {
      if constexpr (sizeof(T) == 2)
        ask_for_pairs(a + next_halves + i, b + next_halves + i, dys + next + i);
      const Pair gate = load_pair(a + i, extent), gradient = load_pair(dys + i, extent), s = sigmoid_for<T>(gate);
      const Pair silu = gate * s, slope = fmadd(silu, Pair(1.0f) - s, s);
      write_pair<Streamed>(da + i, gradient * load_pair(b + i, extent) * slope, extent);
      write_pair<Streamed>(db + i, gradient * silu, extent);
    });
  });
}

bool takes(const Tensor &x) { return vectorizable(x.scalar_type()) && x.numel() > 0; }

Tensor forward(const Tensor &x_, int64_t dim) {
  if (!takes(x_))
    return call_reference(forward_op(), x_, dim);
  const Tensor x = x_.contiguous();
  const Runs runs = runs_of(x, dim);
  Tensor y = fresh(runs.halved, x.options());
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    const auto *from = x.const_data_ptr<scalar_t>();
    auto *to = y.mutable_data_ptr<scalar_t>();
    streamed(y, runs.length) ? forward_runs<true>(runs, from, to) : forward_runs<false>(runs, from, to);
  });
  return y;
}

Tensor backward(const Tensor &dy_, const Tensor &x_, int64_t dim) {
  if (!takes(x_) || dy_.scalar_type() != x_.scalar_type())
    return call_reference(backward_op(), dy_, x_, dim);
  const Tensor dy = dy_.contiguous(), x = x_.contiguous();
  const Runs runs = runs_of(x, dim);
  Tensor dx = fresh(x.sizes(), x.options());
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    const auto *dys = dy.const_data_ptr<scalar_t>(), *from = x.const_data_ptr<scalar_t>();
    auto *to = dx.mutable_data_ptr<scalar_t>();
    streamed(dx, runs.length) ? backward_runs<true>(runs, dys, from, to) : backward_runs<false>(runs, dys, from, to);
  });
  return dx;
}

struct Swiglu : torch::autograd::Function<Swiglu> {
  static Tensor forward(AutogradContext *context, const Tensor &x, int64_t dim) {
    at::AutoDispatchBelowADInplaceOrView guard;
    context->saved_data["dim"] = dim;
    context->save_for_backward({x});
    return forward_op().call(x, dim);
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    const auto saved = context->get_saved_variables();
    return {backward_op().call(gradients[0], saved[0], context->saved_data["dim"].toInt()), Tensor()};
  }
};

Tensor differentiable(c10::DispatchKeySet keys, const Tensor &x, int64_t dim) {
  return needs_gradient(x) ? Swiglu::apply(x, dim)
                           : forward_op().redispatch(keys & c10::after_autograd_keyset, x, dim);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) {
  library.impl("swiglu", forward);
  library.impl("swiglu_backward", backward);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, library) { library.impl("swiglu", differentiable); }

} // namespace
} // namespace mindspeed

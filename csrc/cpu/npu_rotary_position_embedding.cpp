// Rotary position embedding: y = x cos + rot(x) sin, computed in fp32, rounded once: the numbers of the reference.
#include "memory.h"
#include "operators.h"
#include "pairs.h"
#include "reference.h"

#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Rotate = Tensor(const Tensor &, const Tensor &, const Tensor &, int64_t);
using Tables = std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &, const Tensor &, int64_t);

const auto &forward_op() {
  static const auto op = find_operator<Rotate>("mindspeed::npu_rotary_position_embedding");
  return op;
}

const auto &backward_op() {
  static const auto op = find_operator<Rotate>("mindspeed::npu_rotary_position_embedding_backward");
  return op;
}

const auto &tables_op() {
  static const auto op = find_operator<Tables>("mindspeed::npu_rotary_position_embedding_tables_backward");
  return op;
}

// ---- one row ----

// The transpose (`Back`) turns the other way, with the sines of the other element of a pair.
template <bool Back> Pair first_of(Pair x1, Pair x2, Pair cos1, Pair sin1, Pair sin2) {
  return Back ? x1 * cos1 + x2 * sin2 : x1 * cos1 - x2 * sin1;
}

template <bool Back> Pair second_of(Pair x1, Pair x2, Pair cos2, Pair sin1, Pair sin2) {
  return Back ? x2 * cos2 - x1 * sin1 : x2 * cos2 + x1 * sin2;
}

template <bool Back, bool Streamed, class T, class Table>
void rotate_halves(const T *x, const Table *cos, const Table *sin, T *y, int64_t width) {
  const int64_t half = width / 2;
  each_pair(0, half, [=](int64_t i, auto extent) {
    const Pair x1 = load_pair(x + i, extent), x2 = load_pair(x + half + i, extent);
    const Pair sin1 = load_as<T>(sin + i, extent), sin2 = load_as<T>(sin + half + i, extent);
    write_pair<Streamed>(y + i, first_of<Back>(x1, x2, load_as<T>(cos + i, extent), sin1, sin2), extent);
    write_pair<Streamed>(y + half + i, second_of<Back>(x1, x2, load_as<T>(cos + half + i, extent), sin1, sin2), extent);
  });
}

template <bool Back, bool Streamed, class T, class Table>
void rotate_neighbours(const T *x, const Table *cos, const Table *sin, T *y, int64_t width) {
  each_pair(0, width, [=](int64_t i, auto extent) {
    const Pair values = load_turns(x + i, extent), c = load_turns(cos + i, extent), s = load_turns(sin + i, extent);
    const Floats &x1 = values.first, &x2 = values.second;
    const Pair turned = Back ? Pair(x1 * c.first + x2 * s.second, x2 * c.second - x1 * s.first)
                             : Pair(x1 * c.first - x2 * s.first, x2 * c.second + x1 * s.second);
    write_pair<Streamed>(y + i, from_turns<T>(turned), extent);
  });
}

// ---- all rows ----

// Rows of x, and of the tables that are broadcast over some dimensions (stride 0).
struct Layout {
  std::vector<int64_t> sizes, x_strides, table_strides;
  int64_t rows = 1, width;
};

Layout layout_of(const Tensor &x, const Tensor &table) {
  Layout layout;
  layout.width = x.size(-1);
  for (int64_t d = 0; d + 1 < x.dim(); ++d) {
    layout.rows *= x.size(d);
    layout.sizes.push_back(x.size(d));
    layout.x_strides.push_back(x.stride(d));
    layout.table_strides.push_back(table.size(d) == 1 ? 0 : table.stride(d));
  }
  return layout;
}

// Where row after row of x and of the tables begins.
class Cursor {
public:
  Cursor(const Layout &layout, int64_t row) : layout(layout), index(layout.sizes.size()) {
    for (size_t d = index.size(); d-- > 0;) {
      index[d] = row % layout.sizes[d];
      row /= layout.sizes[d];
      x += index[d] * layout.x_strides[d];
      table += index[d] * layout.table_strides[d];
    }
  }

  void next() {
    for (size_t d = index.size(); d-- > 0;) {
      x += layout.x_strides[d];
      table += layout.table_strides[d];
      if (++index[d] < layout.sizes[d])
        return;
      x -= layout.sizes[d] * layout.x_strides[d];
      table -= layout.sizes[d] * layout.table_strides[d];
      index[d] = 0;
    }
  }

  int64_t x = 0, table = 0;

private:
  const Layout &layout;
  std::vector<int64_t> index;
};

template <bool Back, bool Streamed, class T, class Table>
void rotate_rows(const Layout &layout, const T *x, const Table *cos, const Table *sin, T *y, int64_t mode) {
  parallel(layout.rows, layout.width, [=, &layout](int64_t begin, int64_t end) {
    Cursor at(layout, begin);
    for (int64_t row = begin; row < end; ++row, at.next()) {
      T *to = y + row * layout.width;
      if (mode == 0) {
        rotate_halves<Back, Streamed>(x + at.x, cos + at.table, sin + at.table, to, layout.width);
      } else {
        rotate_neighbours<Back, Streamed>(x + at.x, cos + at.table, sin + at.table, to, layout.width);
      }
    }
  });
}

template <bool Back, class T, class Table>
void rotate_into(const Tensor &x, const Tensor &cos, const Tensor &sin, Tensor &y, int64_t mode) {
  const Layout layout = layout_of(x, cos);
  const T *from = x.const_data_ptr<T>();
  const Table *c = cos.const_data_ptr<Table>(), *s = sin.const_data_ptr<Table>();
  T *to = y.mutable_data_ptr<T>();
  if (streamed(y, layout.width / (mode == 0 ? 2 : 1))) {
    rotate_rows<Back, true>(layout, from, c, s, to, mode);
  } else {
    rotate_rows<Back, false>(layout, from, c, s, to, mode);
  }
}

// Tables are read in the type of x or in fp32, which holds every other one exactly.
Tensor readable(const Tensor &table, const Tensor &x) {
  return (table.scalar_type() == x.scalar_type() ? table : table.to(at::kFloat)).contiguous();
}

template <bool Back> Tensor rotate(const Tensor &x_, const Tensor &cos_, const Tensor &sin_, int64_t mode) {
  if (!vectorizable(x_.scalar_type()) || !vectorizable(cos_.scalar_type()) || x_.numel() == 0)
    return call_reference(Back ? backward_op() : forward_op(), x_, cos_, sin_, mode);
  const Tensor x = x_.stride(-1) == 1 ? x_ : x_.contiguous();
  const Tensor cos = readable(cos_, x), sin = readable(sin_, x);
  Tensor y = fresh(x.sizes(), x.options());
  MINDSPEED_WITH_TYPE(x.scalar_type(), [&] {
    if (cos.scalar_type() == x.scalar_type()) {
      rotate_into<Back, scalar_t, scalar_t>(x, cos, sin, y, mode);
    } else {
      rotate_into<Back, scalar_t, float>(x, cos, sin, y, mode);
    }
  });
  return y;
}

// ---- autograd ----

struct Rotary : torch::autograd::Function<Rotary> {
  static Tensor forward(AutogradContext *context, const Tensor &x, const Tensor &cos, const Tensor &sin, int64_t mode) {
    at::AutoDispatchBelowADInplaceOrView guard;
    const bool of_tables = cos.requires_grad() || sin.requires_grad();
    context->saved_data["mode"] = mode;
    context->saved_data["of_tables"] = of_tables;
    context->save_for_backward(of_tables ? variable_list{cos, sin, x} : variable_list{cos, sin});
    return forward_op().call(x, cos, sin, mode);
  }

  static variable_list backward(AutogradContext *context, const variable_list &gradients) {
    const auto saved = context->get_saved_variables();
    const int64_t mode = context->saved_data["mode"].toInt();
    Tensor dx = backward_op().call(gradients[0], saved[0], saved[1], mode), dcos, dsin;
    if (context->saved_data["of_tables"].toBool())
      std::tie(dcos, dsin) = tables_op().call(gradients[0], saved[2], saved[0], mode);
    return {dx, dcos, dsin, Tensor()};
  }
};

Tensor differentiable(c10::DispatchKeySet keys, const Tensor &x, const Tensor &cos, const Tensor &sin, int64_t mode) {
  return needs_gradient(x, cos, sin)
             ? Rotary::apply(x, cos, sin, mode)
             : forward_op().redispatch(keys & c10::after_autograd_keyset, x, cos, sin, mode);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) {
  library.impl("npu_rotary_position_embedding", rotate<false>);
  library.impl("npu_rotary_position_embedding_backward", rotate<true>);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, library) {
  library.impl("npu_rotary_position_embedding", differentiable);
}

} // namespace
} // namespace mindspeed

// Rows of experts back to tokens, gathered: each token reads its rows, nothing is scattered, so the sums need no atomic
// and their order is that of mindspeed/ops/npu_fused_moe_token_unpermute.py.

#include "counting_sort.h"
#include "memory.h"
#include "operators.h"
#include "reference.h"
#include "rows.h"
#include "pairs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <numeric>
#include <tuple>
#include <vector>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Two = std::tuple<Tensor, Tensor>;
using Optional = std::optional<Tensor>;
using Forward = Tensor(const Tensor &, const Tensor &, const Optional &, c10::SymInt, c10::SymInt, bool);
using Backward = Two(const Tensor &, const Optional &, const Tensor &, const Optional &, c10::SymInt, c10::SymInt, bool);

const auto &forward_operator() {
  static const auto op = find_operator<Forward>("mindspeed::npu_fused_moe_token_unpermute");
  return op;
}

const auto &backward_operator() {
  static const auto op = find_operator<Backward>("mindspeed::npu_fused_moe_token_unpermute_backward");
  return op;
}

// What each token sums: rows[begin(t)] to rows[begin(t + 1)], weighed. A row that was dropped is beyond the last one.
struct Shares {
  std::vector<int32_t> rows;
  std::vector<float> weights;  // of each share, or none
  std::vector<int64_t> begins; // of each token and the end of the last; without it each has `topk` shares
  int64_t topk;

  int64_t begin(int64_t token) const { return begins.empty() ? token * topk : begins[token]; }
  const float *weight() const { return weights.empty() ? nullptr : weights.data(); }
};

// The indices as int32, nothing if one is negative or not below `limit`.
std::optional<std::vector<int32_t>> checked(const Tensor &indices, int64_t limit) {
  const Tensor given = indices.contiguous();
  std::vector<int32_t> numbers(given.numel());
  const auto copy = [&](const auto *from) {
    if (numbers.empty())
      return true;
    const auto range = range_of(from, given.numel());
    std::copy(from, from + numbers.size(), numbers.begin());
    return range.least >= 0 && range.most < limit;
  };
  const bool right = given.scalar_type() == at::kLong ? copy(given.const_data_ptr<int64_t>())
                                                      : copy(given.const_data_ptr<int32_t>());
  return right ? std::optional(std::move(numbers)) : std::nullopt;
}

// Each row names its token; the rows of a token keep their order.
Shares shares_of_rows(const std::vector<int32_t> &tokens_of, const std::vector<float> &weights, int64_t tokens) {
  Shares shares{std::vector<int32_t>(tokens_of.size()), std::vector<float>(weights.size()),
                std::vector<int64_t>(tokens + 1), 1};
  for (const int32_t token : tokens_of)
    ++shares.begins[token + 1];
  std::partial_sum(shares.begins.begin(), shares.begins.end(), shares.begins.begin());
  sort_stably(tokens_of.data(), static_cast<int64_t>(tokens_of.size()), 2, [&](int64_t row, int32_t place) {
    shares.rows[place] = static_cast<int32_t>(row);
    if (!weights.empty())
      shares.weights[place] = weights[row];
  });
  return shares;
}

// out[t] = the sum of the shares of token t.
template <class T> struct Sums {
  const T *rows;
  T *out;
  int64_t count, width; // of rows

  template <int PAIRS, class Extent>
  void chunk(const Shares &shares, int64_t begin, int64_t end, int64_t at, T *to, Extent extent) const {
    Pair totals[PAIRS];
    for (int64_t share = begin; share < end; ++share) {
      if (shares.rows[share] >= count)
        continue;
      const T *row = rows + shares.rows[share] * width + at;
      const Pair weight(shares.weights.empty() ? 1.0f : shares.weights[share]);
      for (int v = 0; v < PAIRS; ++v)
        totals[v] = totals[v] + load_pair(row + v * LENGTH, extent) * weight;
    }
    for (int v = 0; v < PAIRS; ++v)
      store_pair(to + at + v * LENGTH, totals[v], extent);
  }

  // Token t; the rows of one a few after it are asked for.
  void token(const Shares &shares, int64_t t, int64_t last) const {
    const int64_t begin = shares.begin(t), end = shares.begin(t + 1), bytes = width * static_cast<int64_t>(sizeof(T));
    const int64_t later = t + steps_ahead(bytes * shares.topk, 4);
    for (int64_t share = later < last ? shares.begin(later) : 0, stop = later < last ? shares.begin(later + 1) : 0;
         share < stop; ++share)
      if (shares.rows[share] < count)
        ask_for(rows + shares.rows[share] * width, bytes);
    int64_t at = 0;
    for (; at + 4 * LENGTH <= width; at += 4 * LENGTH)
      chunk<4>(shares, begin, end, at, out + t * width, Whole());
    each_pair(at, width, [&](int64_t i, auto extent) { chunk<1>(shares, begin, end, i, out + t * width, extent); });
  }
};

bool takes(const Tensor &rows, const Tensor &indices, const Optional &probs) {
  const bool integer = indices.scalar_type() == at::kInt || indices.scalar_type() == at::kLong;
  return integer && vectorizable(rows.scalar_type()) && !(probs && probs->scalar_type() == at::kDouble) &&
         std::max(rows.size(0), indices.numel()) < std::numeric_limits<int32_t>::max();
}

std::vector<float> as_floats(const Optional &probs) {
  if (!probs)
    return {};
  const Tensor numbers = probs->to(at::kFloat).contiguous();
  const float *first = numbers.const_data_ptr<float>();
  return std::vector<float>(first, first + numbers.numel());
}

Tensor forward(const Tensor &rows_, const Tensor &indices, const Optional &probs, int64_t tokens, int64_t topk,
               bool padded) {
  const bool complete = padded ? indices.numel() == rows_.size(0) : indices.numel() == tokens * topk;
  const bool weights = !probs || probs->numel() == indices.numel();
  auto numbers = takes(rows_, indices, probs) && complete && weights
                     ? checked(indices, padded ? tokens : std::numeric_limits<int32_t>::max())
                     : std::nullopt;
  if (!numbers)
    return call_reference(forward_operator(), rows_, indices, probs, tokens, topk, padded);
  const Tensor rows = rows_.contiguous(), out = fresh({tokens, rows.size(1)}, rows.options());
  const int64_t count = rows.size(0), width = rows.size(1);
  if (!padded && topk == 1 && !probs) {
    gather_rows(static_cast<const char *>(rows.const_data_ptr()), static_cast<char *>(out.mutable_data_ptr()), tokens,
                width * static_cast<int64_t>(rows.element_size()), streamed(out, width),
                [&](int64_t t) { return (*numbers)[t] < count ? (*numbers)[t] : -1; });
    return out;
  }
  const Shares shares = padded ? shares_of_rows(*numbers, as_floats(probs), tokens)
                               : Shares{std::move(*numbers), as_floats(probs), {}, topk};
  MINDSPEED_WITH_TYPE(rows.scalar_type(), [&] {
    const Sums<scalar_t> sums{rows.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), count, width};
    parallel(tokens, width * (1 + shares.topk), [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token)
        sums.token(shares, token, end);
    });
  });
  return out;
}

// Gradients of the shares: rows get the gradient of their token, weighed, and probabilities the product of both rows.
template <class T> struct Gradients {
  const T *dout, *rows; // rows is null where probabilities need no gradient
  const float *probs;
  T *drows;
  float *dprobs;
  int64_t width;

  template <bool Streamed> void share(int64_t token, int64_t row, int64_t slot) const {
    const T *from = dout + token * width, *other = rows + row * width;
    T *to = drows + row * width;
    const Pair weight(probs == nullptr ? 1.0f : probs[slot]);
    if (rows == nullptr) {
      each_pair(0, width, [=](int64_t i, auto extent) { write_pair<Streamed>(to + i, load_pair(from + i, extent) * weight, extent); });
      return;
    }
    const auto [dot] = pair_sums<1>(width, [=](auto &total, int64_t i, auto extent) {
      const Pair gradient = load_pair(from + i, extent);
      write_pair<Streamed>(to + i, gradient * weight, extent);
      total[0] = fmadd(gradient, load_pair(other + i, extent), total[0]);
    });
    dprobs[slot] = static_cast<float>(dot);
  }
};

// How shares are found: the row and the token of each.
struct Index {
  const std::vector<int32_t> &numbers;
  int64_t topk;
  bool padded;
  int64_t row(int64_t slot) const { return padded ? slot : numbers[slot]; }
  int64_t token(int64_t slot) const { return padded ? numbers[slot] : slot / topk; }
};

template <bool Streamed, class T> void all_gradients(const Gradients<T> &gradients, const Index &index, int64_t count) {
  const int64_t bytes = gradients.width * static_cast<int64_t>(sizeof(T)), ahead = steps_ahead(bytes, 8);
  parallel(static_cast<int64_t>(index.numbers.size()), 2 * gradients.width, [&](int64_t begin, int64_t end) {
    for (int64_t slot = begin; slot < end; ++slot) {
      if (gradients.rows != nullptr && slot + ahead < end && index.row(slot + ahead) < count)
        ask_for(gradients.rows + index.row(slot + ahead) * gradients.width, bytes);
      if (index.row(slot) < count)
        gradients.template share<Streamed>(index.token(slot), index.row(slot), slot);
    }
  });
}

Two backward(const Tensor &dout_, const Optional &rows_, const Tensor &indices, const Optional &probs, int64_t count,
             int64_t topk, bool padded) {
  const int64_t tokens = dout_.size(0), entries = indices.numel();
  const bool complete = padded ? entries == count : entries == tokens * topk && count <= entries;
  const bool weights = (!probs || probs->numel() == entries) && (!rows_ || rows_->scalar_type() == dout_.scalar_type());
  const auto numbers = takes(dout_, indices, probs) && complete && weights
                           ? checked(indices, padded ? tokens : entries)
                           : std::nullopt;
  if (!numbers)
    return call_reference(backward_operator(), dout_, rows_, indices, probs, count, topk, padded);
  const bool of_probs = rows_ && probs;
  const Tensor dout = dout_.contiguous(), rows = of_probs ? rows_->contiguous() : Tensor();
  const Tensor drows = fresh({count, dout.size(1)}, dout.options());
  const Tensor dprobs = of_probs ? at::zeros(probs->sizes(), dout.options().dtype(at::kFloat)) : Tensor();
  const std::vector<float> weight = as_floats(probs);
  const Index index{*numbers, topk, padded};
  MINDSPEED_WITH_TYPE(dout.scalar_type(), [&] {
    const Gradients<scalar_t> gradients{dout.const_data_ptr<scalar_t>(),
                                        of_probs ? rows.const_data_ptr<scalar_t>() : nullptr,
                                        probs ? weight.data() : nullptr,
                                        drows.mutable_data_ptr<scalar_t>(),
                                        of_probs ? dprobs.mutable_data_ptr<float>() : nullptr,
                                        dout.size(1)};
    streamed(drows, dout.size(1)) ? all_gradients<true>(gradients, index, count)
                                  : all_gradients<false>(gradients, index, count);
  });
  return {drows, of_probs ? dprobs.to(probs->scalar_type()) : at::empty({0}, dout.options())};
}

struct UnpermuteFunction : torch::autograd::Function<UnpermuteFunction> {
  static Tensor forward(AutogradContext *ctx, const Tensor &rows, const Tensor &indices, const Optional &probs,
                        c10::SymInt tokens, c10::SymInt topk, bool padded) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const bool of_probs = probs && probs->requires_grad();
    ctx->saved_data["count"] = rows.sym_size(0);
    ctx->saved_data["topk"] = topk;
    ctx->saved_data["padded"] = padded;
    ctx->save_for_backward({of_probs ? rows : Tensor(), indices, probs ? *probs : Tensor()});
    return forward_operator().call(rows, indices, probs, std::move(tokens), std::move(topk), padded);
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    const auto saved = ctx->get_saved_variables();
    const auto optional = [](const Tensor &x) { return x.defined() ? Optional(x) : std::nullopt; };
    const auto [drows, dprobs] =
        backward_operator().call(grads[0], optional(saved[0]), saved[1], optional(saved[2]),
                                 ctx->saved_data["count"].toSymInt(), ctx->saved_data["topk"].toSymInt(),
                                 ctx->saved_data["padded"].toBool());
    return {drows, Tensor(), saved[0].defined() ? dprobs : Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Tensor forward_recorded(const Tensor &rows, const Tensor &indices, const Optional &probs, c10::SymInt tokens,
                        c10::SymInt topk, bool padded) {
  if (needs_gradient(rows, probs))
    return UnpermuteFunction::apply(rows, indices, probs, std::move(tokens), std::move(topk), padded);
  const at::AutoDispatchBelowADInplaceOrView below;
  return forward_operator().call(rows, indices, probs, std::move(tokens), std::move(topk), padded);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) {
  m.impl("npu_fused_moe_token_unpermute", forward);
  m.impl("npu_fused_moe_token_unpermute_backward", backward);
}

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, m) { m.impl("npu_fused_moe_token_unpermute", forward_recorded); }

} // namespace
} // namespace mindspeed

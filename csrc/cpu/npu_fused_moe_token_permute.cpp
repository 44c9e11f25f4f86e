// Tokens to rows of experts: the order by counting, then whole rows. See mindspeed/ops/npu_fused_moe_token_permute.py.

#include "counting_sort.h"
#include "memory.h"
#include "operators.h"
#include "reference.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>

namespace mindspeed {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Two = std::tuple<Tensor, Tensor>;
using Permute = Two(const Tensor &, const Tensor &, c10::SymInt, bool);
using Unpermute = Tensor(const Tensor &, const Tensor &, const std::optional<Tensor> &, c10::SymInt, c10::SymInt, bool);

const auto &permute_operator() {
  static const auto op = find_operator<Permute>("mindspeed::npu_fused_moe_token_permute");
  return op;
}

const auto &unpermute_operator() {
  static const auto op = find_operator<Unpermute>("mindspeed::npu_fused_moe_token_unpermute");
  return op;
}

int64_t slots_per_token(const Tensor &indices) { return indices.dim() == 2 ? indices.size(1) : 1; }

// Rows of tokens and of experts, as bytes.
struct Rows {
  const char *tokens;
  char *permuted;
  int64_t bytes, kept;
  bool stream;

  void copy(int64_t token, int64_t row) const {
    if (row >= kept)
      return;
    if (stream)
      stream_row(tokens + token * bytes, permuted + row * bytes, bytes);
    else
      copy_row(tokens + token * bytes, permuted + row * bytes, bytes);
  }
};

// Rows by expert; `slots` says where each slot of a token went. A token is read once, for all its slots.
template <class Index> void copy_sorted(const Tensor &indices, const Rows &rows, int32_t *slots) {
  const uint32_t topk = static_cast<uint32_t>(slots_per_token(indices));
  sort_stably(indices.const_data_ptr<Index>(), indices.numel(), rows.bytes / 2, [&](int64_t slot, int32_t place) {
    slots[slot] = place;
    rows.copy(static_cast<uint32_t>(slot) / topk, place);
  });
}

// Every row is the token that its index names.
template <class Index> void copy_named(const Tensor &indices, const Rows &rows, int32_t *slots) {
  const Index *names = indices.const_data_ptr<Index>();
  std::copy(names, names + indices.numel(), slots);
  parallel(indices.numel(), rows.bytes / 2, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      rows.copy(names[row], row);
  });
}

template <class Index> bool name_tokens(const Tensor &indices, int64_t tokens) {
  if (indices.numel() == 0)
    return true;
  const auto range = range_of(indices.const_data_ptr<Index>(), indices.numel());
  return range.least >= 0 && range.most < tokens;
}

template <class Index>
std::optional<Two> permute_by(const Tensor &tokens, const Tensor &indices, int64_t kept, bool padded) {
  if (padded && !name_tokens<Index>(indices, tokens.size(0)))
    return std::nullopt;
  const Tensor slots = at::empty({indices.numel()}, indices.options().dtype(at::kInt));
  const Tensor out = fresh({kept, tokens.size(1)}, tokens.options());
  const Rows rows{static_cast<const char *>(tokens.const_data_ptr()), static_cast<char *>(out.mutable_data_ptr()),
                  tokens.size(1) * static_cast<int64_t>(tokens.element_size()), kept, streamed(out, tokens.size(1))};
  padded ? copy_named<Index>(indices, rows, slots.mutable_data_ptr<int32_t>())
         : copy_sorted<Index>(indices, rows, slots.mutable_data_ptr<int32_t>());
  return Two(out, slots);
}

Two permute(const Tensor &tokens_, const Tensor &indices_, int64_t kept, bool padded) {
  const int64_t count = indices_.numel();
  const bool integer = indices_.scalar_type() == at::kInt || indices_.scalar_type() == at::kLong;
  const bool fits = kept >= 0 && kept <= count && (!padded || kept == count) && tokens_.dim() == 2 &&
                    (padded || count == tokens_.size(0) * slots_per_token(indices_));
  const bool small = std::max(count, tokens_.size(0)) < std::numeric_limits<int32_t>::max();
  if (!integer || !fits || !small)
    return call_reference(permute_operator(), tokens_, indices_, kept, padded);
  const Tensor tokens = tokens_.contiguous(), indices = indices_.contiguous();
  const auto result = indices.scalar_type() == at::kLong ? permute_by<int64_t>(tokens, indices, kept, padded)
                                                         : permute_by<int32_t>(tokens, indices, kept, padded);
  return result ? *result : call_reference(permute_operator(), tokens_, indices_, kept, padded);
}

struct PermuteFunction : torch::autograd::Function<PermuteFunction> {
  static variable_list forward(AutogradContext *ctx, const Tensor &tokens, const Tensor &indices, c10::SymInt rows,
                               bool padded) {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto [permuted, slots] = permute_operator().call(tokens, indices, std::move(rows), padded);
    ctx->saved_data["tokens"] = tokens.sym_size(0);
    ctx->saved_data["topk"] = padded || indices.dim() != 2 ? c10::SymInt(1) : indices.sym_size(1);
    ctx->saved_data["padded"] = padded;
    ctx->save_for_backward({slots});
    ctx->mark_non_differentiable({slots});
    return {permuted, slots};
  }

  static variable_list backward(AutogradContext *ctx, const variable_list &grads) {
    const Tensor slots = ctx->get_saved_variables()[0];
    const Tensor dtokens =
        unpermute_operator().call(grads[0], slots, std::nullopt, ctx->saved_data["tokens"].toSymInt(),
                                  ctx->saved_data["topk"].toSymInt(), ctx->saved_data["padded"].toBool());
    return {dtokens, Tensor(), Tensor(), Tensor()};
  }
};

Two permute_recorded(const Tensor &tokens, const Tensor &indices, c10::SymInt rows, bool padded) {
  if (needs_gradient(tokens)) {
    const auto results = PermuteFunction::apply(tokens, indices, std::move(rows), padded);
    return {results[0], results[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  return permute_operator().call(tokens, indices, std::move(rows), padded);
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, m) { m.impl("npu_fused_moe_token_permute", permute); }

TORCH_LIBRARY_IMPL(mindspeed, AutogradCPU, m) { m.impl("npu_fused_moe_token_permute", permute_recorded); }

} // namespace
} // namespace mindspeed

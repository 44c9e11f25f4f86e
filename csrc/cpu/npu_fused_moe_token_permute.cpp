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

// Every row is the token that its index names. False if one names none.
template <class Index>
bool name_tokens(const Tensor &indices, int64_t tokens, int32_t *slots, std::vector<int32_t> &sources) {
  const Index *names = indices.const_data_ptr<Index>();
  for (size_t row = 0; row < sources.size(); ++row) {
    if (names[row] < 0 || names[row] >= tokens)
      return false;
    slots[row] = sources[row] = static_cast<int32_t>(names[row]);
  }
  return true;
}

// Rows by expert: `slots` says where each slot of a token went, `sources` which token each kept row is.
template <class Index>
void sort_slots(const Tensor &indices, int32_t *slots, std::vector<int32_t> &sources) {
  const uint32_t topk = static_cast<uint32_t>(slots_per_token(indices));
  const int32_t kept = static_cast<int32_t>(sources.size());
  sort_stably(indices.const_data_ptr<Index>(), indices.numel(), [&](int64_t slot, int32_t place) {
    slots[slot] = place;
    if (place < kept)
      sources[place] = static_cast<int32_t>(static_cast<uint32_t>(slot) / topk);
  });
}

Two permute(const Tensor &tokens_, const Tensor &indices_, int64_t rows, bool padded) {
  const int64_t count = indices_.numel(), bytes = tokens_.size(1) * static_cast<int64_t>(tokens_.element_size());
  const bool integer = indices_.scalar_type() == at::kInt || indices_.scalar_type() == at::kLong;
  const bool fits = rows >= 0 && rows <= count && (!padded || rows == count);
  const bool small = std::max(count, tokens_.size(0)) < std::numeric_limits<int32_t>::max();
  const auto reference = [&] { return call_reference(permute_operator(), tokens_, indices_, rows, padded); };
  if (!integer || !fits || !small)
    return reference();
  const Tensor tokens = tokens_.contiguous(), indices = indices_.contiguous();
  const Tensor slots = at::empty({count}, indices.options().dtype(at::kInt));
  std::vector<int32_t> sources(rows);
  int32_t *places = slots.mutable_data_ptr<int32_t>();
  const bool wide = indices.scalar_type() == at::kLong;
  if (!padded)
    wide ? sort_slots<int64_t>(indices, places, sources) : sort_slots<int32_t>(indices, places, sources);
  else if (!(wide ? name_tokens<int64_t>(indices, tokens.size(0), places, sources)
                  : name_tokens<int32_t>(indices, tokens.size(0), places, sources)))
    return reference();
  const Tensor out = fresh({rows, tokens.size(1)}, tokens.options());
  gather_rows(static_cast<const char *>(tokens.const_data_ptr()), static_cast<char *>(out.mutable_data_ptr()), rows,
              bytes, streamed(out, out.size(1)), [&](int64_t row) { return int64_t{sources[row]}; });
  return {out, slots};
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

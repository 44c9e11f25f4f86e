// Merge of two attention results over disjoint keys; statistics and products in fp32, the result rounded once.
#include "memory.h"
#include "operators.h"
#include "pairs.h"
#include "reference.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string_view>
#include <vector>

namespace mindspeed {
namespace {

using Three = std::tuple<Tensor, Tensor, Tensor>;
using Update = Three(const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &,
                     const std::optional<Tensor> &, c10::string_view, bool);

const auto &update_op() {
  static const auto op = find_operator<Update>("mindspeed::npu_ring_attention_update");
  return op;
}

// Tokens whose statistics lie in memory as [heads, length, lanes] from `statistics`; token t has its `heads` results
// at `outputs` + t * `step`.
struct Segment {
  int64_t heads, length, statistics, outputs, step;
};

template <class T> struct Operands {
  const T *out1, *out2;
  const float *max1, *sum1, *max2, *sum2;
  T *out;
  float *maximum, *total;
  int64_t depth, lanes;
};

constexpr int64_t TOKENS = 32;

// Statistics of numbers [at, at + count), and the weights of the two sides.
template <class T> void merge_statistics(const Operands<T> &all, int64_t at, int64_t count, float *weight1, float *weight2) {
  const Floats lowest(-std::numeric_limits<float>::infinity()), zero(0.0f);
  for (int64_t i = 0; i < count; i += LANES) {
    const int64_t n = std::min(LANES, count - i);
    const Floats m1 = Floats::loadu(all.max1 + at + i, n), m2 = Floats::loadu(all.max2 + at + i, n);
    const Floats maximum = at::vec::maximum(m1, m2);
    // a side without a key has -inf; where both have, the difference is no number and both shares are zero
    const Floats seen = maximum > lowest;
    const Floats share1 = Floats::blendv(zero, Floats::loadu(all.sum1 + at + i, n) * exponential(m1 - maximum), seen);
    const Floats share2 = Floats::blendv(zero, Floats::loadu(all.sum2 + at + i, n) * exponential(m2 - maximum), seen);
    const Floats total = share1 + share2, some = total > zero;
    maximum.store(all.maximum + at + i, static_cast<int>(n));
    total.store(all.total + at + i, static_cast<int>(n));
    Floats::blendv(zero, share1 / total, some).store(weight1 + i);
    Floats::blendv(zero, share2 / total, some).store(weight2 + i);
  }
}

template <bool Streamed, class T>
void merge_row(const Operands<T> &all, int64_t start, float weight1, float weight2) {
  const Pair first(weight1), second(weight2);
  const T *out1 = all.out1 + start, *out2 = all.out2 + start;
  T *out = all.out + start;
  each_pair(0, all.depth, [&](int64_t i, auto extent) {
    write_pair<Streamed>(out + i, load_pair(out1 + i, extent) * first + load_pair(out2 + i, extent) * second, extent);
  });
}

template <bool Streamed, class T>
void merge_tokens(const Operands<T> &all, const Segment &segment, int64_t begin, int64_t end, float *weights) {
  const int64_t count = (end - begin) * all.lanes, row = padded(count);
  for (int64_t head = 0; head < segment.heads; ++head) {
    const int64_t at = segment.statistics + (head * segment.length + begin) * all.lanes;
    merge_statistics(all, at, count, weights + 2 * head * row, weights + (2 * head + 1) * row);
  }
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < segment.heads; ++head) {
      const float *weight = weights + 2 * head * row + (token - begin) * all.lanes;
      merge_row<Streamed>(all, segment.outputs + token * segment.step + head * all.depth, weight[0], weight[row]);
    }
}

template <class T> void merge(const Operands<T> &all, const std::vector<Segment> &segments, bool stream) {
  // blocks of tokens over all segments
  std::vector<int64_t> blocks{0};
  int64_t heads = 1;
  for (const Segment &segment : segments) {
    blocks.push_back(blocks.back() + (segment.length + TOKENS - 1) / TOKENS);
    heads = std::max(heads, segment.heads);
  }
  parallel(blocks.back(), TOKENS * heads * all.depth, [&](int64_t first, int64_t last) {
    std::vector<float> weights(2 * heads * padded(TOKENS * all.lanes));
    for (int64_t block = first; block < last; ++block) {
      const auto index = std::upper_bound(blocks.begin(), blocks.end(), block) - blocks.begin() - 1;
      const Segment &segment = segments[index];
      const int64_t begin = (block - blocks[index]) * TOKENS, end = std::min(begin + TOKENS, segment.length);
      if (stream) {
        merge_tokens<true>(all, segment, begin, end, weights.data());
      } else {
        merge_tokens<false>(all, segment, begin, end, weights.data());
      }
    }
  });
}

// Segments of TND outputs: statistics in the order of the tokens are one with a single head; else one per sequence.
// Empty if the ends do not end at the last token.
std::vector<Segment> packed_segments(const Tensor &out, int64_t lanes, const std::optional<Tensor> &ends) {
  const int64_t tokens = out.size(0), heads = out.size(1), depth = out.size(2);
  if (!ends.has_value())
    return {{1, tokens * heads, 0, 0, depth}};
  std::vector<Segment> segments;
  const Tensor list = ends->contiguous();
  int64_t start = 0;
  for (int64_t i = 0; i < list.numel(); ++i) {
    const int64_t end = list.const_data_ptr<int64_t>()[i];
    if (end < start || end > tokens)
      return {};
    segments.push_back({heads, end - start, start * heads * lanes, start * heads * depth, heads * depth});
    start = end;
  }
  return start == tokens ? segments : std::vector<Segment>();
}

// Segments of SBH outputs: one per sequence of the batch.
std::vector<Segment> batch_segments(const Tensor &out, const Tensor &statistics) {
  const int64_t batch = out.size(1), width = out.size(2), heads = statistics.size(1), length = statistics.size(2);
  std::vector<Segment> segments;
  for (int64_t b = 0; b < batch; ++b)
    segments.push_back({heads, length, b * heads * length * statistics.size(3), b * width, batch * width});
  return segments;
}

bool takes(const Tensor &out, const Tensor &statistics, const std::optional<Tensor> &ends) {
  return vectorizable(out.scalar_type()) && statistics.scalar_type() == at::kFloat && out.numel() > 0 &&
         (!ends.has_value() || (ends->scalar_type() == at::kLong && ends->device().is_cpu()));
}

Three update(const Tensor &out1_, const Tensor &max1_, const Tensor &sum1_, const Tensor &out2_, const Tensor &max2_,
             const Tensor &sum2_, const std::optional<Tensor> &ends, c10::string_view layout, bool seen) {
  std::vector<Segment> segments;
  if (takes(out1_, max1_, ends))
    segments = layout == "SBH" ? batch_segments(out1_, max1_) : packed_segments(out1_, max1_.size(2), ends);
  if (segments.empty())
    return call_reference(update_op(), out1_, max1_, sum1_, out2_, max2_, sum2_, ends, layout, seen);
  const Tensor out1 = out1_.contiguous(), out2 = out2_.contiguous(), max1 = max1_.contiguous(),
               sum1 = sum1_.contiguous(), max2 = max2_.contiguous(), sum2 = sum2_.contiguous();
  Tensor out = fresh(out1.sizes(), out1.options());
  Tensor maximum = at::empty(max1.sizes(), max1.options()), total = at::empty(max1.sizes(), max1.options());
  const int64_t depth = layout == "SBH" ? out.size(2) / max1.size(1) : out.size(2);
  MINDSPEED_WITH_TYPE(out.scalar_type(), [&] {
    const Operands<scalar_t> all{out1.const_data_ptr<scalar_t>(), out2.const_data_ptr<scalar_t>(),
                                 max1.const_data_ptr<float>(),    sum1.const_data_ptr<float>(),
                                 max2.const_data_ptr<float>(),    sum2.const_data_ptr<float>(),
                                 out.mutable_data_ptr<scalar_t>(), maximum.mutable_data_ptr<float>(),
                                 total.mutable_data_ptr<float>(), depth,
                                 max1.size(max1.dim() - 1)};
    merge(all, segments, streamed(out, depth));
  });
  return {out, maximum, total};
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) { library.impl("npu_ring_attention_update", update); }

} // namespace
} // namespace mindspeed

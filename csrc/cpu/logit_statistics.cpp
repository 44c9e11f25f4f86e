// Softmax statistics of the logits of tokens, and the logits' gradients in place of them; see mindspeed/ops/logit_statistics.py.
#include "memory.h"
#include "operators.h"
#include "reference.h"
#include "vectors.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

namespace mindspeed {
namespace {

using Statistics = std::tuple<Tensor, Tensor>(const Tensor &, const Tensor &, bool, bool);
using Gradient = void(Tensor &, const Tensor &, const Tensor &, const Tensor &, const Tensor &, bool, bool);

const auto &statistics_op() {
  static const auto op = find_operator<Statistics>("mindspeed::logit_statistics");
  return op;
}

const auto &gradient_op() {
  static const auto op = find_operator<Gradient>("mindspeed::logit_gradient");
  return op;
}

// Logits that stay in the first cache between the search for the largest one and the sums.
constexpr int64_t PIECE = 4096;

template <class T> float largest_of(const T *logits, int64_t count) {
  Floats found(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    found = at::vec::maximum(found, load(logits + i, Whole()));
  float largest = at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return at::vec::maximum(a, b); }, found);
  for (; i < count; ++i) { // a NaN is the largest
    const float value = static_cast<float>(logits[i]);
    largest = largest > value || std::isnan(largest) ? largest : value;
  }
  return largest;
}

// The exponential of this number is 0 in fp32. It takes the place of minus infinity in products with exponentials, because 0 times
// infinity is not a number.
constexpr float LEAST = -200.0f;

// Of one token: the sum of exponentials, that of logits and that of their products, all relative to the largest logit.
struct Sums {
  float largest = -std::numeric_limits<float>::infinity();
  double exponentials = 0, logits = 0, products = 0;
  int64_t count = 0;

  void move_to(float larger) {
    if (count > 0 && largest > -std::numeric_limits<float>::infinity()) {
      const double shift = static_cast<double>(largest) - static_cast<double>(larger), scale = std::exp(shift);
      products = (products + shift * exponentials) * scale;
      exponentials *= scale;
      logits += shift * static_cast<double>(count);
    }
    largest = larger;
  }

  template <bool Total, bool Expected, class T> void add(const T *piece, int64_t length) {
    const float other = largest_of(piece, length);
    if (std::isnan(other) || other > largest) // a NaN stays
      move_to(other);
    count += length;
    if (largest == -std::numeric_limits<float>::infinity()) {
      logits = largest;
      return;
    }
    const Floats base(largest);
    const auto found = sums<3>(length, [&](auto &totals, int64_t i, auto extent) {
      const Floats x = load(piece + i, extent) - base;
      const Floats e = kept(exponential(x), extent); // what lies behind the row is loaded as 0
      totals[0] = totals[0] + e;
      if constexpr (Total)
        totals[1] = totals[1] + kept(x, extent);
      if constexpr (Expected)
        totals[2] = totals[2] + at::vec::maximum(x, Floats(LEAST)) * e;
    });
    exponentials += found[0];
    logits += found[1];
    products += found[2];
  }

  static Floats kept(Floats values, Whole) { return values; }
  static Floats kept(Floats values, Part part) {
    return Floats::set(Floats(0.0f), values, part.count);
  }
};

void require_labels(const Tensor &rows, int64_t width) {
  const auto *label = rows.const_data_ptr<int64_t>();
  for (int64_t token = 0; token < rows.numel(); ++token)
    TORCH_CHECK_INDEX(label[token] < width, "the label of token ", token, " is ", label[token], ", but there are ", width, " logits");
}

template <bool Total, bool Expected, class T>
void statistics_of(const T *logits, const int64_t *rows, int64_t tokens, int64_t width, float *largest, float *sums) {
  parallel(tokens, 4 * width, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const T *row = logits + token * width;
      Sums found;
      for (int64_t start = 0; start < width; start += PIECE)
        found.add<Total, Expected>(row + start, std::min(PIECE, width - start));
      largest[token] = found.largest;
      sums[token] = static_cast<float>(found.exponentials);
      sums[tokens + token] = rows[token] < 0 ? 0.0f : static_cast<float>(row[rows[token]]);
      sums[2 * tokens + token] = Total ? static_cast<float>(found.logits) : 0.0f;
      sums[3 * tokens + token] = Expected ? static_cast<float>(found.products) : 0.0f;
    }
  });
}

std::tuple<Tensor, Tensor> statistics(const Tensor &logits_, const Tensor &rows_, bool total, bool expected) {
  if (!vectorizable(logits_.scalar_type()) || logits_.numel() == 0)
    return call_reference(statistics_op(), logits_, rows_, total, expected);
  const Tensor logits = logits_.contiguous(), rows = rows_.contiguous();
  const int64_t tokens = logits.size(0), width = logits.size(1);
  require_labels(rows, width);
  const auto options = logits.options().dtype(at::kFloat);
  Tensor largest = at::empty({tokens}, options), sums = at::empty({4, tokens}, options);
  MINDSPEED_WITH_TYPE(logits.scalar_type(), [&] {
    const auto *from = logits.const_data_ptr<scalar_t>();
    const auto *at = rows.const_data_ptr<int64_t>();
    auto *top = largest.mutable_data_ptr<float>(), *to = sums.mutable_data_ptr<float>();
    if (expected)
      total ? statistics_of<true, true>(from, at, tokens, width, top, to) : statistics_of<false, true>(from, at, tokens, width, top, to);
    else
      total ? statistics_of<true, false>(from, at, tokens, width, top, to) : statistics_of<false, false>(from, at, tokens, width, top, to);
  });
  return {largest, sums};
}

template <class T>
void gradient_of(T *logits, const float *largest, const float *logs, const float *factors, const int64_t *rows, int64_t tokens,
                 int64_t width, bool total, bool expected) {
  parallel(tokens, 4 * width, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T *row = logits + token * width;
      const float constant = factors[token], slope = expected ? factors[3 * tokens + token] : 0.0f;
      const float each = total ? factors[2 * tokens + token] : 0.0f;
      const Floats base(largest[token]), log(logs[token]);
      const auto value = [&](Floats x) {
        const Floats z = at::vec::maximum(x - base, Floats(LEAST));
        return at::vec::fmadd(exponential(z - log), at::vec::fmadd(z, Floats(slope), Floats(constant)), Floats(each));
      };
      const int64_t label = rows[token];
      const float at_label = label < 0 ? 0.0f : static_cast<float>(row[label]);
      each_vector(0, width, [&](int64_t i, auto extent) { store(row + i, value(load(row + i, extent)), extent); });
      if (label >= 0) {
        float lanes[LANES];
        value(Floats(at_label)).store(lanes);
        row[label] = static_cast<T>(lanes[0] + factors[tokens + token]);
      }
    }
  });
}

void gradient(Tensor &logits, const Tensor &largest, const Tensor &logs, const Tensor &factors, const Tensor &rows, bool total,
              bool expected) {
  if (!vectorizable(logits.scalar_type()) || logits.numel() == 0 || !logits.is_contiguous()) {
    call_reference(gradient_op(), logits, largest, logs, factors, rows, total, expected);
    return;
  }
  const Tensor tops = largest.contiguous(), sums = logs.contiguous(), all = factors.contiguous(), at = rows.contiguous();
  require_labels(at, logits.size(1));
  MINDSPEED_WITH_TYPE(logits.scalar_type(), [&] {
    gradient_of(logits.mutable_data_ptr<scalar_t>(), tops.const_data_ptr<float>(), sums.const_data_ptr<float>(),
                all.const_data_ptr<float>(), at.const_data_ptr<int64_t>(), logits.size(0), logits.size(1), total, expected);
  });
}

TORCH_LIBRARY_IMPL(mindspeed, CPU, library) {
  library.impl("logit_statistics", statistics);
  library.impl("logit_gradient", gradient);
}

} // namespace
} // namespace mindspeed

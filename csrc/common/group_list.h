// How the rows of one tensor belong to consecutive groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace mindspeed {

// Where each group begins, and the end of the last. Nothing unless they cover `rows` rows one after the other.
inline std::optional<std::vector<int64_t>> group_bounds(const at::Tensor &groups, int64_t rows, bool cumulative) {
  if (groups.scalar_type() != at::kLong || groups.dim() != 1 || groups.numel() == 0)
    return std::nullopt;
  const auto values = groups.accessor<int64_t, 1>();
  std::vector<int64_t> bounds{0};
  bounds.reserve(values.size(0) + 1);
  for (int64_t e = 0; e < values.size(0); ++e) {
    bounds.push_back(cumulative ? values[e] : bounds.back() + values[e]);
    if (bounds[e + 1] < bounds[e])
      return std::nullopt;
  }
  if (bounds.back() != rows)
    return std::nullopt;
  return bounds;
}

} // namespace mindspeed

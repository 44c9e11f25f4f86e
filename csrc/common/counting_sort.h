// Stable order of small integers by counting them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace mindspeed {

template <class Number> struct Range {
  Number least, most;
};

// Of at least one number. A loop that the compiler makes wide, which it does not of std::minmax_element.
template <class Number> Range<Number> range_of(const Number *numbers, int64_t count) {
  Range<Number> range{numbers[0], numbers[0]};
  for (int64_t i = 0; i < count; ++i) {
    range.least = std::min(range.least, numbers[i]);
    range.most = std::max(range.most, numbers[i]);
  }
  return range;
}

// placed(i, place) for each of `count` keys: its place in ascending order, equal keys keeping theirs.
template <class Key, class Placed> void sort_stably(const Key *keys, int64_t count, Placed placed) {
  if (count == 0)
    return;
  const auto [least, most] = range_of(keys, count);
  const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
  if (range < static_cast<uint64_t>(4 * count + 65536)) {
    const Key low = least;
    std::vector<int32_t> next(range + 2);
    for (int64_t i = 0; i < count; ++i)
      ++next[keys[i] - low + 1];
    std::partial_sum(next.begin(), next.end(), next.begin());
    for (int64_t i = 0; i < count; ++i)
      placed(i, next[keys[i] - low]++);
    return;
  }
  std::vector<int32_t> order(count);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [keys](int32_t a, int32_t b) { return keys[a] < keys[b]; });
  for (int64_t place = 0; place < count; ++place)
    placed(int64_t{order[place]}, static_cast<int32_t>(place));
}

} // namespace mindspeed

// Stable order of small integers by counting them.
#pragma once

#include "operators.h"

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <utility>
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

// placed(i, place) for each of `count` keys: its place in ascending order, equal keys keeping theirs. Keys in a narrow range
// are counted, by every thread in its own part of them, and placed by the same threads, in ascending order of i within a
// part; `cost` is that of one call, in numbers of a stream.
template <class Key, class Placed> void sort_stably(const Key *keys, int64_t count, int64_t cost, Placed placed) {
  if (count == 0)
    return;
  const auto [least, most] = range_of(keys, count);
  const int64_t parts = std::clamp<int64_t>(count * cost / GRAIN, 1, at::get_num_threads());
  const uint64_t range = static_cast<uint64_t>(most) - static_cast<uint64_t>(least);
  if (range >= static_cast<uint64_t>(4 * count + 65536) / parts) {
    std::vector<int32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [keys](int32_t a, int32_t b) { return keys[a] < keys[b]; });
    for (int64_t place = 0; place < count; ++place)
      placed(int64_t{order[place]}, static_cast<int32_t>(place));
    return;
  }
  const Key low = least;
  const int64_t kinds = static_cast<int64_t>(range) + 1;
  std::vector<int32_t> next(parts * kinds);
  const auto each = [&](auto body) {
    at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part)
        for (int64_t i = part * count / parts; i < (part + 1) * count / parts; ++i)
          body(i, next[part * kinds + (keys[i] - low)]);
    });
  };
  each([](int64_t, int32_t &counter) { ++counter; });
  int32_t place = 0;
  for (int64_t kind = 0; kind < kinds; ++kind)
    for (int64_t part = 0; part < parts; ++part)
      place += std::exchange(next[part * kinds + kind], place);
  each([&](int64_t i, int32_t &counter) { placed(i, counter++); });
}

} // namespace mindspeed

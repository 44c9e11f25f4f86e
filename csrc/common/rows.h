// Rows of tensors as bytes, copied whole.
#pragma once

#include "operators.h"
#include "pairs.h"

#include <cstring>

namespace mindspeed {

// Rows picked one by one are invisible to the hardware's prefetcher: ask for one before it is needed. Into the second
// cache: the first one has so few places for lines on their way that whoever asks would wait for them.
inline void ask_for(const void *row, int64_t bytes) {
  for (int64_t byte = 0; byte < bytes; byte += 64)
    __builtin_prefetch(static_cast<const char *>(row) + byte, 0, 2);
}

// Ask for the pairs that a loop reads at these places later. The hardware's prefetcher begins anew with every page, and sees
// nothing to do while a row is read again from the cache.
template <class... T> void ask_for_pairs(const T *...places) {
  (ask_for(places, LENGTH * static_cast<int64_t>(sizeof(T))), ...);
}

// How many steps of `bytes` each to ask ahead.
inline int64_t steps_ahead(int64_t bytes, int64_t most) {
  constexpr int64_t asked = int64_t{32} << 10;
  return std::clamp<int64_t>(asked / std::max<int64_t>(bytes, 1), 1, most);
}

inline void copy_row(const char *from, char *to, int64_t bytes) { std::memcpy(to, from, bytes); }

// Past the caches; `to` and `bytes` are multiples of 64.
inline void stream_row(const char *from, char *to, int64_t bytes) {
#if defined(CPU_CAPABILITY_AVX512)
  for (int64_t byte = 0; byte < bytes; byte += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i *>(to + byte), _mm512_loadu_si512(from + byte));
#else
  copy_row(from, to, bytes);
#endif
}

// to[i] = from[source(i)] for i in [0, count), rows of `bytes` bytes; a negative source gives zeros.
template <class Source>
void gather_rows(const char *from, char *to, int64_t count, int64_t bytes, bool stream, Source source) {
  const int64_t ahead = steps_ahead(bytes, 8);
  parallel(count, bytes / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + ahead < end && source(i + ahead) >= 0)
        ask_for(from + source(i + ahead) * bytes, bytes);
      if (source(i) < 0)
        std::memset(to + i * bytes, 0, bytes);
      else if (stream)
        stream_row(from + source(i) * bytes, to + i * bytes, bytes);
      else
        copy_row(from + source(i) * bytes, to + i * bytes, bytes);
    }
  });
}

} // namespace mindspeed

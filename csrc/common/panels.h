// Panels of a matrix as the product kernels read them: for each step of the sum, one 32-bit word per row (or column).
//
// A word holds what one instruction multiplies at once: two bf16, one fp32, or four int8 along the sum. What the matrix
// lacks, at its edges, is zero. The source may have any strides; where neither is one it is read word by word.
#pragma once

#include "grouped_product.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__)
#error "this source needs AVX-512: mindspeed/ops/instruction_sets.yaml"
#endif
#include <immintrin.h>

namespace mindspeed {

inline __mmask16 first16(int64_t count) {
  return count >= 16 ? 0xFFFF : static_cast<__mmask16>((1u << std::max<int64_t>(count, 0)) - 1);
}

inline __mmask32 first32(int64_t count) {
  return count >= 32 ? 0xFFFFFFFFu : static_cast<__mmask32>((1u << std::max<int64_t>(count, 0)) - 1);
}

inline __mmask64 first64(int64_t count) {
  return count >= 64 ? ~0ull : static_cast<__mmask64>((1ull << std::max<int64_t>(count, 0)) - 1);
}

// fp32 of sixteen numbers, those beyond the mask zero.
inline __m512 load_floats(const float *from, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, from); }

inline __m512 load_floats(const c10::BFloat16 *from, __mmask16 mask) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

inline __m512 load_floats(const c10::Half *from, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, from));
}

// Words of one fp32 number each.
template <class Number> struct Numbers {
  using Element = Number;
  static constexpr int64_t per_word = 1;
  static void across(const Number *at, int64_t, int64_t, __mmask32 outer, __m512i &low, __m512i &high) {
    low = _mm512_castps_si512(load_floats(at, static_cast<__mmask16>(outer)));
    high = _mm512_castps_si512(load_floats(at + 16, static_cast<__mmask16>(outer >> 16)));
  }
  static __m512i along(const Number *at, int64_t inner) {
    return _mm512_castps_si512(load_floats(at, first16(inner)));
  }
  static uint32_t word(const Number *at, int64_t, int64_t) {
    const float value = static_cast<float>(*at);
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
  }
};

// Words of two bf16 numbers that follow one another along the sum.
struct Pairs {
  using Element = c10::BFloat16;
  static constexpr int64_t per_word = 2;
  static void across(const Element *at, int64_t stride, int64_t inner, __mmask32 outer, __m512i &low, __m512i &high) {
    const __m512i even = _mm512_maskz_loadu_epi16(outer, at);
    const __m512i odd = inner < 2 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(outer, at + stride);
    low = _mm512_permutex2var_epi16(even, interleaved(0), odd);
    high = _mm512_permutex2var_epi16(even, interleaved(16), odd);
  }
  // Indices of the words from `first` of two vectors of halves, one half of each.
  static __m512i interleaved(int first) {
    const __m512i words = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                           _mm512_set1_epi32(first));
    return _mm512_or_si512(words, _mm512_slli_epi32(_mm512_add_epi32(words, _mm512_set1_epi32(32)), 16));
  }
  static __m512i along(const Element *at, int64_t inner) { return _mm512_maskz_loadu_epi16(first32(inner), at); }
  static uint32_t word(const Element *at, int64_t stride, int64_t inner) {
    return at[0].x | (inner < 2 ? 0u : static_cast<uint32_t>(at[stride].x) << 16);
  }
};

// Words of four int8 numbers along the sum; with Flip, of four numbers 128 greater, as unsigned ones.
template <bool Flip> struct Quads {
  using Element = int8_t;
  static constexpr int64_t per_word = 4;
  static constexpr uint32_t sign = Flip ? 0x80808080u : 0u;
  static __m512i flip(__m512i words) { return _mm512_xor_si512(words, _mm512_set1_epi32(static_cast<int>(sign))); }
  static void across(const Element *at, int64_t stride, int64_t inner, __mmask32 outer, __m512i &low, __m512i &high) {
    low = sixteen(at, stride, inner, static_cast<__mmask16>(outer));
    high = sixteen(at + 16, stride, inner, static_cast<__mmask16>(outer >> 16));
  }
  static __m512i sixteen(const Element *at, int64_t stride, int64_t inner, __mmask16 outer) {
    __m512i words = _mm512_setzero_si512();
    for (int64_t i = std::min<int64_t>(inner, 4) - 1; i >= 0; --i) {
      const __m512i bytes = _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(outer, at + i * stride));
      words = _mm512_or_si512(_mm512_slli_epi32(words, 8), bytes);
    }
    return flip(words);
  }
  static __m512i along(const Element *at, int64_t inner) {
    return flip(_mm512_maskz_loadu_epi8(first64(inner), at));
  }
  static uint32_t word(const Element *at, int64_t stride, int64_t inner) {
    uint32_t bits = 0;
    for (int64_t i = 0; i < std::min<int64_t>(inner, 4); ++i)
      bits |= static_cast<uint32_t>(static_cast<uint8_t>(at[i * stride])) << (8 * i);
    return bits ^ sign;
  }
};

// Sixteen vectors of sixteen words, transposed.
inline void transpose16(__m512i (&rows)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    rows[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    rows[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
    t[8 + i] = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xDD);
    t[12 + i] = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xDD);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    rows[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    rows[8 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xDD);
    rows[4 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    rows[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xDD);
  }
}

// Panels of `Width` outer entries each, one after the other: word (outer, step) of the source is at
// (outer / Width) * steps * Width + step * Width + outer % Width.
template <int Width> struct Panels {
  static_assert(Width == 8 || Width % 16 == 0, "sixteen words fill two panels or a part of one");
  uint32_t *words;
  int64_t steps;
  int64_t outer; // entries that exist; what pads the last panel is written too, where it is of the sixteen at hand

  void put(int64_t first, int64_t step, __m512i column) const {
    uint32_t *at = words + first / Width * steps * Width + step * Width + first % Width;
    if (Width != 8) {
      _mm512_storeu_si512(at, column);
      return;
    }
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(at), _mm512_castsi512_si256(column));
    if (first + 8 < outer)
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(at + steps * 8), _mm512_extracti64x4_epi64(column, 1));
  }
};

// Sixteen outer entries from `first`, read along the sum.
template <class Source, int Width>
void pack_along(const typename Source::Element *from, int64_t stride, int64_t inner, int64_t first,
                const Panels<Width> &to) {
  const int64_t count = std::min<int64_t>(16, to.outer - first);
  for (int64_t step = 0; step < to.steps; step += 16) {
    const int64_t done = step * Source::per_word;
    __m512i rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
      rows[i] = i < count ? Source::along(from + i * stride + done, inner - done) : _mm512_setzero_si512();
    transpose16(rows);
    const int64_t here = std::min<int64_t>(16, to.steps - step);
    for (int64_t i = 0; i < here; ++i)
      to.put(first, step + i, rows[i]);
  }
}

// Outer entries that lie side by side, read across: the whole width of one step before the next one, as memory has them.
template <class Source, int Width>
void pack_across(const typename Source::Element *from, int64_t stride, int64_t inner, const Panels<Width> &to) {
  constexpr int64_t ahead = 16; // steps; the hardware does not see that rows of a wide matrix follow one another
  for (int64_t step = 0; step < to.steps; ++step) {
    const int64_t done = step * Source::per_word;
    const auto *row = from + done * stride;
    for (int64_t first = 0; first < to.outer; first += 32) {
      for (int64_t i = 0; i < Source::per_word; ++i)
        _mm_prefetch(reinterpret_cast<const char *>(row + (ahead * Source::per_word + i) * stride + first), _MM_HINT_T0);
      __m512i low, high;
      Source::across(row + first, stride, inner - done, first32(to.outer - first), low, high);
      to.put(first, step, low);
      if (first + 16 < to.outer)
        to.put(first + 16, step, high);
    }
  }
}

// Sixteen outer entries from `first` of a matrix that is contiguous nowhere.
template <class Source, int Width>
void pack_words(const typename Source::Element *from, int64_t outer_stride, int64_t stride, int64_t inner,
                int64_t first, const Panels<Width> &to) {
  const int64_t count = std::min<int64_t>(16, to.outer - first);
  for (int64_t step = 0; step < to.steps; ++step) {
    const int64_t done = step * Source::per_word;
    alignas(64) uint32_t column[16] = {};
    for (int64_t i = 0; i < count; ++i)
      column[i] = Source::word(from + i * outer_stride + done * stride, stride, inner - done);
    to.put(first, step, _mm512_load_si512(column));
  }
}

// Outer entries [begin, begin + outer) and the part [skip, skip + inner) of the sum.
template <class Source, int Width>
void pack(const Operand &operand, int64_t begin, int64_t outer, int64_t skip, int64_t inner, uint32_t *words) {
  using Element = typename Source::Element;
  const Panels<Width> to{words, (inner + Source::per_word - 1) / Source::per_word, outer};
  const int64_t stride = operand.inner_stride;
  const Element *from = static_cast<const Element *>(operand.data) + begin * operand.outer_stride + skip * stride;
  if (operand.outer_stride == 1) {
    pack_across<Source, Width>(from, stride, inner, to);
    return;
  }
  for (int64_t first = 0; first < outer; first += 16, from += 16 * operand.outer_stride)
    if (stride == 1)
      pack_along<Source, Width>(from, operand.outer_stride, inner, first, to);
    else
      pack_words<Source, Width>(from, operand.outer_stride, stride, inner, first, to);
}

} // namespace mindspeed

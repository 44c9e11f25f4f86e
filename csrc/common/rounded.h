// Sixteen fp32 numbers stored as fp32, bf16, fp16 or int8, rounded once to nearest even.
#pragma once

#include "panels.h"

namespace mindspeed {

#if defined(__AVX512BF16__)
// Numbers below the smallest normal one become zero.
inline __m256i rounded(__m512 values) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values)); }
#else
// Rounded to nearest even; what is not a number stays so.
inline __m256i rounded(__m512 values) {
  const __m512i bits = _mm512_castps_si512(values);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
  const __mmask16 unordered = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
  const __m512i result = _mm512_mask_mov_epi32(up, unordered, _mm512_set1_epi32(0x7FC00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(result, 16));
}
#endif

// Whole vectors are stored without a mask, which costs more than the store itself on some processors.
inline void store(float *to, __m512 values, __mmask16 mask) {
  if (mask == 0xFFFF)
    _mm512_storeu_ps(to, values);
  else
    _mm512_mask_storeu_ps(to, mask, values);
}

inline void store_halves(void *to, __m256i values, __mmask16 mask) {
  if (mask == 0xFFFF)
    _mm256_storeu_si256(static_cast<__m256i *>(to), values);
  else
    _mm256_mask_storeu_epi16(to, mask, values);
}

inline void store(c10::BFloat16 *to, __m512 values, __mmask16 mask) { store_halves(to, rounded(values), mask); }

inline void store(c10::Half *to, __m512 values, __mmask16 mask) {
  store_halves(to, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), mask);
}

// Kept between -128 and 127.
inline void store(int8_t *to, __m512 values, __mmask16 mask) {
  const __m512 kept = _mm512_min_ps(_mm512_set1_ps(127.0f), _mm512_max_ps(_mm512_set1_ps(-128.0f), values));
  _mm_mask_storeu_epi8(to, mask, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(kept)));
}

} // namespace mindspeed

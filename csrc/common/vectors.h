// Vectors of fp32 numbers, loaded from and stored to memory of fp32, bf16 or fp16 with one rounding.
//
// at::vec::Vectorized gives the arithmetic on every processor; what AVX-512 does in fewer instructions is written here,
// behind guards. Products and sums are rounded one by one (-ffp-contract=off) unless fmadd is called.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <tuple>
#include <type_traits>

namespace mindspeed {

using Floats = at::vec::Vectorized<float>;
constexpr int64_t LANES = Floats::size();

// How much of a vector an access covers: all lanes, or the first few at the end of a row.
struct Whole {};
struct Part {
  int64_t count;
};

inline Floats load(const float *from, Whole) { return Floats::loadu(from); }
inline Floats load(const float *from, Part part) { return Floats::loadu(from, part.count); }

inline void store(float *to, Floats values, Whole) { values.store(to); }
inline void store(float *to, Floats values, Part part) { values.store(to, part.count); }

#if defined(CPU_CAPABILITY_AVX512)

inline __m256i halves(const void *from, Whole) { return _mm256_loadu_si256(static_cast<const __m256i *>(from)); }

inline __mmask16 first(Part part) { return static_cast<__mmask16>((1u << part.count) - 1); }

inline __m256i halves(const void *from, Part part) { return _mm256_maskz_loadu_epi16(first(part), from); }

template <class Extent> Floats load(const c10::BFloat16 *from, Extent extent) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(from, extent)), 16));
}

template <class Extent> Floats load(const c10::Half *from, Extent extent) {
  return _mm512_cvtph_ps(halves(from, extent));
}

inline __m256i narrowed(Floats values, c10::BFloat16) {
#if defined(__AVX512BF16__)
  // one instruction; numbers below the smallest normal one become zero
  return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(values));
#else
  return at::vec::cvtfp32_bf16(static_cast<__m512>(values));
#endif
}

inline __m256i narrowed(Floats values, c10::Half) {
  return _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

template <class T> void store(T *to, Floats values, Whole) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), narrowed(values, T()));
}

template <class T> void store(T *to, Floats values, Part part) {
  _mm256_mask_storeu_epi16(to, first(part), narrowed(values, T()));
}

// Past the caches, for results that no cache can hold; `to` is aligned to the bytes written.
inline void stream(float *to, Floats values) { _mm512_stream_ps(to, values); }

template <class T> void stream(T *to, Floats values) {
  _mm256_stream_si256(reinterpret_cast<__m256i *>(to), narrowed(values, T()));
}

#else

template <class T> Floats load(const T *from, Whole) {
  Floats values;
  at::vec::load_to_float<T>(from, values);
  return values;
}

template <class T> Floats load(const T *from, Part part) {
  return std::get<0>(at::vec::convert_to_float<T>(at::vec::Vectorized<T>::loadu(from, part.count)));
}

template <class T> void store(T *to, Floats values, Part part) {
  at::vec::convert_from_float<T>(values, values).store(to, part.count);
}

template <class T> void store(T *to, Floats values, Whole) { store(to, values, Part{LANES}); }

template <class T> void stream(T *to, Floats values) { store(to, values, Whole()); }

#endif

// Stores past the caches if `Streamed`; a part of a vector goes the usual way.
template <bool Streamed, class T, class Extent>
void write(T *to, Floats values, Extent extent) {
  if constexpr (Streamed && std::is_same_v<Extent, Whole>) {
    stream(to, values);
  } else {
    store(to, values, extent);
  }
}

// body(i, extent) for each vector of [begin, end); the last one may be a part.
template <class Body> void each_vector(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + LANES <= end; i += LANES)
    body(i, Whole());
  if (i < end)
    body(i, Part{end - i});
}

inline float sum_of_lanes(Floats values) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_reduce_add_ps(values);
#else
  return at::vec::vec_reduce_all<float>([](Floats a, Floats b) { return a + b; }, values);
#endif
}

// Sums over [0, count): body(accumulators, i, extent) adds to N vectors. Blocks of 4096 numbers are summed in fp32, in
// four independent chains, and the blocks in fp64, so that long rows keep their precision.
template <int N, class Body>
std::array<double, N> sums(int64_t count, Body body) {
  constexpr int64_t BLOCK = 4096;
  std::array<double, N> totals{};
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t end = std::min(start + BLOCK, count);
    std::array<Floats, N> chains[4];
    for (auto& chain : chains)
      chain.fill(Floats(0.0f));
    int64_t i = start;
    for (; i + 4 * LANES <= end; i += 4 * LANES)
      for (int chain = 0; chain < 4; ++chain)
        body(chains[chain], i + chain * LANES, Whole());
    each_vector(i, end, [&](int64_t at, auto extent) { body(chains[0], at, extent); });
    for (int n = 0; n < N; ++n)
      totals[n] += sum_of_lanes((chains[0][n] + chains[1][n]) + (chains[2][n] + chains[3][n]));
  }
  return totals;
}

// exp(x) with an error below 2 ulp.
inline Floats exponential(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  // 2^n exp(r) with r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2]; a NaN passes through both clamps
  const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(104.0f), _mm512_max_ps(_mm512_set1_ps(-104.0f), x));
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficient));
  p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
#else
  return x.exp();
#endif
}

#if defined(CPU_CAPABILITY_AVX512)
// 1 / (1 + e), where one step of Newton doubles the 14 bits of the estimate.
inline Floats share_of_one(__m512 e) {
  const __m512 d = _mm512_add_ps(e, _mm512_set1_ps(1.0f)), estimate = _mm512_rcp14_ps(d);
  return _mm512_mul_ps(estimate, _mm512_fnmadd_ps(d, estimate, _mm512_set1_ps(2.0f)));
}
#endif

// 1 / (1 + exp(-x)) with an error below 4 ulp; below x = -87 it stays at the smallest normal numbers.
inline Floats sigmoid(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  // exp(-x) = 2^n 2^r with r = -x / ln 2 - n in [-1/2, 1/2], the factor -1 / ln 2 in two parts; a NaN passes the clamps
  const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(87.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  const __m512 factor = _mm512_set1_ps(-1.44269502f), rest = _mm512_set1_ps(-1.92596299e-8f);
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, factor), _MM_FROUND_TO_NEAREST_INT);
  const __m512 r = _mm512_fmadd_ps(clamped, rest, _mm512_fmsub_ps(clamped, factor, n));
  __m512 p = _mm512_set1_ps(1.535920892e-4f);
  for (float c : {1.339262701e-3f, 9.618384764e-3f, 5.550347269e-2f, 2.402264476e-1f, 6.931471825e-1f, 1.0f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return share_of_one(_mm512_scalef_ps(p, n));
#else
  return Floats(1.0f) / (Floats(1.0f) + (Floats(0.0f) - x).exp());
#endif
}

// The same for what is rounded to T of 16 bits: with a relative error of 2^-17, or of 2^-12 for bf16.
template <class T> Floats coarse_sigmoid(Floats x) {
#if defined(CPU_CAPABILITY_AVX512)
  // exp(-x) = 2^t, of which scalef takes the integer below t and the polynomial the rest
  if constexpr (std::is_same_v<T, c10::BFloat16>) { // it waits for products and estimates: as few as do, and no clamp
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f));
    const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
    __m512 p = _mm512_set1_ps(0.078024515f);
    for (float c : {0.22606719f, 0.69583352f, 0.99992522f})
      p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_rcp14_ps(_mm512_add_ps(_mm512_scalef_ps(p, t), _mm512_set1_ps(1.0f)));
  }
  const __m512 t = _mm512_min_ps(_mm512_set1_ps(126.0f), _mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f)));
  const __m512 r = _mm512_reduce_ps(t, _MM_FROUND_TO_NEG_INF);
  __m512 p = _mm512_set1_ps(0.01353417f);
  for (float c : {0.05201146f, 0.24144276f, 0.69300383f, 1.0000025f})
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
  return share_of_one(_mm512_scalef_ps(p, t));
#else
  return sigmoid(x);
#endif
}

} // namespace mindspeed

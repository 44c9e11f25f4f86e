// Pairs of fp32 vectors, loaded from and stored to memory of fp32, bf16 or fp16 with one rounding.
//
// A pair holds LENGTH neighbours. For bf16 on AVX-512 its vectors are the even and the odd ones, which one instruction
// each splits; otherwise the first and the second half. Arrays of one type therefore always match, and arrays of fp32
// that only kernels see (`load_raw`, `store_raw`) have the order of what was stored in them.
#pragma once

#include "vectors.h"

namespace mindspeed {

constexpr int64_t LENGTH = 2 * LANES;

struct Pair {
  Floats first, second;

  Pair() : Pair(0.0f) {}
  explicit Pair(float value) : first(value), second(value) {}
  Pair(Floats first, Floats second) : first(first), second(second) {}
};

inline Pair operator+(const Pair &a, const Pair &b) { return {a.first + b.first, a.second + b.second}; }
inline Pair operator-(const Pair &a, const Pair &b) { return {a.first - b.first, a.second - b.second}; }
inline Pair operator*(const Pair &a, const Pair &b) { return {a.first * b.first, a.second * b.second}; }

// a * b + c, rounded once.
inline Pair fmadd(const Pair &a, const Pair &b, const Pair &c) {
  return {at::vec::fmadd(a.first, b.first, c.first), at::vec::fmadd(a.second, b.second, c.second)};
}

// ---- fp32 ----

inline Pair load_raw(const float *from) { return {Floats::loadu(from), Floats::loadu(from + LANES)}; }

inline void store_raw(float *to, const Pair &values) {
  values.first.store(to);
  values.second.store(to + LANES);
}

inline Pair load_pair(const float *from, Whole) { return load_raw(from); }

inline Pair load_pair(const float *from, Part part) {
  const int64_t first = std::min(part.count, LANES);
  return {Floats::loadu(from, first), first < part.count ? Floats::loadu(from + LANES, part.count - first) : Floats(0.0f)};
}

inline void store_pair(float *to, const Pair &values, Whole) { store_raw(to, values); }

inline void store_pair(float *to, const Pair &values, Part part) {
  const int64_t first = std::min(part.count, LANES);
  values.first.store(to, first);
  if (first < part.count)
    values.second.store(to + LANES, part.count - first);
}

// ---- bf16 and fp16 ----

#if defined(CPU_CAPABILITY_AVX512)

inline __m512i load_bits(const void *from, Whole) { return _mm512_loadu_si512(from); }

inline __mmask32 mask_of(Part part) { return static_cast<__mmask32>((uint64_t(1) << part.count) - 1); }

inline __m512i load_bits(const void *from, Part part) { return _mm512_maskz_loadu_epi16(mask_of(part), from); }

template <class Extent> Pair load_pair(const c10::BFloat16 *from, Extent extent) {
  const __m512i bits = load_bits(from, extent);
  const __m512i odd = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(odd)};
}

template <class Extent> Pair load_pair(const c10::Half *from, Extent extent) {
  const __m512i bits = load_bits(from, extent);
  return {_mm512_cvtph_ps(_mm512_castsi512_si256(bits)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64(bits, 1))};
}

inline __m512i narrowed(const Pair &values, c10::BFloat16) {
#if defined(__AVX512BF16__)
  // numbers below the smallest normal one become zero
  const auto halves = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values.second, values.first));
#else
  const __m512i halves = at::vec::cvtfp32_bf16(static_cast<__m512>(values.first), static_cast<__m512>(values.second));
#endif
  // the even ones are in the lower half, the odd ones in the upper: take them in turns
  alignas(64) static constexpr auto TURNS = [] {
    std::array<uint16_t, LENGTH> turns{};
    for (size_t i = 0; i < turns.size(); ++i)
      turns[i] = static_cast<uint16_t>(i / 2 + i % 2 * LANES);
    return turns;
  }();
  return _mm512_permutexvar_epi16(_mm512_load_si512(TURNS.data()), halves);
}

inline __m512i narrowed(const Pair &values, c10::Half) {
  constexpr int ROUNDING = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  const __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph(values.first, ROUNDING));
  return _mm512_inserti64x4(low, _mm512_cvtps_ph(values.second, ROUNDING), 1);
}

template <class T> void store_pair(T *to, const Pair &values, Whole) { _mm512_storeu_si512(to, narrowed(values, T())); }

template <class T> void store_pair(T *to, const Pair &values, Part part) {
  _mm512_mask_storeu_epi16(to, mask_of(part), narrowed(values, T()));
}

// Past the caches, for results that no cache can hold; `to` is aligned to 64 bytes.
inline void stream(float *to, const Pair &values) {
  _mm512_stream_ps(to, values.first);
  _mm512_stream_ps(to + LANES, values.second);
}

template <class T> void stream(T *to, const Pair &values) {
  _mm512_stream_si512(reinterpret_cast<__m512i *>(to), narrowed(values, T()));
}

#else

template <class T> Pair pair_of(const at::vec::Vectorized<T> &values) {
  const auto [first, second] = at::vec::convert_to_float<T>(values);
  return {first, second};
}

template <class T> Pair load_pair(const T *from, Whole) { return pair_of(at::vec::Vectorized<T>::loadu(from)); }

template <class T> Pair load_pair(const T *from, Part part) {
  return pair_of(at::vec::Vectorized<T>::loadu(from, part.count));
}

template <class T> void store_pair(T *to, const Pair &values, Whole) {
  at::vec::convert_from_float<T>(values.first, values.second).store(to);
}

template <class T> void store_pair(T *to, const Pair &values, Part part) {
  at::vec::convert_from_float<T>(values.first, values.second).store(to, part.count);
}

template <class T> void stream(T *to, const Pair &values) { store_pair(to, values, Whole()); }

#endif

// ---- orders ----

#if defined(CPU_CAPABILITY_AVX512)
// Whether the vectors of a pair are the even and the odd numbers.
template <class T> constexpr bool IN_TURNS = std::is_same_v<T, c10::BFloat16>;
#else
template <class T> constexpr bool IN_TURNS = false;
#endif

inline Pair split(const Pair &halves) {
  const auto [even, odd] = at::vec::deinterleave2<float>(halves.first, halves.second);
  return {even, odd};
}

inline Pair joined(const Pair &turns) {
  const auto [first, second] = at::vec::interleave2<float>(turns.first, turns.second);
  return {first, second};
}

// Numbers of any type in the order of pairs of T.
template <class T, class From, class Extent> Pair load_as(const From *from, Extent extent) {
  const Pair values = load_pair(from, extent);
  return IN_TURNS<T> && !IN_TURNS<From> ? split(values) : values;
}

template <class T, class To, class Extent> void store_as(To *to, const Pair &values, Extent extent) {
  store_pair(to, IN_TURNS<T> && !IN_TURNS<To> ? joined(values) : values, extent);
}

// The even and the odd numbers, and back.
template <class T, class Extent> Pair load_turns(const T *from, Extent extent) {
  const Pair values = load_pair(from, extent);
  return IN_TURNS<T> ? values : split(values);
}

template <class T> Pair from_turns(const Pair &turns) { return IN_TURNS<T> ? turns : joined(turns); }

// The values, with zero in place of what a part does not cover.
template <class T> Pair covered(const Pair &values, Whole) { return values; }

template <class T> Pair covered(const Pair &values, Part part) {
  const Floats zero(0.0f), end(static_cast<float>(part.count));
  const float step = IN_TURNS<T> ? 2.0f : 1.0f, second = IN_TURNS<T> ? 1.0f : LANES;
  return {Floats::blendv(zero, values.first, Floats::arange(0.0f, step) < end),
          Floats::blendv(zero, values.second, Floats::arange(second, step) < end)};
}

// Bytes as numbers, in the order of pairs of T.
#if defined(CPU_CAPABILITY_AVX512)
inline __m256i load_byte_bits(const uint8_t *from, Whole) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from));
}

inline __m256i load_byte_bits(const uint8_t *from, Part part) { return _mm256_maskz_loadu_epi8(mask_of(part), from); }

template <class T, class Extent> Pair load_bytes(const uint8_t *from, Extent extent) {
  const __m256i bytes = load_byte_bits(from, extent);
  if constexpr (IN_TURNS<T>)
    return {_mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_and_si256(bytes, _mm256_set1_epi16(0xFF)))),
            _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(_mm256_srli_epi16(bytes, 8)))};
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(bytes))),
          _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(bytes, 1)))};
}
#else
template <class T, class Extent> Pair load_bytes(const uint8_t *from, Extent extent) {
  int64_t count = LENGTH;
  if constexpr (std::is_same_v<Extent, Part>)
    count = extent.count;
  float values[LENGTH] = {};
  std::copy_n(from, count, values);
  return load_raw(values);
}
#endif

// Stores past the caches if `Streamed`; a part of a pair goes the usual way.
template <bool Streamed, class T, class Extent> void write_pair(T *to, const Pair &values, Extent extent) {
  if constexpr (Streamed && std::is_same_v<Extent, Whole>) {
    stream(to, values);
  } else {
    store_pair(to, values, extent);
  }
}

// ---- loops ----

// body(i, extent) for each pair of [begin, end); the last one may be a part.
template <class Body> void each_pair(int64_t begin, int64_t end, Body body) {
  int64_t i = begin;
  for (; i + LENGTH <= end; i += LENGTH)
    body(i, Whole());
  if (i < end)
    body(i, Part{end - i});
}

// N sums over [0, count): body(sums, i, extent) adds to N pairs. Blocks of 4096 numbers are summed in fp32, few sums in two
// independent chains, and the blocks in fp64, so that long rows keep their precision.
template <int N, class Body> std::array<double, N> pair_sums(int64_t count, Body body) {
  constexpr int64_t BLOCK = 4096;
  constexpr int CHAINS = N > 4 ? 1 : 2;
  std::array<double, N> totals{};
  for (int64_t start = 0; start < count; start += BLOCK) {
    const int64_t end = std::min(start + BLOCK, count);
    std::array<std::array<Pair, N>, CHAINS> chains;
    int64_t i = start;
    for (; i + CHAINS * LENGTH <= end; i += CHAINS * LENGTH)
      for (int chain = 0; chain < CHAINS; ++chain)
        body(chains[chain], i + chain * LENGTH, Whole());
    each_pair(i, end, [&](int64_t at, auto extent) { body(chains[0], at, extent); });
    for (int n = 0; n < N; ++n) {
      Pair total = chains[0][n];
      for (int chain = 1; chain < CHAINS; ++chain)
        total = total + chains[chain][n];
      totals[n] += sum_of_lanes(total.first + total.second);
    }
  }
  return totals;
}

// sum + the squares of numbers at `from`.
template <class T, class Extent> Pair add_squares(const Pair &sum, const T *from, Extent extent) {
#if defined(CPU_CAPABILITY_AVX512) && defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, c10::BFloat16>) {
    const auto bits = reinterpret_cast<__m512bh>(load_bits(from, extent));
    return {_mm512_dpbf16_ps(sum.first, bits, bits), sum.second};
  }
#endif
  const Pair values = load_pair(from, extent);
  return fmadd(values, values, sum);
}

// `width` numbers as whole pairs: the length of a row that is stored raw.
constexpr int64_t padded(int64_t width) { return (width + LENGTH - 1) / LENGTH * LENGTH; }

// result[i] = the sum of column i over the `count` rows of `chunks`, stored raw in the order of pairs of T; rounded once.
template <class T, class Result> void add_pair_chunks(const float *chunks, int64_t count, int64_t width, Result *result) {
  each_pair(0, width, [=](int64_t i, auto extent) {
    Pair total = load_raw(chunks + i);
    for (int64_t chunk = 1; chunk < count; ++chunk)
      total = total + load_raw(chunks + chunk * padded(width) + i);
    store_as<T>(result + i, total, extent);
  });
}

// The sigmoid of a pair that becomes numbers of T.
template <class T> Pair sigmoid_for(const Pair &x) {
  if constexpr (std::is_same_v<T, float>)
    return {sigmoid(x.first), sigmoid(x.second)};
  return {coarse_sigmoid<T>(x.first), coarse_sigmoid<T>(x.second)};
}

} // namespace mindspeed

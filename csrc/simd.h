// One float vector V of W lanes per instruction set, and the few operations kernels are written in.
//
// The last branch is C++ with GCC's vector extensions, for any processor.
// One of TROTH_AVX512, TROTH_AVX2 and TROTH_NEON, or none, is defined per translation unit (isa_*.cpp).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(TROTH_AVX512) || defined(TROTH_AVX2)
#include <immintrin.h>
#elif defined(TROTH_NEON)
#include <arm_neon.h>
#endif

namespace troth {
namespace TROTH_ISA {

#if defined(TROTH_AVX512)

typedef __m512 V;
constexpr int W = 16;
inline V zero() { return _mm512_setzero_ps(); }
inline V all(float x) { return _mm512_set1_ps(x); }
inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, V v) { _mm512_storeu_ps(p, v); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline float sum(V v) { return _mm512_reduce_add_ps(v); }
inline float largest(V v) { return _mm512_reduce_max_ps(v); }
inline V load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void store_f16(uint16_t* p, V v) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(v, 0)); }
inline V load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline V load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline V load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }

#elif defined(TROTH_AVX2)

typedef __m256 V;
constexpr int W = 8;
inline V zero() { return _mm256_setzero_ps(); }
inline V all(float x) { return _mm256_set1_ps(x); }
inline V load(const float* p) { return _mm256_loadu_ps(p); }
inline void store(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }
inline float sum(V v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float largest(V v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
inline V load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void store_f16(uint16_t* p, V v) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(v, 0)); }
inline V load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline V load_i8(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
inline V load_u8(const uint8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p))); }

#elif defined(TROTH_NEON)

typedef float32x4_t V;
constexpr int W = 4;
inline V zero() { return vdupq_n_f32(0); }
inline V all(float x) { return vdupq_n_f32(x); }
inline V load(const float* p) { return vld1q_f32(p); }
inline void store(float* p, V v) { vst1q_f32(p, v); }
inline V fma(V a, V b, V c) { return vfmaq_f32(c, a, b); }
inline V max(V a, V b) { return vmaxq_f32(a, b); }
inline V min(V a, V b) { return vminq_f32(a, b); }
inline float sum(V v) { return vaddvq_f32(v); }
inline float largest(V v) { return vmaxvq_f32(v); }
inline V load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void store_f16(uint16_t* p, V v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
inline V load_bf16(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
inline V load_i8(const int8_t* p) {
    int32_t four;
    memcpy(&four, p, 4);
    const int8x8_t bytes = vreinterpret_s8_s32(vdup_n_s32(four));
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
}
inline V load_u8(const uint8_t* p) {
    uint32_t four;
    memcpy(&four, p, 4);
    const uint8x8_t bytes = vreinterpret_u8_u32(vdup_n_u32(four));
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
}

#else

typedef float V __attribute__((vector_size(16)));
constexpr int W = 4;
inline V zero() { return V{}; }
inline V all(float x) { return V{} + x; }
inline V load(const float* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, V v) { memcpy(p, &v, sizeof v); }
inline V fma(V a, V b, V c) { return a * b + c; }
inline V max(V a, V b) { return a > b ? a : b; }
inline V min(V a, V b) { return a < b ? a : b; }
inline float sum(V v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline float largest(V v) {
    float a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);
inline V load_f16(const uint16_t* p) {
    return V{f16_to_f32(p[0]), f16_to_f32(p[1]), f16_to_f32(p[2]), f16_to_f32(p[3])};
}
inline void store_f16(uint16_t* p, V v) {
    for (int i = 0; i < 4; i++) p[i] = f32_to_f16(v[i]);
}
inline V load_bf16(const uint16_t* p) {
    uint32_t bits[4];
    for (int i = 0; i < 4; i++) bits[i] = (uint32_t)p[i] << 16;
    V v;
    memcpy(&v, bits, 16);
    return v;
}
inline V load_i8(const int8_t* p) { return V{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }
inline V load_u8(const uint8_t* p) { return V{(float)p[0], (float)p[1], (float)p[2], (float)p[3]}; }

#endif

#if defined(TROTH_AVX512) || defined(TROTH_AVX2)
inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t f32_to_f16(float f) { return _cvtss_sh(f, 0); }
#elif defined(TROTH_NEON)
inline float f16_to_f32(uint16_t h) { return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(h))), 0); }
inline uint16_t f32_to_f16(float f) { return vget_lane_u16(vreinterpret_u16_f16(vcvt_f16_f32(vdupq_n_f32(f))), 0); }
#else
inline float f16_to_f32(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000 | (fraction << 13);
    } else if (exponent) {
        bits = sign | ((exponent + 112) << 23) | (fraction << 13);
    } else {  // subnormal: fraction * 2^-24 is exact in float32
        float f = (float)fraction * 0x1p-24f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
inline uint16_t f32_to_f16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) {  // subnormal result: let float addition round to multiples of 2^-24
        float scaled;
        memcpy(&scaled, &magnitude, 4);
        scaled += 0.5f;
        uint32_t out;
        memcpy(&out, &scaled, 4);
        return (uint16_t)(sign | (out - 0x3f000000));
    }
    uint32_t odd = (magnitude >> 13) & 1;
    return (uint16_t)(sign | ((magnitude - 0x38000000 + 0xfff + odd) >> 13));
}
#endif

inline uint16_t f32_to_bf16(float f) {
    uint32_t bits;
    memcpy(&bits, &f, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// 2^k for integer-valued k in -126 .. 127.
#if defined(TROTH_AVX512)
inline V power_of_two(V k) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(k), _mm512_set1_epi32(127)), 23));
}
inline V nearest(V v) { return _mm512_roundscale_ps(v, 8); }
inline V zero_below(V x, V limit, V v) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ), v); }
#elif defined(TROTH_AVX2)
inline V power_of_two(V k) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(k), _mm256_set1_epi32(127)), 23));
}
inline V nearest(V v) { return _mm256_round_ps(v, 8); }
inline V zero_below(V x, V limit, V v) { return _mm256_and_ps(_mm256_cmp_ps(x, limit, _CMP_GE_OQ), v); }
#elif defined(TROTH_NEON)
inline V power_of_two(V k) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(k), vdupq_n_s32(127)), 23));
}
inline V nearest(V v) { return vrndnq_f32(v); }
inline V zero_below(V x, V limit, V v) { return vbslq_f32(vcgeq_f32(x, limit), v, zero()); }
#else
typedef int32_t I __attribute__((vector_size(16)));
inline V power_of_two(V k) { return (V)((__builtin_convertvector(k, I) + 127) << 23); }
inline V nearest(V v) { return (v + 12582912.0f) - 12582912.0f; }  // 1.5 * 2^23 leaves no fraction bits
inline V zero_below(V x, V limit, V v) { return x >= limit ? v : V{}; }
#endif

// e^x within 2 units in the last place for -87 <= x <= 88; 0 below (no normal float32 is smaller), e^88 above.
// Cody and Waite reduction x = k ln 2 + r, then a polynomial of degree 6 in r.
inline V exp(V given) {
    V x = min(max(given, all(-87.0f)), all(88.0f));
    V k = nearest(x * all(1.44269504088896341f));
    V r = fma(k, all(-0.693359375f), x);
    r = fma(k, all(2.12194440e-4f), r);
    V p = all(1.9875691500e-4f);
    p = fma(p, r, all(1.3981999507e-3f));
    p = fma(p, r, all(8.3334519073e-3f));
    p = fma(p, r, all(4.1665795894e-2f));
    p = fma(p, r, all(1.6666665459e-1f));
    p = fma(p, r, all(5.0000001201e-1f));
    p = fma(p, r * r, r) + all(1.0f);
    return zero_below(given, all(-87.0f), p * power_of_two(k));
}

inline V sigmoid(V x) { return all(1.0f) / (all(1.0f) + exp(zero() - x)); }

// tanh through exp; exact to about 1e-7 for every argument.
inline V tanh(V x) { return all(2.0f) * sigmoid(x + x) - all(1.0f); }

}  // namespace TROTH_ISA
}  // namespace troth

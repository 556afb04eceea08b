// Inputs as 16-bit integers, two to a lane, and their products with quants of the same form.
//
// 32 inputs are rounded to integers of 16 bits that share a float32 scale: x = scale * code, off by at most half a scale,
// 1.5e-5 of the largest of them. What follows is exact: a processor multiplies pairs of such integers and adds the two
// products to a sum of 32 bits in one or two instructions, each twice as many products as one of float32 numbers, and
// integer sums do not depend on their order. |quant| <= 255, so 32 products stay below 2^28.
//
// Pair p of 16 holds inputs pair_input(p) and pair_input(p) + 2 in the low and the high half of its lane: the order in
// which quants leave their words (packed.h).
#pragma once

#include <cmath>

#include "arguments.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));
typedef int16_t S __attribute__((vector_size(4 * W)));

constexpr int pair_input(int p) { return p / 4 * 4 + p / 2 % 2 * 16 + p % 2; }

inline V to_float(I i) { return (V)__builtin_convertvector(i, V); }

// sum + the two products of each lane.
#if defined(TROTH_AVX512)
inline I dot(I a, I b, I sum) { return (I)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
#elif defined(TROTH_AVX2)
inline I dot(I a, I b, I sum) { return (I)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16((__m256i)a, (__m256i)b)); }
#elif defined(TROTH_NEON)
inline I dot(I a, I b, I sum) {
    const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
    const int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return (I)vaddq_s32((int32x4_t)sum, vpaddq_s32(low, high));
}
#else
inline I dot(I a, I b, I sum) {
    return sum + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
}
#endif

// W integers of inputs 0 .. 15 and the same W of inputs 16 .. 31, as pairs.
#if defined(TROTH_AVX512)
inline void store_pairs(int16_t* to, V low, V high) {
    const __m512i both = _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));
    _mm512_storeu_si512(to, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(both, 0xd8), 0xd8));
}
#elif defined(TROTH_AVX2)
inline void store_pairs(int16_t* to, V low, V high) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
    _mm256_storeu_si256((__m256i*)to, _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(both, 0xd8), 0xd8));
}
#else
inline void store_pairs(int16_t* to, V low, V high) {  // W is 4
    for (int k = 0; k < 4; k++) {
        to[k / 2 + k % 2 * 2] = (int16_t)low[k];
        to[4 + k / 2 + k % 2 * 2] = (int16_t)high[k];
    }
}
#endif

// 32 inputs of one token.
struct Rounded16 {
    int16_t codes[32];    // by pair
    float scale;          // NaN where an input is not finite
    float sum;            // of what the codes stand for
    int32_t halves[2];    // sums of codes of inputs 0 .. 15 and 16 .. 31
};

static_assert(sizeof(Rounded16) == ROUNDED16_BYTES);

// Inputs that are all below this are taken as zero.
constexpr float SMALLEST_INPUTS = 1e-30f;

// The largest of 32 inputs, and whether all are finite.
struct Peak {
    float most;
    bool finite;

    explicit Peak(const float* x) {
        V peak = zero(), wrong = zero();
        for (int i = 0; i < 32; i += W) {
            const V v = load(x + i);
            peak = max(peak, max(v, zero() - v));
            wrong = fma(v, zero(), wrong);  // 0, or NaN from what is not finite
        }
        most = largest(peak);
        finite = sum(wrong) == 0.0f;
    }
    bool counts() const { return finite && most > SMALLEST_INPUTS; }
    float or_zero(float scale) const { return counts() ? scale : finite ? 0.0f : NAN; }
};

inline void round_32(const float* x, Rounded16* out) {
    const Peak peak(x);
    const V inverse = all(peak.counts() ? 32767.0f / peak.most : 0.0f);
    V low = zero(), high = zero();  // sums, exact: below 2^24
    for (int i = 0; i < 16; i += W) {
        const V a = peak.finite ? nearest(load(x + i) * inverse) : zero();
        const V b = peak.finite ? nearest(load(x + 16 + i) * inverse) : zero();
        store_pairs(out->codes + 2 * i, a, b);
        low = low + a;
        high = high + b;
    }
    out->halves[0] = (int32_t)sum(low);
    out->halves[1] = (int32_t)sum(high);
    out->scale = peak.or_zero(peak.most / 32767.0f);
    out->sum = out->scale * (float)(out->halves[0] + out->halves[1]);
}

// Four bytes in every lane.
inline I lanes_of(const void* codes) {
    int32_t word;
    memcpy(&word, codes, 4);
    return I{} + word;
}

// What inputs are rounded to, one of two forms (the other is Fours, fours.h): WORDS words of codes for 32 inputs, PER of them
// for each of four steps, the first half of these of inputs 0 .. 15.
struct Pairs {
    typedef Rounded16 Tokens;
    typedef I Sum;
    static constexpr int WORDS = 16, PER = 4;
    // Steps whose products one Sum can take.
    template <class F>
    static constexpr int steps() { return 4; }
    template <class F>
    static void quants(const uint8_t* block, int s, int i, int l, I* out) { F::pairs(block, s, i, l, out); }
    static I codes(const Rounded16& x, int word) { return lanes_of(x.codes + 2 * word); }
    static I begin(I sum) { return sum; }
    static I add(I sum, I codes, I quants) { return dot(codes, quants, sum); }
    static I end(I sum, I) { return sum; }
};

template <class Tokens>
inline void round_row(const float* x, int inputs, Tokens* out) {
    for (int i = 0; i < inputs; i += 32) round_32(x + i, out++);
}

}  // namespace TROTH_ISA
}  // namespace troth

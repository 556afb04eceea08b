// Inputs as 8-bit integers, four to a lane, and their products with quants of up to six bits.
//
// Asked for by name (ModelOptions.inputs): 32 inputs share a float32 scale, x = scale * code with |code| <= 127, off by at
// most half a scale, 0.4 % of the largest of them. As with 16 bits (pairs.h), everything after that is exact but for one
// float32 sum per 32 inputs, and so the same for every number of tokens; a processor multiplies twice as many at a time.
//
// AVX2 multiplies four bytes of a lane into two sums of 16 bits. A quant of four bits and a code make at most 15 * 127, so
// that eight lots of two fit; of five bits four lots do, of six bits two. Such a chain is then added to 32-bit sums.
//
// Word 2 i + h of 8 holds inputs 4 i + 16 h and the three after it: the order in which quants leave their words (packed.h).
#pragma once

#include "packed.h"
#include "pairs.h"

namespace troth {
namespace TROTH_ISA {

// 32 inputs of one token.
struct Rounded8 {
    int8_t codes[32];     // by word
    float scale;          // NaN where an input is not finite
    float sum;            // of what the codes stand for
    int32_t halves[2];    // sums of codes of inputs 0 .. 15 and 16 .. 31
};

static_assert(sizeof(Rounded8) == ROUNDED8_BYTES);

#if defined(TROTH_AVX512)
typedef I Chain;  // VNNI adds four products to a sum of 32 bits at once
inline Chain chain_more(Chain sum, I quants, I codes) {
    return (I)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)quants, (__m512i)codes);
}
inline I chain_end(Chain a, I sum) { return sum + a; }
#elif defined(TROTH_AVX2)
typedef __m256i Chain;
inline Chain chain(I quants, I codes) { return _mm256_maddubs_epi16((__m256i)quants, (__m256i)codes); }
// In place: left to themselves, compilers make the products of all tokens first and keep sums in memory.
inline Chain chain_add(Chain a, Chain b) {
    asm("vpaddw {%1, %0, %0|%0, %0, %1}" : "+x"(a) : "x"(b));
    return a;
}
inline I chain_end(Chain a, I sum) {
    return (I)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(a, _mm256_set1_epi16(1)));
}
inline Chain chain_more(Chain sum, I quants, I codes) { return chain_add(sum, chain(quants, codes)); }
#elif defined(TROTH_NEON)
typedef int16x8_t Chain;
inline Chain chain(I quants, I codes) {  // quants are below 128
    const int8x16_t q = (int8x16_t)quants, x = (int8x16_t)codes;
    return vpaddq_s16(vmull_s8(vget_low_s8(q), vget_low_s8(x)), vmull_high_s8(q, x));
}
inline I chain_end(Chain a, I sum) { return (I)vpadalq_s16((int32x4_t)sum, a); }
inline Chain chain_more(Chain sum, I quants, I codes) { return vaddq_s16(sum, chain(quants, codes)); }
#else
typedef I Chain;
inline Chain chain(I q, I x) {
    I total = {};
    for (int b = 0; b < 32; b += 8) total += ((q << (24 - b)) >> 24) * ((x << (24 - b)) >> 24);
    return total;
}
inline Chain chain_more(Chain sum, I quants, I codes) { return sum + chain(quants, codes); }
inline I chain_end(Chain a, I sum) { return sum + a; }
#endif

// Inputs as fours; see Pairs.
struct Fours {
    typedef Rounded8 Tokens;
    typedef Chain Sum;
    static constexpr int WORDS = 8, PER = 2;
    // Steps that one chain of sums can take.
    template <class F>
    static constexpr int steps() {
        constexpr int per_step = (F::HALVES ? 1 : 2) * F::LARGEST * 254, most = 4 * per_step <= 32767 ? 4 : 2;
        static_assert(most * per_step <= 32767, "a chain would overflow");
        return most;
    }
    template <class F>
    static void quants(const uint8_t* block, int s, int i, int l, I* out) {
        U planes[2];
        F::planes(block, s, i, l, planes);
        out[0] = (I)planes[0];
        out[1] = (I)planes[1];
    }
    static I codes(const Rounded8& x, int word) { return lanes_of(x.codes + 4 * word); }
    static Chain begin(I) { return Chain{}; }
    static Chain add(Chain sum, I codes, I quants) { return chain_more(sum, quants, codes); }
    static I end(Chain sum, I before) { return chain_end(sum, before); }
};

// 32 codes in order of inputs.
#if defined(TROTH_AVX512)
inline void store_fours(int8_t* to, const V* codes) {
    const __m128i low = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(codes[0]));
    const __m128i high = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(codes[1]));
    _mm_storeu_si128((__m128i*)to, _mm_unpacklo_epi32(low, high));
    _mm_storeu_si128((__m128i*)to + 1, _mm_unpackhi_epi32(low, high));
}
#elif defined(TROTH_AVX2)
inline void store_fours(int8_t* to, const V* codes) {
    const __m256i a = _mm256_packs_epi32(_mm256_cvtps_epi32(codes[0]), _mm256_cvtps_epi32(codes[2]));
    const __m256i b = _mm256_packs_epi32(_mm256_cvtps_epi32(codes[1]), _mm256_cvtps_epi32(codes[3]));
    _mm256_storeu_si256((__m256i*)to, _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8));
}
#else
inline void store_fours(int8_t* to, const V* codes) {  // W is 4
    for (int word = 0; word < 8; word++)
        for (int k = 0; k < 4; k++) to[4 * word + k] = (int8_t)codes[word / 2 + word % 2 * 4][k];
}
#endif

inline void round_32(const float* x, Rounded8* out) {
    const Peak peak(x);
    const float scale = peak.most * (1.0f / 127.0f);  // in the order of ops/codes.py, to the last bit
    const V inverse = all(peak.counts() ? 1.0f / scale : 0.0f);
    alignas(V) V codes[32 / W];
    V halves[2] = {zero(), zero()};
    for (int i = 0; i < 32 / W; i++) {
        codes[i] = peak.finite ? nearest(load(x + i * W) * inverse) : zero();
        halves[i * W / 16] = halves[i * W / 16] + codes[i];
    }
    store_fours(out->codes, codes);
    for (int h = 0; h < 2; h++) out->halves[h] = (int32_t)sum(halves[h]);
    out->scale = peak.or_zero(scale);
    out->sum = out->scale * (float)(out->halves[0] + out->halves[1]);
}

}  // namespace TROTH_ISA
}  // namespace troth

// Weight formats as they lie in a GGUF file: what the bytes of 32 consecutive weights mean, exactly.
//
// Every format has: BLOCK weights per block, BYTES per block, and values(block, s, out): the weights
// 32 s .. 32 s + 31 of a block as floats in 32 / W vectors, each equal to what the file means (one rounding of d * q + m).
// Layouts: ggml's block definitions (GGUF specification). Python reference: the gguf package's dequantize.
#pragma once

#include "simd.h"

namespace troth {
namespace TROTH_ISA {

constexpr int PARTS = 32 / W;   // vectors per 32 weights
constexpr int HALF = 16 / W;    // vectors per 16 weights

inline float scale_at(const uint8_t* p) {
    uint16_t h;
    memcpy(&h, p, 2);
    return f16_to_f32(h);
}

inline void affine(V* v, int count, float d, float m) {
    V dv = all(d), mv = all(m);
    for (int i = 0; i < count; i++) v[i] = fma(dv, v[i], mv);
}

// The 32 nibbles of 16 bytes: low ones first, then high ones.
inline void nibbles(bytes16 b, V* out) {
    widen(b & all16(15), out);
    widen(b >> 4, out + HALF);
}

// Bits i .. i + 15 of a word as 0 or 16 in each of 16 bytes.
inline bytes16 fifth_bits(uint32_t bits) {
    typedef uint64_t words2 __attribute__((vector_size(16)));
    words2 spread = {(bits & 255) * 0x0101010101010101ull, ((bits >> 8) & 255) * 0x0101010101010101ull};
    words2 select = {0x8040201008040201ull, 0x8040201008040201ull};
    return (bytes16)((bytes16)(spread & select) != all16(0)) & all16(16);
}

struct Q4_0 {
    static constexpr int BLOCK = 32, BYTES = 18;
    static inline void values(const uint8_t* b, int, V* out) {
        float d = scale_at(b);
        nibbles(load16(b + 2), out);
        affine(out, PARTS, d, -8.0f * d);
    }
};

struct Q4_1 {
    static constexpr int BLOCK = 32, BYTES = 20;
    static inline void values(const uint8_t* b, int, V* out) {
        nibbles(load16(b + 4), out);
        affine(out, PARTS, scale_at(b), scale_at(b + 2));
    }
};

struct Q5_0 {
    static constexpr int BLOCK = 32, BYTES = 22;
    static inline void values(const uint8_t* b, int, V* out) {
        float d = scale_at(b);
        uint32_t high;
        memcpy(&high, b + 2, 4);
        bytes16 q = load16(b + 6);
        widen((q & all16(15)) | fifth_bits(high), out);
        widen((q >> 4) | fifth_bits(high >> 16), out + HALF);
        affine(out, PARTS, d, -16.0f * d);
    }
};

struct Q5_1 {
    static constexpr int BLOCK = 32, BYTES = 24;
    static inline void values(const uint8_t* b, int, V* out) {
        uint32_t high;
        memcpy(&high, b + 4, 4);
        bytes16 q = load16(b + 8);
        widen((q & all16(15)) | fifth_bits(high), out);
        widen((q >> 4) | fifth_bits(high >> 16), out + HALF);
        affine(out, PARTS, scale_at(b), scale_at(b + 2));
    }
};

struct Q8_0 {
    static constexpr int BLOCK = 32, BYTES = 34;
    static inline void values(const uint8_t* b, int, V* out) {
        V d = all(scale_at(b));
        widen_signed(load16(b + 2), out);
        widen_signed(load16(b + 18), out + HALF);
        for (int i = 0; i < PARTS; i++) out[i] = out[i] * d;
    }
};

// Six-bit scale and minimum of sub-block s (0..7), packed in 12 bytes.
inline void scale_min(const uint8_t* p, int s, float* scale, float* minimum) {
    if (s < 4) {
        *scale = (float)(p[s] & 63);
        *minimum = (float)(p[s + 4] & 63);
    } else {
        *scale = (float)((p[s + 4] & 15) | ((p[s - 4] >> 6) << 4));
        *minimum = (float)((p[s + 4] >> 4) | ((p[s] >> 6) << 4));
    }
}

struct Q4_K {
    static constexpr int BLOCK = 256, BYTES = 144;
    static inline void values(const uint8_t* b, int s, V* out) {
        float scale, minimum;
        scale_min(b + 4, s, &scale, &minimum);
        const uint8_t* q = b + 16 + (s >> 1) * 32;
        bytes16 lo = load16(q), hi = load16(q + 16);
        widen(s & 1 ? lo >> 4 : lo & all16(15), out);
        widen(s & 1 ? hi >> 4 : hi & all16(15), out + HALF);
        affine(out, PARTS, scale_at(b) * scale, -scale_at(b + 2) * minimum);
    }
};

struct Q5_K {
    static constexpr int BLOCK = 256, BYTES = 176;
    static inline void values(const uint8_t* b, int s, V* out) {
        float scale, minimum;
        scale_min(b + 4, s, &scale, &minimum);
        const uint8_t* q = b + 48 + (s >> 1) * 32;
        bytes16 lo = load16(q), hi = load16(q + 16);
        bytes16 hlo = ((load16(b + 16) >> s) & all16(1)) << 4, hhi = ((load16(b + 32) >> s) & all16(1)) << 4;
        widen((s & 1 ? lo >> 4 : lo & all16(15)) | hlo, out);
        widen((s & 1 ? hi >> 4 : hi & all16(15)) | hhi, out + HALF);
        affine(out, PARTS, scale_at(b) * scale, -scale_at(b + 2) * minimum);
    }
};

struct Q6_K {
    static constexpr int BLOCK = 256, BYTES = 210;
    static inline void values(const uint8_t* b, int s, V* out) {
        int half = s >> 2, part = s & 3;
        const uint8_t* low = b + half * 64 + (part & 1) * 32;
        const uint8_t* high = b + 128 + half * 32;
        const int8_t* scales = (const int8_t*)(b + 192) + half * 8 + part * 2;
        float d = scale_at(b + 208);
        for (int i = 0; i < 2; i++) {
            bytes16 l = load16(low + 16 * i), h = (load16(high + 16 * i) >> (2 * part)) & all16(3);
            widen((part & 2 ? l >> 4 : l & all16(15)) | (h << 4), out + i * HALF);
            float scaled = d * (float)scales[i];
            affine(out + i * HALF, HALF, scaled, -32.0f * scaled);
        }
    }
};

struct F32 {
    static constexpr int BLOCK = 32, BYTES = 128;
    static inline void values(const uint8_t* b, int, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load((const float*)b + i * W);
    }
};

struct F16 {
    static constexpr int BLOCK = 32, BYTES = 64;
    static inline void values(const uint8_t* b, int, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load_f16((const uint16_t*)b + i * W);
    }
};

struct BF16 {
    static constexpr int BLOCK = 32, BYTES = 64;
    static inline void values(const uint8_t* b, int, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load_bf16((const uint16_t*)b + i * W);
    }
};

}  // namespace TROTH_ISA
}  // namespace troth

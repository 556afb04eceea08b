// Quantised weights as the kernels want them: 16 rows (outputs) side by side, one row per lane.
//
// A group is 16 rows. Its blocks follow one another along the inputs; in a block the numbers of the 16 rows alternate, so
// that a vector load takes the same input of neighbouring rows and a product needs no sum across lanes. Nothing is
// rounded: the bits are those of the file (ggml's block layouts, GGUF specification), only their order changes.
//
// 32 inputs of one row are four words of quants; nibble 2 b + h of word i (byte b of plane h, where bits above the nibble
// are kept apart) belongs to input 4 i + b + 16 h.
//
//   block          bytes per 16 rows, in order
//   Q4_0   32      d f16[16] | quants u32[4][16]
//   Q4_1   32      d f16[16] | m f16[16] | quants u32[4][16]
//   Q5_0   32      d f16[16] | high u32[16] | quants u32[4][16]
//   Q5_1   32      d f16[16] | m f16[16] | high u32[16] | quants u32[4][16]
//   Q8_0   32      d f16[16] | quants u32[8][16], byte b of word i: input 4 i + b
//   Q4_K   256     d f16[16] | m f16[16] | 8 x { scale u8[16] | minimum u8[16] | quants u32[4][16] }
//   Q5_K   256     the same with high u32[16] before the quants
//   Q6_K   256     d f16[16] | 8 x { scale i8[2][16] | high u32[2][16] | quants u32[4][16] }
//   A4_G   G       scale f32[16] | minimum f32[16] | G / 32 x { quants u32[4][16] }; G is 32, 64 or 128
//   A8_G   G       scale f32[16] | minimum f32[16] | G / 32 x { quants u32[8][16], as in Q8_0 but without a sign }
#pragma once

#include "formats.h"
#include "pairs.h"

namespace troth {
namespace TROTH_ISA {

constexpr int GROUP = 16;          // rows side by side
constexpr int LANE_VECTORS = GROUP / W;

inline U load_words(const uint8_t* p) {
    U u;
    memcpy(&u, p, sizeof u);
    return u;
}

// A format: weight = scale * (q - ZERO) + minimum, of 32 inputs, or of each half of them where HALVES. Quants come as pairs
// (pairs.h): pairs() gives pairs 4 i .. 4 i + 3 of W rows; or, where LARGEST is the largest of them, as fours (fours.h):
// planes() gives inputs 4 i .. 4 i + 3 and those of the other half.
template <int HEADER, int SUBS, int SUB_HEADER, int HIGH_WORDS, int WORDS>
struct Layout {
    static constexpr bool PACKED = true;
    static constexpr bool HALVES = false;  // whether the two halves have scales of their own
    static constexpr int LARGEST = HIGH_WORDS == 2 ? 63 : HIGH_WORDS ? 31 : WORDS == 4 ? 15 : 0;
    static constexpr int BLOCK = 32 * SUBS;
    static constexpr int SUB_BYTES = SUB_HEADER + 64 * (HIGH_WORDS + WORDS);
    static constexpr int BYTES = HEADER + SUBS * SUB_BYTES;
    static const uint8_t* sub(const uint8_t* block, int s) { return block + HEADER + s * SUB_BYTES; }
    static const uint8_t* high(const uint8_t* block, int s) { return sub(block, s) + SUB_HEADER; }
    static const uint8_t* quants(const uint8_t* block, int s) { return high(block, s) + 64 * HIGH_WORDS; }
};

inline V f16_at(const uint8_t* p, int lanes) { return load_f16((const uint16_t*)p + lanes * W); }

inline void nibble_pairs(const uint8_t* quants, int i, int lanes, I* out) {
    const U words = load_words(quants + 64 * i + 4 * W * lanes);
    out[0] = (I)(words & 0x000f000fu);
    out[1] = (I)((words >> 8) & 0x000f000fu);
    out[2] = (I)((words >> 4) & 0x000f000fu);
    out[3] = (I)((words >> 12) & 0x000f000fu);
}

inline void plane_pairs(U low, U high, I* out) {
    out[0] = (I)(low & 0x00ff00ffu);
    out[1] = (I)((low >> 8) & 0x00ff00ffu);
    out[2] = (I)(high & 0x00ff00ffu);
    out[3] = (I)((high >> 8) & 0x00ff00ffu);
}

template <class F>
inline void pairs_of_planes(const uint8_t* block, int s, int i, int lanes, I* out) {
    U both[2];
    F::planes(block, s, i, lanes, both);
    plane_pairs(both[0], both[1], out);
}

inline void nibble_planes(const uint8_t* quants, int i, int lanes, U* out) {
    const U words = load_words(quants + 64 * i + 4 * W * lanes);
    out[0] = words & 0x0f0f0f0fu;
    out[1] = (words >> 4) & 0x0f0f0f0fu;
}

// Fifth bits: bit 8 b + 4 h + i of a row's word belongs to input 4 i + b + 16 h.
inline void five_bit_planes(const uint8_t* quants, const uint8_t* high, int i, int lanes, U* out) {
    const U bits = load_words(high + 4 * W * lanes);
    nibble_planes(quants, i, lanes, out);
    out[0] |= (bits << (4 - i)) & 0x10101010u;
    out[1] |= (bits >> i) & 0x10101010u;
}

struct Packed4_0 : Layout<32, 1, 0, 0, 4> {
    static constexpr int ZERO = 8;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return f16_at(block, lanes); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        nibble_pairs(quants(block, s), i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        nibble_planes(quants(block, s), i, lanes, out);
    }
};

struct Packed4_1 : Layout<64, 1, 0, 0, 4> {
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int, int, int lanes) { return f16_at(block, lanes); }
    static V minimum(const uint8_t* block, int, int lanes) { return f16_at(block + 32, lanes); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        nibble_pairs(quants(block, s), i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        nibble_planes(quants(block, s), i, lanes, out);
    }
};

struct Packed5_0 : Layout<32, 1, 0, 1, 4> {
    static constexpr int ZERO = 16;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return f16_at(block, lanes); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        pairs_of_planes<Packed5_0>(block, s, i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        five_bit_planes(quants(block, s), high(block, s), i, lanes, out);
    }
};

struct Packed5_1 : Layout<64, 1, 0, 1, 4> {
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int, int, int lanes) { return f16_at(block, lanes); }
    static V minimum(const uint8_t* block, int, int lanes) { return f16_at(block + 32, lanes); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        pairs_of_planes<Packed5_1>(block, s, i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        five_bit_planes(quants(block, s), high(block, s), i, lanes, out);
    }
};

struct Packed8_0 : Layout<32, 1, 0, 0, 8> {
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return f16_at(block, lanes); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        for (int h = 0; h < 2; h++) {
            const S bytes = (S)load_words(quants(block, s) + 64 * (i + 4 * h) + 4 * W * lanes);  // with a sign
            out[2 * h] = (I)((S)(bytes << 8) >> 8);
            out[2 * h + 1] = (I)(bytes >> 8);
        }
    }
};

// Scales and minima of sub-blocks, in units of the block's own.
template <int HIGH_WORDS>
struct SubScales : Layout<64, 8, 32, HIGH_WORDS, 4> {
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int s, int, int lanes) {
        return f16_at(block, lanes) * load_u8(SubScales::sub(block, s) + lanes * W);
    }
    static V minimum(const uint8_t* block, int s, int lanes) {
        return zero() - f16_at(block + 32, lanes) * load_u8(SubScales::sub(block, s) + 16 + lanes * W);
    }
};

struct Packed4_K : SubScales<0> {
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        nibble_pairs(quants(block, s), i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        nibble_planes(quants(block, s), i, lanes, out);
    }
};

struct Packed5_K : SubScales<1> {
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        pairs_of_planes<Packed5_K>(block, s, i, lanes, out);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        five_bit_planes(quants(block, s), high(block, s), i, lanes, out);
    }
};

struct Packed6_K : Layout<32, 8, 32, 2, 4> {
    static constexpr bool HALVES = true;
    static constexpr int ZERO = 32;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int s, int half, int lanes) {
        return f16_at(block, lanes) * load_i8((const int8_t*)sub(block, s) + 16 * half + lanes * W);
    }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        pairs_of_planes<Packed6_K>(block, s, i, lanes, out);
    }
    // Bits 8 b + 2 i and the next of a row's word h belong to input 4 i + b + 16 h.
    static void planes(const uint8_t* block, int s, int i, int lanes, U* out) {
        const U low = load_words(high(block, s) + 4 * W * lanes), up = load_words(high(block, s) + 64 + 4 * W * lanes);
        nibble_planes(quants(block, s), i, lanes, out);
        out[0] |= (i < 2 ? low << (4 - 2 * i) : low >> (2 * i - 4)) & 0x30303030u;
        out[1] |= (i < 2 ? up << (4 - 2 * i) : up >> (2 * i - 4)) & 0x30303030u;
    }
};

// Group-affine quants (MLX, AWQ and GPTQ have such groups): a scale and a minimum in float32, which holds what those have as
// float16, bfloat16 or integers, for every 32 * SUBS weights.
template <int WORDS, int SUBS>
struct PackedAffine : Layout<128, SUBS, 0, 0, WORDS> {
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static constexpr int LARGEST = 0;  // inputs are not rounded to 8 bits
    static V scale(const uint8_t* block, int, int, int lanes) { return load((const float*)block + lanes * W); }
    static V minimum(const uint8_t* block, int, int lanes) { return load((const float*)block + 16 + lanes * W); }
    static void pairs(const uint8_t* block, int s, int i, int lanes, I* out) {
        const uint8_t* words = PackedAffine::quants(block, s);
        if constexpr (WORDS == 4)
            nibble_pairs(words, i, lanes, out);
        else
            plane_pairs(load_words(words + 64 * i + 4 * W * lanes), load_words(words + 64 * (i + 4) + 4 * W * lanes), out);
    }
};

// The 32 weights (s of a block) of W rows, exactly: out[input] for lanes l of the group.
template <class F>
inline void packed_values(const uint8_t* block, int s, int l, V* out) {
    for (int i = 0; i < 4; i++) {
        I quants[4];
        F::pairs(block, s, i, l, quants);
        for (int k = 0; k < 4; k++) {
            const V scale = F::scale(block, s, k / 2, l);
            V minimum = all(-(float)F::ZERO) * scale;
            if constexpr (F::MINIMUM) minimum = F::minimum(block, s, l);
            const int input = pair_input(4 * i + k);
            out[input] = fma(scale, to_float((quants[k] << 16) >> 16), minimum);
            out[input + 2] = fma(scale, to_float(quants[k] >> 16), minimum);
        }
    }
}

// One row of a matrix as floats.
template <class F>
void packed_row(const uint8_t* w, size_t group_bytes, int64_t row, int inputs, float* y) {
    const uint8_t* block = w + row / GROUP * group_bytes;
    const int l = (int)(row % GROUP) / W, lane = (int)(row % GROUP) % W;
    for (int k = 0; k < inputs; k += F::BLOCK, block += F::BYTES)
        for (int s = 0; s < F::BLOCK / 32; s++) {
            V values[32];
            packed_values<F>(block, s, l, values);
            for (int i = 0; i < 32; i++) y[k + 32 * s + i] = values[i][lane];
        }
}

}  // namespace TROTH_ISA
}  // namespace troth

// From rows in file layout (ggml's blocks, GGUF specification; affine groups as weights/affine.py lays them out) to groups of
// 16 rows (packed.h). Once per weight, at load.
//
// Plain C++: the same for every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

#include "arguments.h"
#include "pool.h"

namespace troth {
namespace packing {

inline uint32_t word_at(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}
inline void put_word(uint8_t* to, int index, int row, uint32_t word) { memcpy(to + 64 * index + 4 * row, &word, 4); }
inline void put_half(uint8_t* to, int row, const uint8_t* from) { memcpy(to + 2 * row, from, 2); }

// Four words of nibbles, whatever their meaning.
inline void put_nibbles(uint8_t* to, int row, const uint8_t* from) {
    for (int i = 0; i < 4; i++) put_word(to, i, row, word_at(from + 4 * i));
}

// 32 fifth bits as one word: bit 8 b + 4 h + i belongs to input 4 i + b + 16 h. bit_of(n) is 0 or 1.
template <class BitOf>
inline uint32_t spread_bits(BitOf bit_of) {
    uint32_t word = 0;
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 4; i++)
            for (int b = 0; b < 4; b++) word |= (uint32_t)bit_of(4 * i + b + 16 * h) << (8 * b + 4 * h + i);
    return word;
}

// Sub-blocks of 32 weights 2 p and 2 p + 1 of a K format share 32 bytes, low nibbles and high ones; each becomes 16 bytes
// whose low nibbles are its first half.
inline void split_nibbles(const uint8_t* shared, bool high, uint8_t* out) {
    for (int k = 0; k < 16; k++)
        out[k] = high ? (uint8_t)((shared[k] >> 4) | (shared[k + 16] & 0xf0))
                      : (uint8_t)((shared[k] & 15) | (shared[k + 16] << 4));
}

// Six-bit scale and minimum of sub-block s, packed in 12 bytes.
inline void scale_and_minimum(const uint8_t* p, int s, uint8_t* scale, uint8_t* minimum) {
    *scale = s < 4 ? p[s] & 63 : (uint8_t)((p[s + 4] & 15) | ((p[s - 4] >> 6) << 4));
    *minimum = s < 4 ? p[s + 4] & 63 : (uint8_t)((p[s + 4] >> 4) | ((p[s] >> 6) << 4));
}

// One block of one row; `bytes` of the file, `packed` for 16 rows.
struct Sizes {
    int block, bytes, packed;
};

inline Sizes sizes(int format) {
    switch (format) {
        case FORMAT_Q4_0: return {32, 18, 288};
        case FORMAT_Q4_1: return {32, 20, 320};
        case FORMAT_Q5_0: return {32, 22, 352};
        case FORMAT_Q5_1: return {32, 24, 384};
        case FORMAT_Q8_0: return {32, 34, 544};
        case FORMAT_Q4_K: return {256, 144, 2368};
        case FORMAT_Q5_K: return {256, 176, 2880};
        case FORMAT_Q6_K: return {256, 210, 3360};
        case FORMAT_A4_32:
        case FORMAT_A4_64:
        case FORMAT_A4_128: {
            const int subs = 1 << (format - FORMAT_A4_32);
            return {32 * subs, 8 + 16 * subs, 128 + 256 * subs};
        }
        case FORMAT_A8_32:
        case FORMAT_A8_64:
        case FORMAT_A8_128: {
            const int subs = 1 << (format - FORMAT_A8_32);
            return {32 * subs, 8 + 32 * subs, 128 + 512 * subs};
        }
        default: return {0, 0, 0};
    }
}

inline void pack_block(int format, const uint8_t* from, int row, uint8_t* to) {
    switch (format) {
        case FORMAT_Q4_0:
            put_half(to, row, from);
            put_nibbles(to + 32, row, from + 2);
            return;
        case FORMAT_Q4_1:
            put_half(to, row, from);
            put_half(to + 32, row, from + 2);
            put_nibbles(to + 64, row, from + 4);
            return;
        case FORMAT_Q5_0:
        case FORMAT_Q5_1: {
            const int scales = format == FORMAT_Q5_1 ? 2 : 1;
            for (int i = 0; i < scales; i++) put_half(to + 32 * i, row, from + 2 * i);
            to += 32 * scales;
            from += 2 * scales;
            const uint32_t high = word_at(from);
            put_word(to, 0, row, spread_bits([&](int n) { return (high >> n) & 1; }));
            put_nibbles(to + 64, row, from + 4);
            return;
        }
        case FORMAT_Q8_0:
            put_half(to, row, from);
            for (int i = 0; i < 8; i++) put_word(to + 32, i, row, word_at(from + 2 + 4 * i));
            return;
        case FORMAT_Q4_K:
        case FORMAT_Q5_K: {
            put_half(to, row, from);
            put_half(to + 32, row, from + 2);
            to += 64;
            const bool five = format == FORMAT_Q5_K;
            const uint8_t *high = from + 16, *low = from + (five ? 48 : 16);
            for (int s = 0; s < 8; s++) {
                scale_and_minimum(from + 4, s, to + row, to + 16 + row);
                to += 32;
                if (five) {
                    put_word(to, 0, row, spread_bits([&](int n) { return (high[n] >> s) & 1; }));
                    to += 64;
                }
                uint8_t nibbles[16];
                split_nibbles(low + s / 2 * 32, s & 1, nibbles);
                put_nibbles(to, row, nibbles);
                to += 256;
            }
            return;
        }
        case FORMAT_Q6_K: {
            put_half(to, row, from + 208);
            to += 32;
            for (int s = 0; s < 8; s++) {
                const int half = s / 4, part = s % 4;
                to[row] = from[192 + 8 * half + 2 * part];
                to[16 + row] = from[192 + 8 * half + 2 * part + 1];
                to += 32;
                for (int h = 0; h < 2; h++) {  // two bits each of inputs 4 i + b at 8 b + 2 i
                    uint32_t word = 0;
                    for (int i = 0; i < 4; i++)
                        word |= ((word_at(from + 128 + 32 * half + 16 * h + 4 * i) >> (2 * part)) & 0x03030303u) << (2 * i);
                    put_word(to, h, row, word);
                }
                to += 128;
                uint8_t nibbles[16];
                split_nibbles(from + 64 * half + 32 * (part & 1), part & 2, nibbles);
                put_nibbles(to, row, nibbles);
                to += 256;
            }
            return;
        }
        case FORMAT_A4_32:
        case FORMAT_A4_64:
        case FORMAT_A4_128:
        case FORMAT_A8_32:
        case FORMAT_A8_64:
        case FORMAT_A8_128: {
            const int words = (sizes(format).bytes - 8) / 4;
            for (int i = 0; i < 2 + words; i++) put_word(to, i, row, word_at(from + 4 * i));
            return;
        }
        default: return;
    }
}

// Every group of a weight; rows past the last are zero.
inline void pack(const void* arguments, Turn turn) {
    const auto& a = *(const PackArguments*)arguments;
    const Sizes size = sizes(a.format);
    const int blocks = a.inputs / size.block;
    for (int g; (g = turn.take((a.outputs + 15) / 16)) >= 0;) {
        uint8_t* to = a.packed + (size_t)g * blocks * size.packed;
        const int count = a.outputs - 16 * g < 16 ? a.outputs - 16 * g : 16;
        if (count < 16) memset(to, 0, (size_t)blocks * size.packed);
        for (int b = 0; b < blocks; b++)
            for (int r = 0; r < count; r++)
                pack_block(a.format, a.rows + (size_t)(16 * g + r) * a.row_bytes + (size_t)b * size.bytes, r,
                           to + (size_t)b * size.packed);
    }
}

}  // namespace packing
}  // namespace troth

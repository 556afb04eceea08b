// Quantised weights as the kernels want them: 16 rows (outputs) side by side, one row per lane.
//
// A group is 16 rows. Its blocks follow one another along the inputs; in a block the numbers of the 16 rows alternate, so
// that a vector load takes the same input of neighbouring rows and a product needs no sum across lanes. Nothing is
// rounded: the bits are those of the file (ggml's block layouts, GGUF specification), only their order changes.
//
// 32 inputs of one row are four words of quants; nibble 2 b + h of word i (byte b of plane h, where bits above the nibble
// are kept apart) belongs to input 4 i + b + 16 h. A quant is turned into a float where it stands in its word, as
// q * 2^shift, and met by an input scaled by 2^-shift (Prepared): both exact, and no shift instruction is needed.
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
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "formats.h"

namespace troth {
namespace TROTH_ISA {

constexpr int GROUP = 16;          // rows side by side
constexpr int LANE_VECTORS = GROUP / W;

typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t U __attribute__((vector_size(4 * W)));

inline U load_words(const uint8_t* p) {
    U u;
    memcpy(&u, p, sizeof u);
    return u;
}
inline V to_float(U u) { return (V)__builtin_convertvector((I)u, V); }

// How inputs are scaled and ordered to meet the quants: see above.
enum class Order { NIBBLES, PLANES, WORDS };

constexpr int order_input(Order order, int k) {  // position k of 32 -> input
    return order == Order::WORDS ? k : 4 * (k / 8) + k % 8 / 2 + 16 * (k % 2);
}
constexpr int order_shift(Order order, int k) {  // the quant stands at 2^shift
    if (order == Order::NIBBLES) return k % 8 == 7 ? 0 : 4 * (k % 8);
    if (order == Order::PLANES) return k % 8 / 2 == 3 ? 0 : 8 * (k % 8 / 2);
    return k % 4 == 3 ? 0 : 24;
}

// One token's inputs in the order of a format, and the sums of 16 inputs at a time.
struct Prepared {
    const float* x;
    const float* sums;
};

// Scaling by powers of two is exact for every input above 2^-100.
template <Order ORDER>
inline void prepare(const float* x, int inputs, float* ordered, float* sums) {
    for (int i = 0; i < inputs; i += 32, x += 32, ordered += 32, sums += 2) {
#pragma GCC unroll 32
        for (int k = 0; k < 32; k++) ordered[k] = x[order_input(ORDER, k)] * (1.0f / (float)(1u << order_shift(ORDER, k)));
        for (int h = 0; h < 2; h++) {
            float total = 0;
            for (int k = 0; k < 16; k++) total += x[16 * h + k];
            sums[h] = total;
        }
    }
}

// A format: weight = scale * (q - ZERO) + minimum, scale and minimum for each half (16 inputs) of 32.
template <int HEADER, int SUBS, int SUB_HEADER, int HIGH_WORDS, int WORDS>
struct Layout {
    static constexpr bool PACKED = true;
    static constexpr int BLOCK = 32 * SUBS;
    static constexpr int SUB_BYTES = SUB_HEADER + 64 * (HIGH_WORDS + WORDS);
    static constexpr int BYTES = HEADER + SUBS * SUB_BYTES;
    static const uint8_t* sub(const uint8_t* block, int s) { return block + HEADER + s * SUB_BYTES; }
    static const uint8_t* high(const uint8_t* block, int s) { return sub(block, s) + SUB_HEADER; }
    static const uint8_t* quants(const uint8_t* block, int s) { return high(block, s) + 64 * HIGH_WORDS; }
};

inline V halves_at(const uint8_t* p, int lanes) { return load_f16((const uint16_t*)p + lanes * W); }

struct Packed4_0 : Layout<32, 1, 0, 0, 4> {
    static constexpr Order ORDER = Order::NIBBLES;
    static constexpr int ZERO = 8;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return halves_at(block, lanes); }
};

struct Packed4_1 : Layout<64, 1, 0, 0, 4> {
    static constexpr Order ORDER = Order::NIBBLES;
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int, int, int lanes) { return halves_at(block, lanes); }
    static V minimum(const uint8_t* block, int, int lanes) { return halves_at(block + 32, lanes); }
};

// Fifth bits: bit 8 b + 4 h + i of a row's word belongs to input 4 i + b + 16 h.
inline void five_bits(const uint8_t* quants, const uint8_t* high, int i, int lanes, U* plane) {
    const U words = load_words(quants + 64 * i + 4 * W * lanes), bits = load_words(high + 4 * W * lanes);
    plane[0] = (words & 0x0f0f0f0fu) | ((bits << (4 - i)) & 0x10101010u);
    plane[1] = ((words >> 4) & 0x0f0f0f0fu) | ((bits >> i) & 0x10101010u);
}

struct Packed5_0 : Layout<32, 1, 0, 1, 4> {
    static constexpr Order ORDER = Order::PLANES;
    static constexpr int ZERO = 16;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return halves_at(block, lanes); }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* plane) {
        five_bits(quants(block, s), high(block, s), i, lanes, plane);
    }
};

struct Packed5_1 : Layout<64, 1, 0, 1, 4> {
    static constexpr Order ORDER = Order::PLANES;
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int, int, int lanes) { return halves_at(block, lanes); }
    static V minimum(const uint8_t* block, int, int lanes) { return halves_at(block + 32, lanes); }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* plane) {
        five_bits(quants(block, s), high(block, s), i, lanes, plane);
    }
};

struct Packed8_0 : Layout<32, 1, 0, 0, 8> {
    static constexpr Order ORDER = Order::WORDS;
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int, int, int lanes) { return halves_at(block, lanes); }
};

struct Packed4_K : Layout<64, 8, 32, 0, 4> {
    static constexpr Order ORDER = Order::NIBBLES;
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int s, int, int lanes) {
        return halves_at(block, lanes) * load_u8(sub(block, s) + lanes * W);
    }
    static V minimum(const uint8_t* block, int s, int lanes) {
        return zero() - halves_at(block + 32, lanes) * load_u8(sub(block, s) + 16 + lanes * W);
    }
};

struct Packed5_K : Layout<64, 8, 32, 1, 4> {
    static constexpr Order ORDER = Order::PLANES;
    static constexpr int ZERO = 0;
    static constexpr bool MINIMUM = true;
    static V scale(const uint8_t* block, int s, int, int lanes) {
        return halves_at(block, lanes) * load_u8(sub(block, s) + lanes * W);
    }
    static V minimum(const uint8_t* block, int s, int lanes) {
        return zero() - halves_at(block + 32, lanes) * load_u8(sub(block, s) + 16 + lanes * W);
    }
    static void planes(const uint8_t* block, int s, int i, int lanes, U* plane) {
        five_bits(quants(block, s), high(block, s), i, lanes, plane);
    }
};

struct Packed6_K : Layout<32, 8, 32, 2, 4> {
    static constexpr Order ORDER = Order::PLANES;
    static constexpr int ZERO = 32;
    static constexpr bool MINIMUM = false;
    static V scale(const uint8_t* block, int s, int half, int lanes) {
        return halves_at(block, lanes) * load_i8((const int8_t*)sub(block, s) + 16 * half + lanes * W);
    }
    // Bits 8 b + 2 i and the next of a row's word h belong to input 4 i + b + 16 h.
    static void planes(const uint8_t* block, int s, int i, int lanes, U* plane) {
        const U words = load_words(quants(block, s) + 64 * i + 4 * W * lanes);
        const U low = load_words(high(block, s) + 4 * W * lanes), up = load_words(high(block, s) + 64 + 4 * W * lanes);
        plane[0] = (words & 0x0f0f0f0fu) | ((i < 2 ? low << (4 - 2 * i) : low >> (2 * i - 4)) & 0x30303030u);
        plane[1] = ((words >> 4) & 0x0f0f0f0fu) | ((i < 2 ? up << (4 - 2 * i) : up >> (2 * i - 4)) & 0x30303030u);
    }
};

// Weights are read once from memory: what comes this many bytes later is asked for now. Hardware prefetchers stop at every
// page and begin anew; with this, one core reads 11 GB/s where it read 8.5.
constexpr int AHEAD = 3072;

template <int BYTES, int G>
inline void fetch_ahead(const uint8_t* p, size_t group_bytes) {
    for (int g = 0; g < G; g++)
        for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + g * group_bytes + AHEAD + i);
}

// The quant at position k of a word (of 8 in a plane or a word of nibbles, of 4 bytes) as a float, where it stands.
template <Order ORDER>
inline V quant(U word, int k) {
    if (ORDER == Order::PLANES) return to_float(k / 2 == 3 ? word >> 24 : word & (0xffu << (8 * (k / 2))));
    if (ORDER == Order::NIBBLES) return to_float(k == 7 ? word >> 28 : word & (0xfu << (4 * k)));
    const I bytes = (I)word;  // with a sign
    return to_float((U)(k == 3 ? bytes >> 24 : k == 0 ? bytes << 24 : (bytes << (24 - 8 * k)) & (int)0xff000000));
}

// N tokens times G neighbouring groups; y[n] receives outputs 0 .. 16 G - 1 of the groups, `outputs` of them.
// The order of operations of a (token, output) does not depend on N or G.
template <class F, int N, int G>
inline void packed_dots(const uint8_t* w, size_t group_bytes, const Prepared* tokens, int inputs, float* const* y,
                        int outputs) {
    V total[N][G][LANE_VECTORS];
    for (int n = 0; n < N; n++)
        for (int g = 0; g < G; g++)
            for (int l = 0; l < LANE_VECTORS; l++) total[n][g][l] = zero();
    const uint8_t* block = w;
    int at = 0;
    for (int b = 0; b < inputs / F::BLOCK; b++, block += F::BYTES) {
        for (int s = 0; s < F::BLOCK / 32; s++, at += 32) {
            fetch_ahead<F::BYTES / (F::BLOCK / 32), G>(F::sub(block, s), group_bytes);
            V acc[N][G][LANE_VECTORS][2];
            for (int n = 0; n < N; n++)
                for (int h = 0; h < 2; h++) {
                    const V start = F::ZERO ? all(-(float)F::ZERO * tokens[n].sums[at / 16 + h]) : zero();
                    for (int g = 0; g < G; g++)
                        for (int l = 0; l < LANE_VECTORS; l++) acc[n][g][l][h] = start;
                }
            if constexpr (F::ORDER == Order::PLANES) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    U plane[G][LANE_VECTORS][2];
                    for (int g = 0; g < G; g++)
                        for (int l = 0; l < LANE_VECTORS; l++) F::planes(block + g * group_bytes, s, i, l, plane[g][l]);
#pragma GCC unroll 8
                    for (int k = 0; k < 8; k++) {
                        V x[N];
                        for (int n = 0; n < N; n++) x[n] = all(tokens[n].x[at + 8 * i + k]);
                        for (int g = 0; g < G; g++)
                            for (int l = 0; l < LANE_VECTORS; l++) {
                                const V q = quant<F::ORDER>(plane[g][l][k % 2], k);
                                for (int n = 0; n < N; n++)
                                    acc[n][g][l][k % 2] = fma(x[n], q, acc[n][g][l][k % 2]);
                            }
                    }
                }
            } else if constexpr (F::ORDER == Order::NIBBLES) {
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) {
                    const uint8_t* quants = F::quants(block, s) + 64 * i;
#pragma GCC unroll 8
                    for (int k = 0; k < 8; k++) {
                        V x[N];
                        for (int n = 0; n < N; n++) x[n] = all(tokens[n].x[at + 8 * i + k]);
                        for (int g = 0; g < G; g++)
                            for (int l = 0; l < LANE_VECTORS; l++) {
                                const V q = quant<F::ORDER>(load_words(quants + g * group_bytes + 4 * W * l), k);
                                for (int n = 0; n < N; n++)
                                    acc[n][g][l][k % 2] = fma(x[n], q, acc[n][g][l][k % 2]);
                            }
                    }
                }
            } else {
#pragma GCC unroll 8
                for (int i = 0; i < 8; i++) {
                    const uint8_t* quants = F::quants(block, s) + 64 * i;
#pragma GCC unroll 4
                    for (int k = 0; k < 4; k++) {
                        V x[N];
                        for (int n = 0; n < N; n++) x[n] = all(tokens[n].x[at + 4 * i + k]);
                        for (int g = 0; g < G; g++)
                            for (int l = 0; l < LANE_VECTORS; l++) {
                                const V q = quant<F::ORDER>(load_words(quants + g * group_bytes + 4 * W * l), k);
                                for (int n = 0; n < N; n++)
                                    acc[n][g][l][i / 4] = fma(x[n], q, acc[n][g][l][i / 4]);
                            }
                    }
                }
            }
            for (int g = 0; g < G; g++)
                for (int l = 0; l < LANE_VECTORS; l++) {
                    const uint8_t* here = block + g * group_bytes;
                    const V scale = F::scale(here, s, 0, l), upper = F::scale(here, s, 1, l);
                    for (int n = 0; n < N; n++) {
                        V t = fma(scale, acc[n][g][l][0], total[n][g][l]);
                        t = fma(upper, acc[n][g][l][1], t);
                        if constexpr (F::MINIMUM)
                            t = fma(all(tokens[n].sums[at / 16] + tokens[n].sums[at / 16 + 1]), F::minimum(here, s, l), t);
                        total[n][g][l] = t;
                    }
                }
        }
    }
    for (int n = 0; n < N; n++) {
        float lanes[G * GROUP];
        for (int g = 0; g < G; g++)
            for (int l = 0; l < LANE_VECTORS; l++) store(lanes + g * GROUP + l * W, total[n][g][l]);
        memcpy(y[n], lanes, sizeof(float) * outputs);
    }
}

// The 32 quants (s of a block) of 16 rows as floats, in the order of prepared inputs; of a format in planes.
template <class F>
inline void packed_quants(const uint8_t* block, int s, V (*out)[LANE_VECTORS]) {
    for (int l = 0; l < LANE_VECTORS; l++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            U plane[2];
            F::planes(block, s, i, l, plane);
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) out[8 * i + k][l] = quant<F::ORDER>(plane[k % 2], k);
        }
}

// Scales and minimum of 32 inputs of 16 rows.
struct Header {
    V scale[2][LANE_VECTORS], minimum[LANE_VECTORS];
};

// N tokens times 32 decoded inputs of 16 rows; the operations of a (token, output) in the order of packed_dots.
template <class F, int N>
inline void decoded_dots(const V (*quants)[LANE_VECTORS], const Header& header, const Prepared* tokens, int at,
                         V (*total)[LANE_VECTORS]) {
    V acc[2][N][LANE_VECTORS];
    for (int h = 0; h < 2; h++) {  // one half after the other: the sums of more tokens fit into registers
        for (int n = 0; n < N; n++)
            for (int l = 0; l < LANE_VECTORS; l++)
                acc[h][n][l] = F::ZERO ? all(-(float)F::ZERO * tokens[n].sums[at / 16 + h]) : zero();
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            for (int n = 0; n < N; n++) {
                const V x = all(tokens[n].x[at + 2 * i + h]);
                for (int l = 0; l < LANE_VECTORS; l++) acc[h][n][l] = fma(x, quants[2 * i + h][l], acc[h][n][l]);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int l = 0; l < LANE_VECTORS; l++) {
            V t = fma(header.scale[0][l], acc[0][n][l], total[n][l]);
            t = fma(header.scale[1][l], acc[1][n][l], t);
            if constexpr (F::MINIMUM)
                t = fma(all(tokens[n].sums[at / 16] + tokens[n].sums[at / 16 + 1]), header.minimum[l], t);
            total[n][l] = t;
        }
}

constexpr int DECODED_TOKENS = 6;  // of a tile: their sums and one input fit into 16 registers

// Any number of tokens, three or more, in tiles of about one size.
template <class F>
inline void decoded_tiles(const V (*quants)[LANE_VECTORS], const Header& header, const Prepared* tokens, int count, int at,
                          V (*total)[LANE_VECTORS]) {
    for (int tiles = (count + DECODED_TOKENS - 1) / DECODED_TOKENS, t = 0, size; tiles > 0; tiles--, t += size) {
        size = (count - t) / tiles;
        switch (size) {
            case 6: decoded_dots<F, 6>(quants, header, tokens + t, at, total + t); break;
            case 5: decoded_dots<F, 5>(quants, header, tokens + t, at, total + t); break;
            case 4: decoded_dots<F, 4>(quants, header, tokens + t, at, total + t); break;
            case 3: decoded_dots<F, 3>(quants, header, tokens + t, at, total + t); break;
        }
    }
}

// All tokens times one group, in one pass over its blocks, each decoded once.
template <class F>
void packed_group(const uint8_t* w, const Prepared* tokens, int count, int inputs, float* y, size_t y_stride, int outputs) {
    static thread_local std::vector<float> memory;
    memory.resize((size_t)count * GROUP + W);
    auto total = (V (*)[LANE_VECTORS])(((uintptr_t)memory.data() + sizeof(V) - 1) / sizeof(V) * sizeof(V));
    for (int t = 0; t < count; t++)
        for (int l = 0; l < LANE_VECTORS; l++) total[t][l] = zero();
    V quants[32][LANE_VECTORS];
    Header header;
    int at = 0;
    for (const uint8_t* block = w; at < inputs; block += F::BYTES)
        for (int s = 0; s < F::BLOCK / 32; s++, at += 32) {
            fetch_ahead<F::BYTES / (F::BLOCK / 32), 1>(F::sub(block, s), 0);
            packed_quants<F>(block, s, quants);
            for (int l = 0; l < LANE_VECTORS; l++) {
                for (int h = 0; h < 2; h++) header.scale[h][l] = F::scale(block, s, h, l);
                if constexpr (F::MINIMUM) header.minimum[l] = F::minimum(block, s, l);
            }
            decoded_tiles<F>(quants, header, tokens, count, at, total);
        }
    for (int t = 0; t < count; t++) memcpy(y + t * y_stride, total[t], sizeof(float) * outputs);
}

// The 32 weights (s of a block) of W rows, exactly: out[input] for lanes l of the group.
template <class F>
inline void packed_values(const uint8_t* block, int s, int l, V* out) {
    for (int h = 0; h < 2; h++) {
        const V scale = F::scale(block, s, h, l);
        V minimum = all(-(float)F::ZERO) * scale;
        if constexpr (F::MINIMUM) minimum = F::minimum(block, s, l);
        for (int i = 0; i < 4; i++) {
            U plane[2];
            if constexpr (F::ORDER == Order::PLANES) F::planes(block, s, i, l, plane);
            for (int b = 0; b < 4; b++) {
                V q;
                if constexpr (F::ORDER == Order::PLANES) {
                    q = to_float((plane[h] >> (8 * b)) & 0xffu);
                } else if constexpr (F::ORDER == Order::NIBBLES) {
                    const U words = load_words(F::quants(block, s) + 64 * i + 4 * W * l);
                    q = to_float((words >> (8 * b + 4 * h)) & 0xfu);
                } else {
                    const I words = (I)load_words(F::quants(block, s) + 64 * (i + 4 * h) + 4 * W * l);
                    q = to_float((U)((words << (24 - 8 * b)) >> 24));
                }
                out[16 * h + 4 * i + b] = fma(scale, q, minimum);
            }
        }
    }
}

constexpr int DOT_GROUPS = W == 16 ? 2 : 1;     // groups in flight for one token: enough sums to hide latency
constexpr int PACKED_TOKENS = W == 16 ? 4 : 2;  // tokens that share a decoded weight, as far as registers reach

// All tokens times `groups` neighbouring groups; y[t * y_stride] receives `outputs` outputs.
template <class F>
void packed_rows(const uint8_t* w, size_t group_bytes, int groups, const Prepared* tokens, int count, int inputs, float* y,
                 size_t y_stride, int outputs) {
    // AVX2 has no registers to share what it decodes among more than two tokens. Planes take so long that it pays to put
    // what they decode to into memory; nibbles and bytes are decoded beside the products anyway.
    if constexpr (W == 8 && F::ORDER == Order::PLANES)
        if (count > PACKED_TOKENS) {
            for (int g = 0; g < groups; g++)
                packed_group<F>(w + g * group_bytes, tokens, count, inputs, y + g * GROUP, y_stride,
                                std::min(GROUP, outputs - g * GROUP));
            return;
        }
    int t = 0;
    auto tile = [&](auto size) {
        constexpr int N = decltype(size)::value;
        float* to[N];
        for (int g = 0; g < groups; g++) {
            for (int n = 0; n < N; n++) to[n] = y + (t + n) * y_stride + g * GROUP;
            packed_dots<F, N, 1>(w + g * group_bytes, group_bytes, tokens + t, inputs, to,
                                 std::min(GROUP, outputs - g * GROUP));
        }
        t += N;
    };
    while (t + PACKED_TOKENS <= count) tile(std::integral_constant<int, PACKED_TOKENS>{});
    if constexpr (PACKED_TOKENS > 2)
        if (t + 2 <= count) tile(std::integral_constant<int, 2>{});
    if (t == count) return;
    int g = 0;
    if constexpr (DOT_GROUPS > 1)
        for (; g + DOT_GROUPS <= groups; g += DOT_GROUPS) {
            float* to = y + t * y_stride + g * GROUP;
            packed_dots<F, 1, DOT_GROUPS>(w + g * group_bytes, group_bytes, tokens + t, inputs, &to,
                                          std::min(DOT_GROUPS * GROUP, outputs - g * GROUP));
        }
    for (; g < groups; g++) {
        float* to = y + t * y_stride + g * GROUP;
        packed_dots<F, 1, 1>(w + g * group_bytes, group_bytes, tokens + t, inputs, &to, std::min(GROUP, outputs - g * GROUP));
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

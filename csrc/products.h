// Products of rounded inputs (pairs.h, fours.h) with quantised weights (packed.h), one group of 16 rows at a time.
//
// A result is, for every 32 inputs in order (every 16 where halves have scales of their own),
// total = fma(scale of weights * scale of inputs, integer sum, total), then the minimum times the inputs' sum, if any.
// Integer sums are exact, so that a (token, output) has the same bits however many tokens there are, whichever tile they
// fall into and whether quants went through memory.
#pragma once

#include <algorithm>
#include <vector>

#include "fours.h"

namespace troth {
namespace TROTH_ISA {

// Weights are read once from memory: what comes this many bytes later is asked for now. Hardware prefetchers stop at every
// page and begin anew; with this, one core reads 11 GB/s where it read 8.5.
constexpr int AHEAD = 3072;

template <int BYTES>
inline void fetch_ahead(const uint8_t* p) {
    for (int i = 0; i < BYTES; i += 64) __builtin_prefetch(p + AHEAD + i);
}

// Scales and minima of 32 inputs of a group.
template <class F>
struct Header {
    static_assert(!F::HALVES || !F::MINIMUM, "a minimum is added once");
    static constexpr int HALVES = F::HALVES ? 2 : 1;
    V scale[HALVES][LANE_VECTORS], minimum[F::MINIMUM ? LANE_VECTORS : 1];

    void read(const uint8_t* block, int s) {
        for (int l = 0; l < LANE_VECTORS; l++) {
            for (int h = 0; h < HALVES; h++) scale[h][l] = F::scale(block, s, h, l);
            if constexpr (F::MINIMUM) minimum[l] = F::minimum(block, s, l);
        }
    }
};

constexpr int TILE = W == 16 ? 12 : W == 8 ? 6 : 3;  // tokens whose sums stay in registers

// The integer that the sum of one half, or of both, begins with: what quants count from.
template <class F, class Tokens>
inline I start(const Tokens& x, int h) {
    return I{} + -F::ZERO * (F::HALVES ? x.halves[h] : x.halves[0] + x.halves[1]);
}

template <class F, class Tokens>
inline void add_sum(const Header<F>& header, const Tokens& x, int h, const I* acc, V* total) {
    const V scale = all(x.scale), sum = all(x.sum);
    for (int l = 0; l < LANE_VECTORS; l++) {
        V t = fma(header.scale[h][l] * scale, to_float(acc[l]), total[l]);
        if constexpr (F::MINIMUM) t = fma(sum, header.minimum[l], t);
        total[l] = t;
    }
}

// N tokens, one or two, times one group: quants go from their words straight into products.
template <class F, class X, int N>
void direct_group(const uint8_t* w, const typename X::Tokens* const* tokens, int inputs, V (*total)[LANE_VECTORS]) {
    constexpr int HALVES = Header<F>::HALVES, STEPS = X::template steps<F>();
    V sums[N][LANE_VECTORS];
    for (int n = 0; n < N; n++)
        for (int l = 0; l < LANE_VECTORS; l++) sums[n][l] = zero();
    int at = 0;
    for (const uint8_t* block = w; at < inputs / 32; block += F::BYTES)
        for (int s = 0; s < F::BLOCK / 32; s++, at++) {
            fetch_ahead<F::SUB_BYTES>(F::sub(block, s));
            I acc[HALVES][N][LANE_VECTORS];
            for (int h = 0; h < HALVES; h++)
                for (int n = 0; n < N; n++)
                    for (int l = 0; l < LANE_VECTORS; l++) acc[h][n][l] = start<F>(tokens[n][at], h);
#pragma GCC unroll 2
            for (int first = 0; first < 4; first += STEPS) {
                typename X::Sum part[HALVES][N][LANE_VECTORS];
                for (int h = 0; h < HALVES; h++)
                    for (int n = 0; n < N; n++)
                        for (int l = 0; l < LANE_VECTORS; l++) part[h][n][l] = X::begin(acc[h][n][l]);
#pragma GCC unroll 4
                for (int i = first; i < first + STEPS; i++)
                    for (int l = 0; l < LANE_VECTORS; l++) {
                        I quants[X::PER];
                        X::template quants<F>(block, s, i, l, quants);
                        for (int k = 0; k < X::PER; k++)
                            for (int n = 0; n < N; n++) {
                                auto& sum = part[F::HALVES ? k / (X::PER / 2) : 0][n][l];
                                sum = X::add(sum, X::codes(tokens[n][at], X::PER * i + k), quants[k]);
                            }
                    }
                for (int h = 0; h < HALVES; h++)
                    for (int n = 0; n < N; n++)
                        for (int l = 0; l < LANE_VECTORS; l++) acc[h][n][l] = X::end(part[h][n][l], acc[h][n][l]);
            }
            Header<F> header;
            header.read(block, s);
            for (int n = 0; n < N; n++)
                for (int h = 0; h < HALVES; h++) add_sum(header, tokens[n][at], h, acc[h][n], sums[n]);
        }
    memcpy(total, sums, sizeof sums);
}

// 32 inputs of a group, ready to be met by tokens.
template <class F, class X>
struct Decoded {
    I quants[X::WORDS][LANE_VECTORS];
    Header<F> header;

    void read(const uint8_t* block, int s) {
        fetch_ahead<F::SUB_BYTES>(F::sub(block, s));
        for (int l = 0; l < LANE_VECTORS; l++)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                I some[X::PER];
                X::template quants<F>(block, s, i, l, some);
                for (int k = 0; k < X::PER; k++) quants[X::PER * i + k][l] = some[k];
            }
        header.read(block, s);
    }
};

// N tokens times `span` times 32 inputs, `at` the first of them among the tokens'.
template <class F, class X, int N>
void meet(const Decoded<F, X>* decoded, int span, const typename X::Tokens* const* tokens, int at,
          V (*total)[LANE_VECTORS]) {
    constexpr int STEPS = X::template steps<F>(), HALF = X::PER / 2, WORDS = STEPS * (F::HALVES ? HALF : X::PER);
    V sums[N][LANE_VECTORS];
    memcpy(sums, total, sizeof sums);
    for (int s = 0; s < span; s++, decoded++, at++) {
        for (int h = 0; h < Header<F>::HALVES; h++) {
            I acc[N][LANE_VECTORS];
            for (int n = 0; n < N; n++)
                for (int l = 0; l < LANE_VECTORS; l++) acc[n][l] = start<F>(tokens[n][at], h);
            for (int first = 0; first < 4; first += STEPS) {
                typename X::Sum part[N][LANE_VECTORS];
                for (int n = 0; n < N; n++)
                    for (int l = 0; l < LANE_VECTORS; l++) part[n][l] = X::begin(acc[n][l]);
                // Unrolled whole, compilers make all products first and keep them in memory until they are added up.
#pragma GCC unroll 4
                for (int j = 0; j < WORDS; j++) {
                    const int p = X::PER * first + (F::HALVES ? j / HALF * X::PER + j % HALF + HALF * h : j);
                    for (int n = 0; n < N; n++) {
                        const I x = X::codes(tokens[n][at], p);
                        for (int l = 0; l < LANE_VECTORS; l++) part[n][l] = X::add(part[n][l], x, decoded->quants[p][l]);
                    }
                }
                for (int n = 0; n < N; n++)
                    for (int l = 0; l < LANE_VECTORS; l++) acc[n][l] = X::end(part[n][l], acc[n][l]);
            }
            for (int n = 0; n < N; n++) add_sum(decoded->header, tokens[n][at], h, acc[n], sums[n]);
        }
    }
    memcpy(total, sums, sizeof sums);
}

template <class F, class X, int N>
inline void meet_tile(int size, const Decoded<F, X>* decoded, int span, const typename X::Tokens* const* tokens, int at,
                      V (*total)[LANE_VECTORS]) {
    if constexpr (N > 1)
        if (size < N) return meet_tile<F, X, N - 1>(size, decoded, span, tokens, at, total);
    meet<F, X, N>(decoded, span, tokens, at, total);
}

// How many times 32 inputs are decoded before tokens meet them: what stays in the first level of cache beside a tile. With
// few tokens memory is the limit, and decoding has to ask it for more all the time, not in bursts.
constexpr int LONGEST_SPAN = 16, SHORTEST_SPAN = 2, FEW_TOKENS = 4 * TILE;
// Bytes of inputs that are met by one group after the other: what stays in the second level.
constexpr size_t MET_BYTES = 256 * 1024;

// All tokens times one group, in tiles of about one size.
template <class F, class X>
void decoded_group(const uint8_t* w, const typename X::Tokens* const* tokens, int count, int inputs,
                   Decoded<F, X>* decoded, V (*total)[LANE_VECTORS]) {
    const int tiles = (count + TILE - 1) / TILE, size = count / tiles, larger = count % tiles;
    for (int t = 0; t < count; t++)
        for (int l = 0; l < LANE_VECTORS; l++) total[t][l] = zero();
    const int longest = count <= FEW_TOKENS ? SHORTEST_SPAN : LONGEST_SPAN;
    for (int at = 0, left = inputs / 32; left > 0; at += longest, left -= longest) {
        const int span = std::min(longest, left);
        for (int s = 0; s < span; s++)
            decoded[s].read(w + (size_t)((at + s) * 32 / F::BLOCK) * F::BYTES, (at + s) * 32 % F::BLOCK / 32);
        for (int i = 0, t = 0; i < tiles; i++) {
            const int here = size + (i < larger);
            meet_tile<F, X, TILE>(here, decoded, span, tokens + t, at, total + t);
            t += here;
        }
    }
}

// All tokens times `groups` neighbouring groups; y[t * y_stride] receives `outputs` outputs.
template <class F, class X>
void packed_rows(const uint8_t* w, size_t group_bytes, int groups, const typename X::Tokens* const* tokens, int count,
                 int inputs, float* y, size_t y_stride, int outputs) {
    struct alignas(V) Total {
        V lanes[LANE_VECTORS];
    };
    static thread_local std::vector<Decoded<F, X>> decoded(LONGEST_SPAN);
    static thread_local std::vector<Total> totals;
    const int most = std::max(TILE, (int)(MET_BYTES / (sizeof(typename X::Tokens) * (inputs / 32))));
    if (totals.size() < (size_t)most) totals.resize(most);
    auto total = (V (*)[LANE_VECTORS])totals.data();
    Decoded<F, X>* const scratch = decoded.data();
    for (int first = 0; first < count; first += most) {
        const int here = std::min(most, count - first);
        for (int g = 0; g < groups; g++) {
            const uint8_t* group = w + g * group_bytes;
            if (here == 1)
                direct_group<F, X, 1>(group, tokens + first, inputs, total);
            else if (here == 2)
                direct_group<F, X, 2>(group, tokens + first, inputs, total);
            else
                decoded_group<F, X>(group, tokens + first, here, inputs, scratch, total);
            const int width = std::min(GROUP, outputs - g * GROUP);
            float* to = y + first * y_stride + g * GROUP;
            for (int t = 0; t < here; t++, to += y_stride) {
                if (width == GROUP)
                    memcpy(to, total[t], sizeof(float) * GROUP);  // of a size that is known, in two moves
                else
                    memcpy(to, total[t], sizeof(float) * width);
            }
        }
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

// y[t][o] = sum over i of x[t][i] * w[o][i], with weights dequantised on the way.
//
// Three paths, each computing every (token, output) in an order that does not depend on the number of tokens, rows or
// threads, so that a token's result never depends on its company:
//   packed  quantised weights: products of integers of 16 or 8 bits, products.h
//   dots    rows of numbers, few tokens: weights are read once from memory, float32
//   panels  rows of numbers, many tokens: 16 or 32 outputs side by side make a panel that stays in cache; float32 here,
//           products of bf16 numbers in panels16.h, there of quantised weights, too
#pragma once

#include <algorithm>

#include "arguments.h"
#include "formats.h"
#include "products.h"

namespace troth {
namespace TROTH_ISA {

// Calls visit with the format's type.
template <class Visit>
inline void with_format(int format, Visit visit) {
    switch (format) {
        case FORMAT_Q4_0: visit(Packed4_0{}); break;
        case FORMAT_Q4_1: visit(Packed4_1{}); break;
        case FORMAT_Q5_0: visit(Packed5_0{}); break;
        case FORMAT_Q5_1: visit(Packed5_1{}); break;
        case FORMAT_Q8_0: visit(Packed8_0{}); break;
        case FORMAT_Q4_K: visit(Packed4_K{}); break;
        case FORMAT_Q5_K: visit(Packed5_K{}); break;
        case FORMAT_Q6_K: visit(Packed6_K{}); break;
        case FORMAT_A4_32: visit(PackedAffine<4, 1>{}); break;
        case FORMAT_A4_64: visit(PackedAffine<4, 2>{}); break;
        case FORMAT_A4_128: visit(PackedAffine<4, 4>{}); break;
        case FORMAT_A8_32: visit(PackedAffine<8, 1>{}); break;
        case FORMAT_A8_64: visit(PackedAffine<8, 2>{}); break;
        case FORMAT_A8_128: visit(PackedAffine<8, 4>{}); break;
        case FORMAT_F32: visit(F32{}); break;
        case FORMAT_F16: visit(F16{}); break;
        default: visit(BF16{}); break;
    }
}

constexpr int DOT_ROWS = 4;     // weight rows in flight for one token: four streams hide memory latency
constexpr int DOT_TOKENS = 4;   // tokens that share one dequantised block

// One token: outputs begin .. end - 1.
template <class F>
void dots_one(const uint8_t* w, size_t row_bytes, const float* x, int inputs, float* y, int begin, int end) {
    const int blocks = inputs / 32;
    int o = begin;
    for (; o + DOT_ROWS <= end; o += DOT_ROWS) {
        const uint8_t* row[DOT_ROWS];
        V acc[DOT_ROWS];
        for (int r = 0; r < DOT_ROWS; r++) {
            row[r] = w + (size_t)(o + r) * row_bytes;
            acc[r] = zero();
        }
        const float* xb = x;
        for (int b = 0; b < blocks; b++, xb += 32) {
#pragma GCC unroll 4
            for (int r = 0; r < DOT_ROWS; r++, row[r - 1] += F::BYTES) {
                V v[PARTS];
                F::values(row[r], v);
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++) acc[r] = fma(v[i], load(xb + i * W), acc[r]);
            }
        }
        for (int r = 0; r < DOT_ROWS; r++) y[o + r] = sum(acc[r]);
    }
    for (; o < end; o++) {
        const uint8_t* row = w + (size_t)o * row_bytes;
        V acc = zero();
        const float* xb = x;
        for (int b = 0; b < blocks; b++, row += F::BYTES, xb += 32) {
            V v[PARTS];
            F::values(row, v);
            for (int i = 0; i < PARTS; i++) acc = fma(v[i], load(xb + i * W), acc);
        }
        y[o] = sum(acc);
    }
}

// N tokens at once, N <= DOT_TOKENS; the same order of operations per (token, output) as dots_one.
template <class F, int N>
void dots_some(const uint8_t* w, size_t row_bytes, const float* x, size_t x_stride, int inputs, float* y,
               size_t y_stride, int begin, int end) {
    const int blocks = inputs / 32;
    for (int o = begin; o < end; o++) {
        const uint8_t* row = w + (size_t)o * row_bytes;
        V acc[N];
        for (int t = 0; t < N; t++) acc[t] = zero();
        const float* xb = x;
        for (int b = 0; b < blocks; b++, row += F::BYTES, xb += 32) {
            V v[PARTS];
            F::values(row, v);
#pragma GCC unroll 4
            for (int t = 0; t < N; t++)
#pragma GCC unroll 8
                for (int i = 0; i < PARTS; i++) acc[t] = fma(v[i], load(xb + t * x_stride + i * W), acc[t]);
        }
        for (int t = 0; t < N; t++) y[t * y_stride + o] = sum(acc[t]);
    }
}

template <class F>
void dots(const uint8_t* w, size_t row_bytes, const float* x, size_t x_stride, int tokens, int inputs, float* y,
          size_t y_stride, int begin, int end) {
    int t = 0;
    for (; t + DOT_TOKENS <= tokens; t += DOT_TOKENS)
        dots_some<F, DOT_TOKENS>(w, row_bytes, x + t * x_stride, x_stride, inputs, y + t * y_stride, y_stride, begin, end);
    const float* xt = x + t * x_stride;
    float* yt = y + t * y_stride;
    switch (tokens - t) {
        case 3: dots_some<F, 3>(w, row_bytes, xt, x_stride, inputs, yt, y_stride, begin, end); break;
        case 2: dots_some<F, 2>(w, row_bytes, xt, x_stride, inputs, yt, y_stride, begin, end); break;
        case 1: dots_one<F>(w, row_bytes, xt, inputs, yt, begin, end); break;
        default: break;
    }
}

constexpr int PANEL = std::max(GROUP, 2 * W);   // outputs side by side: whole groups, for panels16.h
constexpr int PANEL_VECTORS = PANEL / W;
constexpr int PANEL_TOKENS = W == 16 ? 12 : W == 8 ? 6 : 3;  // accumulators: 24 of 32 registers, or 12 of 16
constexpr int PANEL_INPUTS = 2048;    // inputs per panel: 2048 * 16 * 4 bytes = 128 KiB stay in the second-level cache

// Transpose a W x W tile: rows[r] holds W inputs of output r; out + i * PANEL receives W outputs of input i.
inline void transpose_tile(const V* rows, float* out) {
#if defined(TROTH_AVX2)
    __m256 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0x44);
        b[4 * i + 1] = _mm256_shuffle_ps(a[4 * i], a[4 * i + 2], 0xee);
        b[4 * i + 2] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0x44);
        b[4 * i + 3] = _mm256_shuffle_ps(a[4 * i + 1], a[4 * i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        store(out + i * PANEL, _mm256_permute2f128_ps(b[i], b[i + 4], 0x20));
        store(out + (i + 4) * PANEL, _mm256_permute2f128_ps(b[i], b[i + 4], 0x31));
    }
#else
    for (int r = 0; r < W; r++) {
        float lanes[W];
        store(lanes, rows[r]);
        for (int i = 0; i < W; i++) out[i * PANEL + r] = lanes[i];
    }
#endif
}

// Dequantise outputs o .. o + PANEL - 1 (those past `outputs` are zero), inputs first .. first + count - 1, into
// panel[input][output].
template <class F>
void fill_panel(const uint8_t* w, size_t row_bytes, int o, int outputs, int first, int count, float* panel) {
    for (int k = 0; k < count; k += 32)
        for (int half = 0; half < PANEL; half += W) {
            V rows[PARTS][W];
            for (int r = 0; r < W; r++) {
                V v[PARTS];
                for (int i = 0; i < PARTS; i++) v[i] = zero();
                if (o + half + r < outputs)
                    F::values(w + (size_t)(o + half + r) * row_bytes + (size_t)((first + k) / 32) * F::BYTES, v);
                for (int i = 0; i < PARTS; i++) rows[i][r] = v[i];
            }
            for (int i = 0; i < PARTS; i++) transpose_tile(rows[i], panel + (size_t)(k + i * W) * PANEL + half);
        }
}

// N tokens times one panel; adds to what y holds unless `fresh`.
template <int N>
inline void panel_tokens(const float* panel, const float* x, size_t x_stride, int count, float* y, size_t y_stride,
                         int width, bool fresh) {
    V acc[N][PANEL_VECTORS];
    for (int t = 0; t < N; t++)
        for (int l = 0; l < PANEL_VECTORS; l++) acc[t][l] = zero();
    for (int k = 0; k < count; k++) {
        V w[PANEL_VECTORS];
        for (int l = 0; l < PANEL_VECTORS; l++) w[l] = load(panel + (size_t)k * PANEL + l * W);
#pragma GCC unroll 12
        for (int t = 0; t < N; t++) {
            V xt = all(x[t * x_stride + k]);
            for (int l = 0; l < PANEL_VECTORS; l++) acc[t][l] = fma(xt, w[l], acc[t][l]);
        }
    }
    for (int t = 0; t < N; t++) {
        float lanes[PANEL];
        for (int l = 0; l < PANEL_VECTORS; l++) store(lanes + l * W, acc[t][l]);
        float* out = y + t * y_stride;
        if (fresh)
            for (int i = 0; i < width; i++) out[i] = lanes[i];
        else
            for (int i = 0; i < width; i++) out[i] += lanes[i];
    }
}

template <int N>
inline void panel_rest(int tokens, const float* panel, const float* x, size_t x_stride, int count, float* y,
                       size_t y_stride, int width, bool fresh) {
    if constexpr (N > 0) {
        if (tokens == N)
            panel_tokens<N>(panel, x, x_stride, count, y, y_stride, width, fresh);
        else
            panel_rest<N - 1>(tokens, panel, x, x_stride, count, y, y_stride, width, fresh);
    }
}

// Outputs of one panel for all tokens. `panel` is scratch of PANEL_INPUTS * PANEL floats.
template <class F>
void panels(const uint8_t* w, size_t row_bytes, const float* x, size_t x_stride, int tokens, int inputs, float* y,
            size_t y_stride, int o, int outputs, float* panel) {
    const int width = std::min(PANEL, outputs - o);
    for (int first = 0; first < inputs; first += PANEL_INPUTS) {
        const int count = std::min(PANEL_INPUTS, inputs - first);
        fill_panel<F>(w, row_bytes, o, outputs, first, count, panel);
        int t = 0;
        for (; t + PANEL_TOKENS <= tokens; t += PANEL_TOKENS)
            panel_tokens<PANEL_TOKENS>(panel, x + t * x_stride + first, x_stride, count, y + t * y_stride + o, y_stride,
                                       width, first == 0);
        panel_rest<PANEL_TOKENS - 1>(tokens - t, panel, x + t * x_stride + first, x_stride, count,
                                     y + t * y_stride + o, y_stride, width, first == 0);
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

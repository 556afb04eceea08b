// Panels (linear.h) of bf16 numbers, whose products are summed in float32: panel[input / 2][output] holds pairs of inputs.
//
// All that an instruction set with such products has of its own; whatever else it does is AVX-512's, compiled once.
#pragma once

#include "arguments.h"
#include "kernel_table.h"
#include "linear.h"
#include "pool.h"

namespace troth {
namespace TROTH_ISA {

// rows[r] holds 16 pairs of output r; out + p * PANEL receives pair p of 16 outputs.
inline void transpose_pairs(__m512i* rows, uint32_t* out) {
    __m512i a[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    // Now rows[4 g + j] holds, in its 128-bit lane l, pair 4 l + j of outputs 4 g .. 4 g + 3.
    for (int j = 0; j < 4; j++) {
        __m512i lo = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0x44), hi = _mm512_shuffle_i32x4(rows[j], rows[4 + j], 0xee);
        __m512i lo2 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0x44);
        __m512i hi2 = _mm512_shuffle_i32x4(rows[8 + j], rows[12 + j], 0xee);
        _mm512_storeu_si512(out + (0 + j) * PANEL, _mm512_shuffle_i32x4(lo, lo2, 0x88));
        _mm512_storeu_si512(out + (4 + j) * PANEL, _mm512_shuffle_i32x4(lo, lo2, 0xdd));
        _mm512_storeu_si512(out + (8 + j) * PANEL, _mm512_shuffle_i32x4(hi, hi2, 0x88));
        _mm512_storeu_si512(out + (12 + j) * PANEL, _mm512_shuffle_i32x4(hi, hi2, 0xdd));
    }
}

// 16 outputs of inputs 2 p and 2 p + 1 as pairs.
inline __m512i pairs(V even, V odd) {
    const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd));
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

template <class F>
void fill_panel16(const uint8_t* w, size_t row_bytes, int o, int outputs, int first, int count, uint32_t* panel) {
    if constexpr (F::PACKED) {
        for (int part = 0; part < PANEL; part += GROUP) {
            const uint8_t* group = w + (size_t)((o + part) / GROUP) * row_bytes + (size_t)(first / F::BLOCK) * F::BYTES;
            for (int k = 0; k < count; k += 32) {
                V v[32];
                for (int i = 0; i < 32; i++) v[i] = zero();
                if (o + part < outputs)
                    packed_values<F>(group + (size_t)(k / F::BLOCK) * F::BYTES, k % F::BLOCK / 32, 0, v);
                for (int i = 0; i < 16; i++)
                    _mm512_storeu_si512(panel + (size_t)(k / 2 + i) * PANEL + part, pairs(v[2 * i], v[2 * i + 1]));
            }
        }
    } else {
        for (int k = 0; k < count; k += 32)
            for (int half = 0; half < PANEL; half += 16) {
                __m512i rows[16];
                for (int r = 0; r < 16; r++) {
                    V v[PARTS] = {zero(), zero()};
                    if (o + half + r < outputs)
                        F::values(w + (size_t)(o + half + r) * row_bytes + (size_t)((first + k) / 32) * F::BYTES, v);
                    rows[r] = (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]);
                }
                transpose_pairs(rows, panel + (size_t)(k / 2) * PANEL + half);
            }
    }
}

template <int N>
inline void panel_tokens16(const uint32_t* panel, const uint16_t* x, size_t x_stride, int count, float* y,
                           size_t y_stride, int width, bool fresh) {
    V acc[N][2];
    for (int t = 0; t < N; t++) acc[t][0] = acc[t][1] = zero();
    for (int k = 0; k < count; k += 2) {
        const uint32_t* pair = panel + (size_t)(k / 2) * PANEL;
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(pair), w1 = (__m512bh)_mm512_loadu_si512(pair + 16);
#pragma GCC unroll 12
        for (int t = 0; t < N; t++) {
            int32_t two;
            memcpy(&two, x + t * x_stride + k, 4);
            __m512bh xt = (__m512bh)_mm512_set1_epi32(two);
            acc[t][0] = _mm512_dpbf16_ps(acc[t][0], w0, xt);
            acc[t][1] = _mm512_dpbf16_ps(acc[t][1], w1, xt);
        }
    }
    for (int t = 0; t < N; t++) {
        float lanes[PANEL];
        store(lanes, acc[t][0]);
        store(lanes + W, acc[t][1]);
        float* out = y + t * y_stride;
        if (fresh)
            for (int i = 0; i < width; i++) out[i] = lanes[i];
        else
            for (int i = 0; i < width; i++) out[i] += lanes[i];
    }
}

template <int N>
inline void panel_rest16(int tokens, const uint32_t* panel, const uint16_t* x, size_t x_stride, int count, float* y,
                         size_t y_stride, int width, bool fresh) {
    if constexpr (N > 0) {
        if (tokens == N)
            panel_tokens16<N>(panel, x, x_stride, count, y, y_stride, width, fresh);
        else
            panel_rest16<N - 1>(tokens, panel, x, x_stride, count, y, y_stride, width, fresh);
    }
}

#if defined(TROTH_AMX)

// Tiles of 16 tokens x 32 inputs (A), 32 inputs x 16 outputs (B, the panel as it lies) and 16 x 16 sums (C): Intel AMX.
constexpr int TILE_TOKENS = 32;

inline void shape_tiles(int tokens) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    const uint8_t rows[2] = {(uint8_t)std::min(16, tokens), (uint8_t)std::max(0, tokens - 16)};
    for (int c = 0; c < 4; c++) config.rows[c] = rows[c / 2], config.row_bytes[c] = rows[c / 2] ? 64 : 0;
    for (int a = 0; a < 2; a++) config.rows[4 + a] = rows[a], config.row_bytes[4 + a] = rows[a] ? 64 : 0;
    for (int b = 6; b < 8; b++) config.rows[b] = 16, config.row_bytes[b] = 64;
    _tile_loadconfig(&config);
}

inline void panel_tiles(const uint32_t* panel, const uint16_t* x, size_t x_stride, int tokens, int count, float* y,
                        size_t y_stride, int width, bool fresh) {
    int shaped = 0;
    for (int t = 0; t < tokens; t += TILE_TOKENS) {
        const int n = std::min(TILE_TOKENS, tokens - t);
        if (n != shaped) shape_tiles(shaped = n);
        const uint16_t* low = x + t * x_stride;
        const uint16_t* high = low + 16 * x_stride;
        _tile_zero(0);
        _tile_zero(1);
        if (n > 16) {
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < count; k += 32) {
            const uint32_t* pairs = panel + (size_t)(k / 2) * PANEL;
            _tile_loadd(6, pairs, PANEL * 4);
            _tile_loadd(7, pairs + 16, PANEL * 4);
            _tile_loadd(4, low + k, x_stride * 2);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (n > 16) {
                _tile_loadd(5, high + k, x_stride * 2);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        alignas(64) float sums[TILE_TOKENS][PANEL];
        _tile_stored(0, &sums[0][0], PANEL * 4);
        _tile_stored(1, &sums[0][16], PANEL * 4);
        if (n > 16) {
            _tile_stored(2, &sums[16][0], PANEL * 4);
            _tile_stored(3, &sums[16][16], PANEL * 4);
        }
        for (int i = 0; i < n; i++) {
            float* out = y + (t + i) * y_stride;
            if (fresh)
                for (int o = 0; o < width; o++) out[o] = sums[i][o];
            else
                for (int o = 0; o < width; o++) out[o] += sums[i][o];
        }
    }
    _tile_release();
}

#endif

// Outputs begin .. begin + PANEL - 1 of one part, for all tokens after the exact ones.
template <class F>
void panels16_of(const LinearArguments& a, const WeightPart& part, int begin, float* y, uint32_t* panel) {
    const int width = std::min(PANEL, part.outputs - begin), tokens = a.tokens - a.exact;
    const size_t stride = a.inputs;
    y += (size_t)a.exact * a.outputs + begin;
    for (int first = 0; first < a.inputs; first += PANEL_INPUTS) {
        const int count = std::min(PANEL_INPUTS, a.inputs - first);
        fill_panel16<F>(part.rows, part.row_bytes, begin, part.outputs, first, count, panel);
        const uint16_t* x = (const uint16_t*)a.scratch + first;
#if defined(TROTH_AMX)
        panel_tiles(panel, x, stride, tokens, count, y, a.outputs, width, first == 0);
#else
        int t = 0;
        for (; t + PANEL_TOKENS <= tokens; t += PANEL_TOKENS)
            panel_tokens16<PANEL_TOKENS>(panel, x + t * stride, stride, count, y + (size_t)t * a.outputs, a.outputs, width,
                                         first == 0);
        panel_rest16<PANEL_TOKENS - 1>(tokens - t, panel, x + t * stride, stride, count, y + (size_t)t * a.outputs,
                                       a.outputs, width, first == 0);
#endif
    }
}

// See Panels16 in arguments.h.
inline void panels16(const LinearArguments& a, const WeightPart& part, int begin, float* y, float* panel) {
    with_format(part.format, [&](auto format) {
        panels16_of<decltype(format)>(a, part, begin, y, (uint32_t*)panel);
    });
}

// Inputs of the tokens that go through panels, in bf16.
inline void round_to_bf16(const void* arguments, Turn turn) {
    const auto& a = *(const LinearArguments*)arguments;
    for (int t; (t = turn.take(a.tokens - a.exact)) >= 0;) {
        const float* x = a.x + (size_t)(a.exact + t) * a.inputs;
        uint16_t* to = (uint16_t*)a.scratch + (size_t)t * a.inputs;
        for (int i = 0; i < a.inputs; i++) to[i] = f32_to_bf16(x[i]);
    }
}

inline Kernels with_panels16(const char* name, Kernels kernels) {
    kernels.name = name;
    kernels.panels16 = panels16;
    kernels.round_to_bf16 = round_to_bf16;
    return kernels;
}

}  // namespace TROTH_ISA
}  // namespace troth

// Recurrent layers: the gated delta rule, the short convolution before it, and the gates behind it (ops/gated_delta.py,
// ops/short_conv.py, ops/gated_rms_norm.py, ops/sigmoid_gate.py).
//
// Every token is computed by itself, in one order, whether it comes alone, in a prompt or as a draft. A prompt's chunk
// solved at once would take as many multiplications: 6 D E for each token and head, and those between its tokens.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "norm.h"
#include "pool.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

constexpr int DELTA_BLOCK = 64;  // tokens for which keys and queries are made ready at a time
constexpr int DELTA_TILE = 4;    // vectors of a state's row that are advanced together: their sums hide one's latency

// What one thread needs for DELTA_BLOCK tokens of a key head: unit keys and queries, their products, gates of a head.
struct DeltaScratch {
    std::vector<float> k, q, state;
    float kq[DELTA_BLOCK], decay[DELTA_BLOCK], beta[DELTA_BLOCK];
};

// y = x / |x| * scale, over a multiple of 16 values.
inline void unit(const float* x, int count, float scale, float* y) {
    V squares = zero();
    for (int d = 0; d < count; d += W) squares = fma(load(x + d), load(x + d), squares);
    const V by = all(scale / sqrtf(sum(squares) + 1e-6f));
    for (int d = 0; d < count; d += W) store(y + d, load(x + d) * by);
}

// N vectors of each row of one head's state, through `count` tokens; `keep` of them are no drafts.
template <int N>
void delta_tile(const DeltaArguments& a, const StepRows& rows, int r, int first, int count, int keep, int head, int e,
                DeltaScratch& scratch) {
    const int D = a.key_dim, E = a.value_dim, H = a.heads, G = a.key_heads;
    const size_t row = (size_t)rows.ids[r], width = (size_t)2 * G * D + (size_t)H * E;
    const size_t trail_width = (size_t)G * D + (size_t)H * E + H;
    float* live = a.state + (row * H + head) * D * E + e;
    float* trail = a.trail + row * rows.trail_tokens * trail_width;
    float* s = scratch.state.data();
    const int begin = rows.starts[r] + first;
    const bool fresh = first == 0 && rows.lengths[r] == rows.starts[r + 1] - rows.starts[r];
    for (int d = 0; d < D; d++)
        for (int i = 0; i < N; i++) store(s + (d * N + i) * W, fresh ? zero() : load(live + (size_t)d * E + i * W));

    V u[N], known[N], asked[N];
    // S = a S + k u^T.
    auto advance = [&](float by, const float* k) {
        const V decay = all(by);
        for (int d = 0; d < D; d++)
            for (int i = 0; i < N; i++) {
                float* at = s + (d * N + i) * W;
                store(at, fma(all(k[d]), u[i], load(at) * decay));
            }
    };
    // S^T k and S^T q.
    auto read = [&](const float* k, const float* q) {
        for (int i = 0; i < N; i++) known[i] = asked[i] = zero();
        for (int d = 0; d < D; d++) {
            const V key = all(k[d]), query = all(q[d]);
            for (int i = 0; i < N; i++) {
                const V v = load(s + (d * N + i) * W);
                known[i] = fma(key, v, known[i]);
                asked[i] = fma(query, v, asked[i]);
            }
        }
    };
    const int recalls = first == 0 && rows.recalls ? (int)rows.recalls[r] : 0;
    for (int t = 0; t < recalls; t++) {
        const float* kept = trail + t * trail_width;
        const float* corrections = kept + G * D + head * E + e;
        for (int i = 0; i < N; i++) u[i] = load(corrections + i * W);
        advance(kept[G * D + H * E + head], kept + head / (H / G) * D);
    }
    for (int t = 0; t < count; t++) {
        const float* v = a.qkv + (begin + t) * width + (size_t)2 * G * D + head * E + e;
        float* out = a.out + ((size_t)(begin + t) * H + head) * E + e;
        const float* k = scratch.k.data() + t * D;
        read(k, scratch.q.data() + t * D);
        const V decay = all(scratch.decay[t]), beta = all(scratch.beta[t]), kq = all(scratch.kq[t]);
        for (int i = 0; i < N; i++) {
            u[i] = beta * (load(v + i * W) - decay * known[i]);
            store(out + i * W, fma(kq, u[i], decay * asked[i]));
        }
        if (t >= keep)
            for (int i = 0; i < N; i++) store(trail + (t - keep) * trail_width + G * D + head * E + e + i * W, u[i]);
        if (t < keep || t + 1 < count) advance(scratch.decay[t], k);
        if (t == keep - 1)
            for (int d = 0; d < D; d++)
                for (int i = 0; i < N; i++) store(live + (size_t)d * E + i * W, load(s + (d * N + i) * W));
    }
}

// One row, one key head and the value heads it serves.
inline void delta_head(const DeltaArguments& a, const StepRows& rows, int r, int g, DeltaScratch& scratch) {
    const int D = a.key_dim, E = a.value_dim, H = a.heads, G = a.key_heads, share = H / G;
    const int begin = rows.starts[r], total = rows.starts[r + 1] - begin;
    const bool verifies = r >= rows.single && r < rows.single + rows.verifies;
    const size_t width = (size_t)2 * G * D + (size_t)H * E, trail_width = (size_t)G * D + (size_t)H * E + H;
    float* trail = a.trail + (size_t)rows.ids[r] * rows.trail_tokens * trail_width;
    for (int first = 0; first < total; first += DELTA_BLOCK) {
        const int count = std::min(DELTA_BLOCK, total - first), keep = verifies ? 1 : count;
        for (int t = 0; t < count; t++) {
            const float* x = a.qkv + (begin + first + t) * width + (size_t)g * D;
            float *q = scratch.q.data() + t * D, *k = scratch.k.data() + t * D;
            unit(x, D, 1.0f / sqrtf((float)D), q);
            unit(x + (size_t)G * D, D, 1.0f, k);
            V product = zero();
            for (int d = 0; d < D; d += W) product = fma(load(k + d), load(q + d), product);
            scratch.kq[t] = sum(product);
        }
        for (int head = g * share; head < (g + 1) * share; head++) {
            for (int t = 0; t < count; t++) {
                const size_t at = (size_t)(begin + first + t) * a.gate_stride + head;
                const float x = a.decay[at] + a.decay_bias[head];
                scratch.decay[t] = expf(-a.decay_rate[head] * (x > 20.0f ? x : log1pf(expf(x))));
                scratch.beta[t] = 1.0f / (1.0f + expf(-a.beta[at]));
            }
            int e = 0;
            for (; e + DELTA_TILE * W <= E; e += DELTA_TILE * W)
                delta_tile<DELTA_TILE>(a, rows, r, first, count, keep, head, e, scratch);
            for (; e < E; e += W) delta_tile<1>(a, rows, r, first, count, keep, head, e, scratch);
            float* decays = trail + (size_t)G * D + (size_t)H * E + head;
            for (int t = keep; t < count; t++) decays[(t - keep) * trail_width] = scratch.decay[t];
        }
        for (int t = keep; t < count; t++)
            std::copy_n(scratch.k.data() + t * D, D, trail + (t - keep) * trail_width + g * D);
    }
}

inline void delta(const void* arguments, Turn turn) {
    const auto& a = *(const DeltaArguments*)arguments;
    static thread_local DeltaScratch scratch;
    scratch.k.resize(DELTA_BLOCK * a.key_dim);
    scratch.q.resize(DELTA_BLOCK * a.key_dim);
    scratch.state.resize(DELTA_TILE * W * a.key_dim);
    for (int i; (i = turn.take(a.rows.count * a.key_heads)) >= 0;)
        delta_head(a, a.rows, i / a.key_heads, i % a.key_heads, scratch);
}

constexpr int CONV_PIECE = 256;  // channels of one row that are computed together

inline void conv(const void* arguments, Turn turn) {
    const auto& a = *(const ConvArguments*)arguments;
    const StepRows& rows = a.rows;
    const int C = a.channels, J = a.taps - 1, pieces = (C + CONV_PIECE - 1) / CONV_PIECE;
    static thread_local std::vector<float> before, total;
    before.resize(J * CONV_PIECE);
    total.resize(CONV_PIECE + W);
    for (int i; (i = turn.take(rows.count * pieces)) >= 0;) {
        const int r = i / pieces, c = i % pieces * CONV_PIECE, size = std::min(CONV_PIECE, C - c);
        const int begin = rows.starts[r], count = rows.starts[r + 1] - begin;
        const bool verifies = r >= rows.single && r < rows.single + rows.verifies;
        const int keep = verifies ? 1 : count, recalls = rows.recalls ? (int)rows.recalls[r] : 0;
        float* state = a.state + (size_t)rows.ids[r] * J * C + c;
        float* trail = a.trail + (size_t)rows.ids[r] * rows.trail_tokens * C + c;
        for (int j = 0; j < J; j++) {
            const int at = j + recalls;
            const float* from = at < J ? state + (size_t)at * C : trail + (size_t)(at - J) * C;
            if (rows.lengths[r] == count)
                std::fill_n(before.data() + j * CONV_PIECE, size, 0.0f);
            else
                std::copy_n(from, size, before.data() + j * CONV_PIECE);
        }
        // Input t of the row; those before this step are counted backwards from -1.
        auto input = [&](int t) {
            return t < 0 ? before.data() + (J + t) * CONV_PIECE : a.x + (size_t)(begin + t) * a.stride + c;
        };
        for (int t = 0; t < count; t++) {
            std::fill_n(total.data(), size, 0.0f);
            for (int k = 0; k <= J; k++) {
                const float *x = input(t - J + k), *weight = a.weight + (size_t)k * C + c;
                for (int d = 0; d < size; d++) total[d] += weight[d] * x[d];
            }
            for (int d = 0; a.silu && d < size; d += W)
                store(&total[d], load(&total[d]) * sigmoid(load(&total[d])));
            std::copy_n(total.data(), size, a.y + (size_t)(begin + t) * C + c);
        }
        for (int j = 0; j < J; j++) std::copy_n(input(keep - J + j), size, state + (size_t)j * C);
        for (int t = keep; t < count; t++) std::copy_n(input(t), size, trail + (size_t)(t - keep) * C);
    }
}

// y = x / sqrt(mean(x^2) + eps) * weight * silu(gate); without a weight y = x * sigmoid(gate).
inline void gated_norm(const void* arguments, Turn turn) {
    const auto& a = *(const GatedNormArguments*)arguments;
    std::vector<float> tail(2 * W);
    for (int i; (i = turn.take(a.tokens * a.heads)) >= 0;) {
        const float* x = a.x + (size_t)i * a.width;
        const float* gate = a.gate + (size_t)(i / a.heads) * a.gate_stride + (size_t)(i % a.heads) * a.width;
        float* y = a.y + (size_t)i * a.width;
        if (a.weight) {
            normalise_row(x, a.weight, a.eps, a.width, y);
            x = y;
        }
        auto gated = [&](V value, V by) { return a.weight ? value * (by * sigmoid(by)) : value * sigmoid(by); };
        int d = 0;
        for (; d + W <= a.width; d += W) store(y + d, gated(load(x + d), load(gate + d)));
        if (d == a.width) continue;
        std::copy_n(x + d, a.width - d, tail.data());
        std::copy_n(gate + d, a.width - d, tail.data() + W);
        store(tail.data(), gated(load(tail.data()), load(tail.data() + W)));
        std::copy_n(tail.data(), a.width - d, y + d);
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

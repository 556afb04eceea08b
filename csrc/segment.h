// Queries that share a key-value head against the keys of one segment: scores, weights, weighted values.
//
// Keys of a block are stored transposed, [D, 16]: 16 keys lie in the lanes and scores need no sums across lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "arguments.h"
#include "simd.h"
#include "stored.h"

namespace troth {
namespace TROTH_ISA {

constexpr int SEGMENT_KEYS = 256;
constexpr int TILE_QUERIES = 24;
constexpr int LANES = BLOCK_KEYS / W;         // vectors per 16 keys
constexpr int SCORE_QUERIES = 12 / LANES;     // twelve sums in registers hide the latency of a multiply-add
constexpr int VALUE_QUERIES = 6;              // the same with two vectors of values
constexpr int VALUE_SUMS = LANES == 2 ? 8 : 16;  // what registers hold beside the values themselves
constexpr int UNIT_BLOCKS = 4;                // met side by side

// The largest n of 1, 2, 4 and 8 with n * each <= most.
constexpr int fitting(int each, int most) {
    int n = 1;
    while (n < 8 && 2 * n * each <= most) n *= 2;
    return n;
}

// Calls visit(N, at) for queries at .. at + N - 1, in tiles as wide as N allows.
template <int N, class Visit>
inline void in_tiles(int at, int count, Visit visit) {
    for (; count - at >= N; at += N) visit(std::integral_constant<int, N>{}, at);
    if constexpr (N > 1) in_tiles<N - 1>(at, count, visit);
}

// Queries of one key-value head, with what each has seen so far.
struct Tile {
    int count = 0;
    const float* q[TILE_QUERIES];
    float* out[TILE_QUERIES];       // running weighted values, [D]
    int position[TILE_QUERIES];
    float top[TILE_QUERIES];        // highest score
    float mass[TILE_QUERIES];       // sum of exp(score - top)
};

inline size_t attention_scratch(int head_dim) { return (size_t)TILE_QUERIES * (SEGMENT_KEYS + head_dim); }

// Keys first .. last - 1 of one segment, as blocks of one row and head.
template <class S>
struct Segment {
    const AttentionArguments& a;
    const int32_t* table;
    int kv_head;
    int first, last;

    int base() const { return first / SEGMENT_KEYS * SEGMENT_KEYS; }
    int first_block() const { return first / BLOCK_KEYS; }
    int end_block() const { return (last + BLOCK_KEYS - 1) / BLOCK_KEYS; }
    const typename S::type* block(const void* cache, int b) const {
        return (const typename S::type*)cache + table[b] * a.kv.stride + (size_t)kv_head * a.head_dim * BLOCK_KEYS;
    }
    // The scales of W keys or values from key - base = j on.
    V scales(const float* of, int j) const {
        const int key = base() + j;
        return load(of + table[key / BLOCK_KEYS] * a.kv.scale_stride + kv_head * BLOCK_KEYS + key % BLOCK_KEYS);
    }

    // scores[i][key - base] of queries at .. at + N - 1 and the 16 keys of each of blocks b .. b + B - 1: with few queries
    // sums of several blocks grow side by side, each in the order it always has. AHEAD: as many blocks elsewhere, `next`,
    // are fetched meanwhile, which pays where every key is met once.
    template <int N, int B, bool AHEAD>
    void scores(const Tile& tile, int at, int b, float* scores, const typename S::type* const* next) const {
        constexpr int PER_LINE = 4 / sizeof(typename S::type);  // values of a head whose 16 keys are a line of 64 bytes
        const typename S::type* keys[B];
        V acc[B][N][LANES];
        for (int c = 0; c < B; c++) {
            keys[c] = block(a.kv.k, b + c);
            for (int i = 0; i < N; i++)
                for (int l = 0; l < LANES; l++) acc[c][i][l] = zero();
        }
        for (int d = 0; d < a.head_dim; d++) {
            if constexpr (AHEAD)
                if (d % PER_LINE == 0)
                    for (int c = 0; c < B; c++) __builtin_prefetch(next[c] + d * BLOCK_KEYS);
            V q[N];
            for (int i = 0; i < N; i++) q[i] = all(tile.q[at + i][d]);
#pragma GCC unroll 8
            for (int c = 0; c < B; c++) {
                V k[LANES];
                for (int l = 0; l < LANES; l++) k[l] = S::load(keys[c] + d * BLOCK_KEYS + l * W);
#pragma GCC unroll 12
                for (int i = 0; i < N; i++)
                    for (int l = 0; l < LANES; l++) acc[c][i][l] = fma(q[i], k[l], acc[c][i][l]);
            }
        }
        float* out = scores + (size_t)at * SEGMENT_KEYS + b * BLOCK_KEYS - base();
        for (int c = 0; c < B; c++, out += BLOCK_KEYS)
            for (int i = 0; i < N; i++)
                for (int l = 0; l < LANES; l++) store(out + i * SEGMENT_KEYS + l * W, acc[c][i][l]);
    }

    // Blocks b .. end - 1 of a unit, B at a time, what is left in halves.
    template <int N, int B>
    void scores_ahead(const Tile& tile, int b, int end, float* scores_of, const typename S::type* const* next) const {
        for (; b + B <= end; b += B, next += B) scores<N, B, true>(tile, 0, b, scores_of, next);
        if constexpr (B > 1)
            if (b < end) scores_ahead<N, B / 2>(tile, b, end, scores_of, next);
    }

    // part[i][D] += sum over keys of blocks b .. end - 1 of weight[i][key - base] * v[key]. Slots outside the segment are
    // not read: they may hold anything, and 0 * nan is nan.
    template <int N, int C, bool AHEAD>
    void values(int at, int d, int b, int end_block, const float* weight, float* part,
                const typename S::type* const* next) const {
        V acc[N][C];
        for (int i = 0; i < N; i++)
            for (int c = 0; c < C; c++) acc[i][c] = load(part + (size_t)(at + i) * a.head_dim + d + c * W);
        for (int n = 0; b < end_block; b++, n++) {
            const int begin = std::max(first, b * BLOCK_KEYS), end = std::min(last, (b + 1) * BLOCK_KEYS);
            const auto* v = block(a.kv.v, b) + (size_t)(begin - b * BLOCK_KEYS) * a.head_dim + d;
            const auto* ahead = AHEAD ? next[n] + d : nullptr;
            const float* w = weight + (size_t)at * SEGMENT_KEYS - base();
            for (int j = begin; j < end; j++, v += a.head_dim, ahead += AHEAD ? a.head_dim : 0) {
                if constexpr (AHEAD)
                    for (int c = 0; c < C * W; c += 64 / sizeof *v) __builtin_prefetch(ahead + c);
                V value[C];
                for (int c = 0; c < C; c++) value[c] = S::load(v + c * W);
#pragma GCC unroll 6
                for (int i = 0; i < N; i++) {
                    V wi = all(w[i * SEGMENT_KEYS + j]);
                    for (int c = 0; c < C; c++) acc[i][c] = fma(wi, value[c], acc[i][c]);
                }
            }
        }
        for (int i = 0; i < N; i++)
            for (int c = 0; c < C; c++) store(part + (size_t)(at + i) * a.head_dim + d + c * W, acc[i][c]);
    }

    template <int N, bool AHEAD>
    void values(int at, int b, int end, const float* weight, float* part, const typename S::type* const* next) const {
        values_from<N, std::max(2, fitting(N, VALUE_SUMS)), AHEAD>(at, 0, b, end, weight, part, next);
    }

    // Dimensions d and up, C vectors at a time, what is left in halves.
    template <int N, int C, bool AHEAD>
    void values_from(int at, int d, int b, int end, const float* weight, float* part,
                     const typename S::type* const* next) const {
        for (; d + C * W <= a.head_dim; d += C * W) values<N, C, AHEAD>(at, d, b, end, weight, part, next);
        if constexpr (C > 1)
            if (d < a.head_dim) values_from<N, C / 2, AHEAD>(at, d, b, end, weight, part, next);
    }

    // Scores -> weights of one query in place; its highest score and the sum of its weights.
    void weigh(float* scores, int position, float* top, float* mass) const {
        const int begin = std::max(first, a.window ? position - a.window + 1 : 0) - base();
        const int end = std::min(last, position + 1) - base();
        const int whole_begin = (first - base()) / W * W, whole_end = (last - base() + W - 1) / W * W;
        for (int j = whole_begin; j < whole_end; j += W) {
            V s = load(scores + j) * all(a.scale);
            if constexpr (S::SCALED) s = s * scales(a.kv.k_scale, j);
            if (a.softcap > 0) s = all(a.softcap) * tanh(s / all(a.softcap));
            store(scores + j, s);
        }
        for (int j = whole_begin; j < std::min(begin, whole_end); j++) scores[j] = -INFINITY;
        for (int j = std::max(end, whole_begin); j < whole_end; j++) scores[j] = -INFINITY;
        V highest = all(-INFINITY);
        for (int j = whole_begin; j < whole_end; j += W) highest = max(highest, load(scores + j));
        *top = largest(highest);
        const V shift = all(*top == -INFINITY ? 0.0f : *top);
        V total = zero();
        for (int j = whole_begin; j < whole_end; j += W) {
            V w = exp(load(scores + j) - shift);
            total = total + w;
            if constexpr (S::SCALED) w = w * scales(a.kv.v_scale, j);
            store(scores + j, w);
        }
        *mass = sum(total);
    }

    // This segment's share of every query of the tile: part [count, D], top and mass [count].
    void share(const Tile& tile, float* scratch, float* part, float* top, float* mass) const {
        for (int b = first_block(); b < end_block(); b++)
            in_tiles<SCORE_QUERIES>(0, tile.count, [&](auto n, int at) {
                scores<decltype(n)::value, 1, false>(tile, at, b, scratch, nullptr);
            });
        for (int i = 0; i < tile.count; i++)
            weigh(scratch + (size_t)i * SEGMENT_KEYS, tile.position[i], top + i, mass + i);
        std::fill_n(part, (size_t)tile.count * a.head_dim, 0.0f);
        in_tiles<VALUE_QUERIES>(0, tile.count, [&](auto n, int at) {
            values<decltype(n)::value, false>(at, first_block(), end_block(), scratch, part, nullptr);
        });
    }
};

inline int first_key(const AttentionArguments& a, int position) {
    return a.window ? std::max(0, position - a.window + 1) : 0;
}

}  // namespace TROTH_ISA
}  // namespace troth

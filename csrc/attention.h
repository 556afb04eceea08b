// Attention over the paged cache, decode and prefill alike: a tile of queries that share a key-value head against
// segments of 256 keys. A segment's boundaries are absolute positions and segments are merged in order, so a query's
// result depends on nothing but its own keys (online softmax: Milakov and Gimelshein 2018).
//
// Keys of a block are stored transposed, [D, 16]: 16 keys lie in the lanes and scores need no sums across lanes.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "arguments.h"
#include "pool.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

constexpr int BLOCK_KEYS = 16;
constexpr int SEGMENT_KEYS = 256;
constexpr int TILE_QUERIES = 24;
constexpr int LANES = BLOCK_KEYS / W;         // vectors per 16 keys
constexpr int SCORE_QUERIES = 12 / LANES;     // twelve sums in registers hide the latency of a multiply-add
constexpr int VALUE_QUERIES = 6;              // the same with two vectors of values
constexpr int VALUE_SUMS = LANES == 2 ? 8 : 16;  // what registers hold beside the values themselves
constexpr int BLOCKS_AHEAD = 4;               // at least as many are fetched while others are met

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

// How keys and values are held. SCALED: each key and each value of a head is integers times one float, which belongs to
// its score and to its weight: the products themselves meet integers.
template <int T> struct Stored;
template <> struct Stored<KV_F32> {
    typedef float type;
    static constexpr bool SCALED = false;
    static inline V load(const float* p) { return TROTH_ISA::load(p); }
    static inline void store(float* to, const float* from, int count) { memcpy(to, from, count * sizeof(float)); }
};
template <> struct Stored<KV_F16> {
    typedef uint16_t type;
    static constexpr bool SCALED = false;
    static inline V load(const uint16_t* p) { return load_f16(p); }
    static inline void store(uint16_t* to, const float* from, int count) {
        int i = 0;
        for (; i + W <= count; i += W) store_f16(to + i, TROTH_ISA::load(from + i));
        for (; i < count; i++) to[i] = f32_to_f16(from[i]);
    }
};
template <> struct Stored<KV_BF16> {
    typedef uint16_t type;
    static constexpr bool SCALED = false;
    static inline V load(const uint16_t* p) { return load_bf16(p); }
    static inline void store(uint16_t* to, const float* from, int count) {
        for (int i = 0; i < count; i++) to[i] = f32_to_bf16(from[i]);
    }
};
template <> struct Stored<KV_I8> {
    typedef int8_t type;
    static constexpr bool SCALED = true;
    static inline V load(const int8_t* p) { return load_i8(p); }
    // Nearest multiples of the scale, which takes the largest to 127 or -127. What is not finite makes the scale so.
    static inline float store(int8_t* to, const float* from, int count) {
        uint32_t top = 0;  // of the bits of |x|: they are in the order of the numbers, infinity and nan above them all
        for (int i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, from + i, 4);
            top = std::max(top, bits & 0x7fffffff);
        }
        float largest;
        memcpy(&largest, &top, 4);
        const float scale = largest / 127.0f;
        const bool usable = scale > 0 && largest <= std::numeric_limits<float>::max();
        for (int i = 0; i < count; i++) to[i] = usable ? (int8_t)nearbyintf(from[i] / scale) : (int8_t)0;
        return scale;
    }
};

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
    const typename S::type* values_of(int b) const { return block(a.kv.v, std::min(b, end_block() - 1)); }
    // The scales of W keys or values from key - base = j on.
    V scales(const float* of, int j) const {
        const int key = base() + j;
        return load(of + table[key / BLOCK_KEYS] * a.kv.scale_stride + kv_head * BLOCK_KEYS + key % BLOCK_KEYS);
    }

    // scores[i][key - base] of queries at .. at + N - 1 and the 16 keys of each of blocks b .. b + B - 1: with few queries
    // sums of several blocks grow side by side, each in the order it always has. AHEAD: keys of blocks behind them are
    // fetched meanwhile, and the first values at the end, which pays where every key is met once.
    template <int N, int B, bool AHEAD>
    void scores(const Tile& tile, int at, int b, float* scores) const {
        constexpr int PER_LINE = 4 / sizeof(typename S::type);  // values of a head whose 16 keys are a line of 64 bytes
        constexpr int FETCHED = std::max(B, BLOCKS_AHEAD);
        const typename S::type *keys[B], *next[FETCHED];
        V acc[B][N][LANES];
        for (int c = 0; c < B; c++) {
            keys[c] = block(a.kv.k, b + c);
            for (int i = 0; i < N; i++)
                for (int l = 0; l < LANES; l++) acc[c][i][l] = zero();
        }
        if constexpr (AHEAD) {
            const bool is_last = b + B >= end_block();
            for (int c = 0; c < FETCHED; c++)
                next[c] = is_last ? values_of(first_block() + c) : block(a.kv.k, std::min(b + B + c, end_block() - 1));
        }
        for (int d = 0; d < a.head_dim; d++) {
            if constexpr (AHEAD)
                if (d % PER_LINE == 0)
                    for (int c = 0; c < FETCHED; c++) __builtin_prefetch(next[c] + d * BLOCK_KEYS);
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

    // All blocks of the segment from b on, B at a time, what is left in halves.
    template <int N, int B>
    void scores_ahead(const Tile& tile, int b, float* scores_of) const {
        for (; b + B <= end_block(); b += B) scores<N, B, true>(tile, 0, b, scores_of);
        if constexpr (B > 1)
            if (b < end_block()) scores_ahead<N, B / 2>(tile, b, scores_of);
    }

    // part[i][D] = sum over keys of weight[i][key - base] * v[key]. Slots outside the segment are not read: they may
    // hold anything, and 0 * nan is nan.
    template <int N, int C, bool AHEAD>
    void values(int at, int d, const float* weight, float* part) const {
        V acc[N][C];
        for (int i = 0; i < N; i++)
            for (int c = 0; c < C; c++) acc[i][c] = zero();
        for (int b = first_block(); b < end_block(); b++) {
            const int begin = std::max(first, b * BLOCK_KEYS), end = std::min(last, (b + 1) * BLOCK_KEYS);
            const auto* v = block(a.kv.v, b) + (size_t)(begin - b * BLOCK_KEYS) * a.head_dim + d;
            const auto* ahead = values_of(b + BLOCKS_AHEAD) + d;
            const float* w = weight + (size_t)at * SEGMENT_KEYS - base();
            for (int j = begin; j < end; j++, v += a.head_dim, ahead += a.head_dim) {
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
    void values(int at, const float* weight, float* part) const {
        values_from<N, std::max(2, fitting(N, VALUE_SUMS)), AHEAD>(at, 0, weight, part);
    }

    // Dimensions d and up, C vectors at a time, what is left in halves.
    template <int N, int C, bool AHEAD>
    void values_from(int at, int d, const float* weight, float* part) const {
        for (; d + C * W <= a.head_dim; d += C * W) values<N, C, AHEAD>(at, d, weight, part);
        if constexpr (C > 1)
            if (d < a.head_dim) values_from<N, C / 2, AHEAD>(at, d, weight, part);
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
        const bool few = tile.count <= SCORE_QUERIES;
        if (few)
            in_tiles<SCORE_QUERIES>(0, tile.count, [&](auto n, int) {
                constexpr int N = decltype(n)::value;
                scores_ahead<N, fitting(N, SCORE_QUERIES)>(tile, first_block(), scratch);
            });
        else
            for (int b = first_block(); b < end_block(); b++)
                in_tiles<SCORE_QUERIES>(0, tile.count, [&](auto n, int at) {
                    scores<decltype(n)::value, 1, false>(tile, at, b, scratch);
                });
        for (int i = 0; i < tile.count; i++)
            weigh(scratch + (size_t)i * SEGMENT_KEYS, tile.position[i], top + i, mass + i);
        in_tiles<VALUE_QUERIES>(0, tile.count, [&](auto n, int at) {
            constexpr int N = decltype(n)::value;
            few ? values<N, true>(at, scratch, part) : values<N, false>(at, scratch, part);
        });
    }
};

// Add a segment's share to what a query has seen: out, *top and *mass are updated.
inline void merge(float* out, float* top, float* mass, const float* part, float part_top, float part_mass, int width) {
    if (part_top == -INFINITY) return;
    const float highest = std::max(*top, part_top);
    const float keep = *top == -INFINITY ? 0.0f : expf(*top - highest), add = expf(part_top - highest);
    if (*top == -INFINITY)
        for (int d = 0; d < width; d++) out[d] = part[d] * add;
    else
        for (int d = 0; d < width; d++) out[d] = out[d] * keep + part[d] * add;
    *mass = *mass * keep + part_mass * add;
    *top = highest;
}

inline void normalise(float* out, float mass, int width) {
    const float scale = 1.0f / mass;
    for (int d = 0; d < width; d++) out[d] *= scale;
}

inline int first_key(const AttentionArguments& a, int position) {
    return a.window ? std::max(0, position - a.window + 1) : 0;
}

// One segment of one single-token row and key-value head; its share goes to `parts`.
template <class S>
void attend_part(const AttentionArguments& a, int row, int kv_head, int segment, float* scratch) {
    const int group = a.heads / a.kv.heads, position = a.lengths[row] - 1, width = a.head_dim + 2;
    const int first = std::max(first_key(a, position), segment * SEGMENT_KEYS);
    const int last = std::min(position + 1, (segment + 1) * SEGMENT_KEYS);
    if (first >= last) return;
    const Segment<S> keys{a, a.tables + (size_t)row * a.table_stride, kv_head, first, last};
    for (int g = 0; g < group; g += TILE_QUERIES) {
        Tile tile;
        tile.count = std::min(TILE_QUERIES, group - g);
        for (int i = 0; i < tile.count; i++) {
            tile.q[i] = a.q + ((size_t)a.starts[row] * a.heads + kv_head * group + g + i) * a.head_dim;
            tile.position[i] = position;
        }
        float* part = scratch + TILE_QUERIES * SEGMENT_KEYS;
        keys.share(tile, scratch, part, tile.top, tile.mass);
        for (int i = 0; i < tile.count; i++) {
            const size_t head = (size_t)row * a.heads + kv_head * group + g + i;
            float* to = a.parts + (head * a.max_segments + segment) * width;
            memcpy(to, part + (size_t)i * a.head_dim, a.head_dim * sizeof(float));
            to[a.head_dim] = tile.top[i];
            to[a.head_dim + 1] = tile.mass[i];
        }
    }
}

// Queries `from` .. of one chunk row and key-value head, in order (token, head of the group).
template <class S>
void attend_tile(const AttentionArguments& a, int row, int kv_head, int from, float* scratch) {
    const int group = a.heads / a.kv.heads, token = a.starts[row], count = a.starts[row + 1] - token;
    Tile tile;
    tile.count = std::min(TILE_QUERIES, count * group - from);
    int first = 1 << 30, last = 0;
    for (int i = 0; i < tile.count; i++) {
        const int t = (from + i) / group, head = kv_head * group + (from + i) % group;
        const size_t at = ((size_t)(token + t) * a.heads + head) * a.head_dim;
        tile.q[i] = a.q + at;
        tile.out[i] = a.out + at;
        tile.position[i] = a.lengths[row] - count + t;
        tile.top[i] = -INFINITY;
        tile.mass[i] = 0;
        first = std::min(first, first_key(a, tile.position[i]));
        last = std::max(last, tile.position[i] + 1);
    }
    float* part = scratch + TILE_QUERIES * SEGMENT_KEYS;
    for (int at = first / SEGMENT_KEYS * SEGMENT_KEYS; at < last; at += SEGMENT_KEYS) {
        const Segment<S> keys{a, a.tables + (size_t)row * a.table_stride, kv_head, std::max(first, at),
                              std::min(last, at + SEGMENT_KEYS)};
        float top[TILE_QUERIES], mass[TILE_QUERIES];
        keys.share(tile, scratch, part, top, mass);
        for (int i = 0; i < tile.count; i++)
            merge(tile.out[i], &tile.top[i], &tile.mass[i], part + (size_t)i * a.head_dim, top[i], mass[i], a.head_dim);
    }
    for (int i = 0; i < tile.count; i++) normalise(tile.out[i], tile.mass[i], a.head_dim);
}

template <class S>
void attend(const AttentionArguments& a, Turn turn) {
    float* scratch = a.scratch + turn.thread * a.scratch_stride;
    const int group = a.heads / a.kv.heads;
    int segments = 0;
    for (int r = 0; r < a.single; r++) segments = std::max(segments, (a.lengths[r] - 1) / SEGMENT_KEYS + 1);
    const int parts = a.single * a.kv.heads * segments;
    int tiles = 0;
    for (int r = a.single; r < a.rows; r++)
        tiles += ((a.starts[r + 1] - a.starts[r]) * group + TILE_QUERIES - 1) / TILE_QUERIES * a.kv.heads;
    for (int i; (i = turn.take(parts + tiles)) >= 0;) {
        if (i < parts) {
            attend_part<S>(a, i / segments / a.kv.heads, i / segments % a.kv.heads, i % segments, scratch);
            continue;
        }
        // Later tiles of a chunk see more keys: the longest first leaves the shortest to even things out.
        int left = tiles - 1 - (i - parts), r = a.single;
        for (;; r++) {
            const int here = ((a.starts[r + 1] - a.starts[r]) * group + TILE_QUERIES - 1) / TILE_QUERIES * a.kv.heads;
            if (left < here) break;
            left -= here;
        }
        attend_tile<S>(a, r, left % a.kv.heads, left / a.kv.heads * TILE_QUERIES, scratch);
    }
}

inline void attend_any(const void* arguments, Turn turn) {
    const auto& a = *(const AttentionArguments*)arguments;
    switch (a.kv.type) {
        case KV_F32: attend<Stored<KV_F32>>(a, turn); break;
        case KV_F16: attend<Stored<KV_F16>>(a, turn); break;
        case KV_BF16: attend<Stored<KV_BF16>>(a, turn); break;
        default: attend<Stored<KV_I8>>(a, turn); break;
    }
}

// The segments of single-token rows, merged in order.
inline void attend_merge(const void* arguments, Turn turn) {
    const auto& a = *(const AttentionArguments*)arguments;
    const int width = a.head_dim + 2;
    for (int i; (i = turn.take(a.single * a.heads)) >= 0;) {
        const int row = i / a.heads, position = a.lengths[row] - 1;
        float* out = a.out + ((size_t)a.starts[row] * a.heads + i % a.heads) * a.head_dim;
        float top = -INFINITY, mass = 0;
        for (int s = first_key(a, position) / SEGMENT_KEYS; s * SEGMENT_KEYS <= position; s++) {
            const float* part = a.parts + ((size_t)i * a.max_segments + s) * width;
            merge(out, &top, &mass, part, part[a.head_dim], part[a.head_dim + 1], a.head_dim);
        }
        normalise(out, mass, a.head_dim);
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

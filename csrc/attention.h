// Attention over the paged cache, decode and prefill alike: a tile of queries that share a key-value head against
// segments of keys. A segment's boundaries are absolute positions and segments are merged in order, so a query's result
// depends on nothing but its own keys (online softmax: Milakov and Gimelshein 2018).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "arguments.h"
#include "pieces.h"
#include "pool.h"
#include "segment.h"

namespace troth {
namespace TROTH_ISA {

// Add a segment's share to what a query has seen: out, *top and *mass are updated.
inline void merge(float* out, float* top, float* mass, const float* part, float part_top, float part_mass, int width) {
    if (part_top == -INFINITY) return;
    const float highest = std::max(*top, part_top);
    const float keep = *top == highest ? 1.0f : *top == -INFINITY ? 0.0f : expf(*top - highest);
    const float add = part_top == highest ? 1.0f : expf(part_top - highest);
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
    const Pieces pieces(a, turn.threads);
    int tiles = 0;
    for (int r = a.single; r < a.rows; r++)
        tiles += ((a.starts[r + 1] - a.starts[r]) * group + TILE_QUERIES - 1) / TILE_QUERIES * a.kv.heads;
    PieceWork<S> work(a);
    int i = turn.take(pieces.count + tiles);
    while (i >= 0 && i < pieces.count) {
        const int behind = turn.take(pieces.count + tiles);
        work.attend(pieces.at(i), behind >= 0 && behind < pieces.count ? pieces.at(behind) : Piece());
        i = behind;
    }
    for (; i >= 0; i = turn.take(pieces.count + tiles)) {
        // Later tiles of a chunk see more keys: the longest first leaves the shortest to even things out.
        int left = tiles - 1 - (i - pieces.count), r = a.single;
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

// The segments of one head of a single-token row, merged in order.
inline void merge_head(const AttentionArguments& a, int row, int head, float* out) {
    const int width = a.head_dim + 2, position = a.lengths[row] - 1;
    float top = -INFINITY, mass = 0;
    for (int s = first_key(a, position) / SEGMENT_KEYS; s * SEGMENT_KEYS <= position; s++) {
        const float* part = a.parts + (((size_t)row * a.heads + head) * a.max_segments + s) * width;
        merge(out, &top, &mass, part, part[a.head_dim], part[a.head_dim + 1], a.head_dim);
    }
    normalise(out, mass, a.head_dim);
}

inline void attend_merge(const void* arguments, Turn turn) {
    const auto& a = *(const AttentionArguments*)arguments;
    for (int i; (i = turn.take(a.single * a.heads)) >= 0;) {
        const int row = i / a.heads, head = i % a.heads;
        merge_head(a, row, head, a.out + ((size_t)a.starts[row] * a.heads + head) * a.head_dim);
    }
}

// As LinearArguments::before, of rows that have one token each.
inline void merged_row(const void* arguments, int row, float* to) {
    const auto& a = *(const AttentionArguments*)arguments;
    for (int head = 0; head < a.heads; head++) merge_head(a, row, head, to + (size_t)head * a.head_dim);
}

}  // namespace TROTH_ISA
}  // namespace troth

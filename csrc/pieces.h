// Attention of rows that feed one token, which is as fast as keys and values come from memory.
//
// They lie in runs, all heads of a block one behind the other, and are met in that order, four blocks at a time; what is
// met next is fetched meanwhile. The sums are those of Segment::share, in the same order.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "rotary.h"
#include "segment.h"

namespace troth {
namespace TROTH_ISA {

// Some key-value heads of one segment of a single-token row.
struct Piece {
    int row = 0, segment = 0, first_head = 0, end_head = 0;
    int first = 0, last = 0;  // keys; none where the window has passed
};

// How the segments of single-token rows are shared out, the last first: all heads together where there are many.
struct Pieces {
    const AttentionArguments& a;
    int segments = 0, splits = 1, count = 0;

    Pieces(const AttentionArguments& a, int threads) : a(a) {
        for (int r = 0; r < a.single; r++) segments = std::max(segments, (a.lengths[r] - 1) / SEGMENT_KEYS + 1);
        // Four pieces for each thread even things out.
        if (const int whole = a.single * segments) splits = std::min(a.kv.heads, (4 * threads + whole - 1) / whole);
        count = a.single * segments * splits;
    }
    Piece at(int i) const {
        Piece p;
        const int split = i % splits;
        p.row = i / splits % a.single;
        p.segment = segments - 1 - i / splits / a.single;
        p.first_head = a.kv.heads * split / splits;
        p.end_head = a.kv.heads * (split + 1) / splits;
        const int position = a.lengths[p.row] - 1;
        p.first = std::max(first_key(a, position), p.segment * SEGMENT_KEYS);
        p.last = std::min(position + 1, (p.segment + 1) * SEGMENT_KEYS);
        return p;
    }
};

// A thread's work on pieces; memory is used again for each.
template <class S>
class PieceWork {
public:
    explicit PieceWork(const AttentionArguments& a)
        : a_(a), group_(a.heads / a.kv.heads), per_head_((group_ + TILE_QUERIES - 1) / TILE_QUERIES),
          width_(std::min(group_, TILE_QUERIES)) {
        static thread_local std::vector<Tile> tiles;
        static thread_local std::vector<float> floats;
        const size_t count = (size_t)a.kv.heads * per_head_, queries = count * width_;
        if (tiles.size() < count) tiles.resize(count);
        const size_t needed = queries * (SEGMENT_KEYS + 2 * a.head_dim);
        if (floats.size() < needed) floats.resize(needed);
        tiles_ = tiles.data();
        scores_ = floats.data();
        sums_ = scores_ + queries * SEGMENT_KEYS;
        turned_ = sums_ + queries * a.head_dim;
    }

    // Its share goes to `parts`; the first blocks of the piece behind it, if it has any, are fetched meanwhile.
    void attend(const Piece& piece, const Piece& behind) {
        if (piece.first >= piece.last) return;
        const int heads = piece.end_head - piece.first_head;
        memset(sums_, 0, (size_t)heads * per_head_ * width_ * a_.head_dim * sizeof(float));
        for (int h = 0; h < heads; h++) take_queries(piece, h);
        in_units(piece, piece, a_.kv.k, a_.kv.v, [&](const Segment<S>& keys, int h, int b, int end, auto next) {
            each_tile(h, [&](Tile& tile, float* scores, float*) {
                in_tiles<SCORE_QUERIES>(0, tile.count, [&](auto n, int at) {
                    constexpr int N = decltype(n)::value, B = std::min(UNIT_BLOCKS, fitting(N, SCORE_QUERIES));
                    if (at)
                        for (int c = b; c < end; c++) keys.template scores<N, 1, false>(tile, at, c, scores, nullptr);
                    else
                        keys.template scores_ahead<N, B>(tile, b, end, scores, next);
                });
            });
        });
        // The first values are there by now; the second come while scores become weights.
        const Segment<S> second = segment(piece, piece.first_head + (heads > 1));
        const T* next[UNIT_BLOCKS];
        unit(second, a_.kv.v, second.first_block() + (heads > 1 ? 0 : UNIT_BLOCKS), next);
        const int queries = heads * group_, lines = a_.head_dim * BLOCK_KEYS * sizeof(T) / 64;
        for (int h = 0, query = 0; h < heads; h++) {
            const Segment<S> keys = segment(piece, piece.first_head + h);
            each_tile(h, [&](Tile& tile, float* scores, float*) {
                for (int i = 0; i < tile.count; i++, query++) {
                    for (int l = lines * query / queries; l < lines * (query + 1) / queries; l++)
                        for (int c = 0; c < UNIT_BLOCKS; c++) __builtin_prefetch((const char*)next[c] + l * 64);
                    keys.weigh(scores + (size_t)i * SEGMENT_KEYS, tile.position[i], tile.top + i, tile.mass + i);
                }
            });
        }
        const Piece& then = behind.first < behind.last ? behind : piece;
        in_units(piece, then, a_.kv.v, a_.kv.k, [&](const Segment<S>& keys, int h, int b, int end, auto next) {
            each_tile(h, [&](Tile& tile, float* scores, float* sums) {
                in_tiles<VALUE_QUERIES>(0, tile.count, [&](auto n, int at) {
                    keys.template values<decltype(n)::value, true>(at, b, end, scores, sums, next);
                });
            });
        });
        for (int h = 0; h < heads; h++) give_shares(piece, h);
    }

private:
    typedef typename S::type T;

    Segment<S> segment(const Piece& piece, int head) const {
        return {a_, a_.tables + (size_t)piece.row * a_.table_stride, head, piece.first, piece.last};
    }

    // Where blocks b .. b + 3 of a head lie, the last one again where there are fewer.
    void unit(const Segment<S>& keys, const void* cache, int b, const T** to) const {
        for (int c = 0; c < UNIT_BLOCKS; c++) to[c] = keys.block(cache, std::min(b + c, keys.end_block() - 1));
    }

    // Calls meet(keys, head of the piece, first block, end, next) in the order in which the cache lies. `next` are the
    // blocks that are met then: behind the last unit those of another cache, of the piece itself or the one behind it.
    template <class Meet>
    void in_units(const Piece& piece, const Piece& then, const void* cache, const void* other, Meet meet) {
        const int heads = piece.end_head - piece.first_head;
        const Segment<S> first = segment(piece, piece.first_head), after = segment(then, then.first_head);
        const T* next[UNIT_BLOCKS];
        for (int b = first.first_block(); b < first.end_block(); b += UNIT_BLOCKS) {
            for (int h = 0; h < heads; h++) {
                const int end = std::min(b + UNIT_BLOCKS, first.end_block());
                if (h + 1 < heads)
                    unit(segment(piece, piece.first_head + h + 1), cache, b, next);
                else if (end < first.end_block())
                    unit(first, cache, end, next);
                else
                    unit(after, other, after.first_block(), next);
                meet(segment(piece, piece.first_head + h), h, b, end, (const T* const*)next);
            }
        }
    }

    template <class Visit>
    void each_tile(int h, Visit visit) {
        for (size_t t = h * per_head_; t < (size_t)(h + 1) * per_head_; t++)
            visit(tiles_[t], scores_ + t * width_ * SEGMENT_KEYS, sums_ + t * width_ * a_.head_dim);
    }

    // Queries of head h of the piece. Where rotary is part of attention it turns them; whoever has the row's last segment
    // also writes the newest key and value, and q, where others would look for it.
    void take_queries(const Piece& piece, int h) {
        const int kv_head = piece.first_head + h, position = a_.lengths[piece.row] - 1;
        // The newest key lies in the row's last segment, and nobody else reads it.
        const bool is_last = piece.last == position + 1;
        if (a_.rotary && is_last) {
            turn_head<S>(*a_.rotary, piece.row, a_.heads + kv_head, nullptr);
            turn_head<S>(*a_.rotary, piece.row, a_.heads + a_.kv.heads + kv_head, nullptr);
        }
        for (int g = 0; g < group_; g++) {
            Tile& tile = tiles_[(size_t)h * per_head_ + g / TILE_QUERIES];
            const int i = g % TILE_QUERIES, head = kv_head * group_ + g;
            const float* q = a_.q + ((size_t)a_.starts[piece.row] * a_.heads + head) * a_.head_dim;
            tile.count = i + 1;
            tile.position[i] = position;
            tile.q[i] = q;
            if (!a_.rotary) continue;
            float* own = &turned_[((size_t)(&tile - tiles_) * width_ + i) * a_.head_dim];
            turn_head<S>(*a_.rotary, piece.row, head, own);
            if (is_last) memcpy((float*)q, own, a_.head_dim * sizeof(float));
            tile.q[i] = own;
        }
    }

    void give_shares(const Piece& piece, int h) {
        for (int g = 0; g < group_; g++) {
            const int t = h * per_head_ + g / TILE_QUERIES, i = g % TILE_QUERIES;
            const size_t head = (size_t)piece.row * a_.heads + (piece.first_head + h) * group_ + g;
            float* to = a_.parts + (head * a_.max_segments + piece.segment) * (a_.head_dim + 2);
            memcpy(to, &sums_[((size_t)t * width_ + i) * a_.head_dim], a_.head_dim * sizeof(float));
            to[a_.head_dim] = tiles_[t].top[i];
            to[a_.head_dim + 1] = tiles_[t].mass[i];
        }
    }

    const AttentionArguments& a_;
    const int group_, per_head_, width_;  // queries of a head, their tiles, and queries of a tile
    Tile* tiles_;                         // of this thread, for every head
    float *scores_, *sums_, *turned_;     // for every query: [SEGMENT_KEYS], [D] and, where it turns them, [D]
};

}  // namespace TROTH_ISA
}  // namespace troth

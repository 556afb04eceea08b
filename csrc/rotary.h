// Queries and keys turned by their positions, keys and values written into the paged cache.
#pragma once

#include <vector>

#include "arguments.h"
#include "norm.h"
#include "pool.h"
#include "simd.h"
#include "stored.h"

namespace troth {
namespace TROTH_ISA {

// Pairs (x[i], x[i + half]) turned by their angles; what lies past 2 half is copied. y is not x.
inline void rotate(const float* x, const float* cos, const float* sin, int half, int width, float* y) {
    int i = 0;
    for (; i + W <= half; i += W) {
        const V a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(y + i, fma(a, c, zero() - b * s));
        store(y + half + i, fma(b, c, a * s));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[i + half];
        y[i] = a * cos[i] - b * sin[i];
        y[i + half] = b * cos[i] + a * sin[i];
    }
    for (i = 2 * half; i < width; i++) y[i] = x[i];
}

// One key or value of a head in its stored form, with its scale where it has one.
template <class S>
inline void keep(typename S::type* to, const float* from, int count, float* scales, size_t at) {
    if constexpr (S::SCALED)
        scales[at] = S::store(to, from, count);
    else
        S::store(to, from, count);
}

// Head h of token t, counted over queries, keys and values: queries go to q, keys and values into the cache.
template <class S>
void turn_head(const RotaryArguments& a, int t, int h, float* q) {
    static thread_local std::vector<float> normed, turned;
    static thread_local std::vector<typename S::type> stored;
    const int D = a.head_dim;
    const bool is_query = h < a.heads, is_key = !is_query && h < a.heads + a.kv.heads;
    const float* x = a.qkv + ((size_t)t * (a.heads + 2 * a.kv.heads) + h) * D;
    const float* cos = a.cos + (size_t)a.positions[t] * a.half;
    const float* sin = a.sin + (size_t)a.positions[t] * a.half;
    if (const float* weight = is_query ? a.q_norm : is_key ? a.k_norm : nullptr) {
        normed.resize(D);
        normalise_row(x, weight, a.eps, D, normed.data());
        x = normed.data();
    }
    if (is_query) {
        rotate(x, cos, sin, a.half, D, q);
        return;
    }
    const size_t block = (size_t)a.slots[t] / BLOCK_KEYS, offset = (size_t)a.slots[t] % BLOCK_KEYS;
    const size_t head = (h - a.heads) % a.kv.heads, at = block * a.kv.stride + head * D * BLOCK_KEYS;
    const size_t scale_at = block * a.kv.scale_stride + head * BLOCK_KEYS + offset;
    if (!is_key) {
        keep<S>((typename S::type*)a.kv.v + at + offset * D, x, D, a.kv.v_scale, scale_at);
        return;
    }
    turned.resize(D);
    stored.resize(D);
    rotate(x, cos, sin, a.half, D, turned.data());
    keep<S>(stored.data(), turned.data(), D, a.kv.k_scale, scale_at);
    auto* k = (typename S::type*)a.kv.k + at + offset;
    for (int d = 0; d < D; d++) k[(size_t)d * BLOCK_KEYS] = stored[d];
}

template <class S>
void rotary_typed(const RotaryArguments& a, Turn turn) {
    for (int t; (t = turn.take(a.tokens)) >= 0;)
        for (int h = 0; h < a.heads + 2 * a.kv.heads; h++)
            turn_head<S>(a, t, h, a.q + ((size_t)t * a.heads + h) * a.head_dim);
}

inline void rotary(const void* arguments, Turn turn) {
    const auto& a = *(const RotaryArguments*)arguments;
    switch (a.kv.type) {
        case KV_F32: rotary_typed<Stored<KV_F32>>(a, turn); break;
        case KV_F16: rotary_typed<Stored<KV_F16>>(a, turn); break;
        case KV_BF16: rotary_typed<Stored<KV_BF16>>(a, turn); break;
        default: rotary_typed<Stored<KV_I8>>(a, turn); break;
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

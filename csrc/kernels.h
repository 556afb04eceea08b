// The operations of one instruction set, as functions a program can hold. Included once per instruction set
// (isa_*.cpp), each in its own namespace.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "arguments.h"
#include "attention.h"
#include "kernel_table.h"
#include "linear.h"
#include "mask.h"
#include "norm.h"
#include "pool.h"
#include "recurrent.h"
#include "rotary.h"
#include "sample.h"

namespace troth {

namespace TROTH_ISA {

// What follows the products of outputs begin .. end - 1.
inline void finish_outputs(const LinearArguments& a, int first_token, int last_token, int begin, int end) {
    for (int t = first_token; t < last_token; t++) {
        float* y = a.y + (size_t)t * a.outputs;
        if (a.bias)
            for (int o = begin; o < end; o++) y[o] += a.bias[o];
        if (a.total) {
            const float* residual = a.residual + (size_t)t * a.outputs;
            float* total = a.total + (size_t)t * a.outputs;
            for (int o = begin; o < end; o++) total[o] = y[o] + residual[o];
        }
    }
}

inline bool is_packed(const WeightPart& part) { return part.format < FORMAT_F32; }

// Whether any quantised part wants inputs as fours, or as pairs.
inline bool any_wants(const LinearArguments& a, bool fours) {
    for (int p = 0; p < a.num_parts; p++)
        if (is_packed(a.parts[p]) && a.parts[p].fours == fours) return true;
    return false;
}

// Where round_inputs leaves inputs of one form.
template <class X>
inline typename X::Tokens* shared_inputs(const LinearArguments& a) {
    const bool behind = std::is_same<X, Fours>::value && any_wants(a, false);
    return (typename X::Tokens*)((uint8_t*)a.scratch + (behind ? (size_t)a.tokens * (a.inputs / 32) * ROUNDED16_BYTES : 0));
}

// Rounded inputs of the first `count` tokens: where round_inputs left them, or made at most once per operation and thread.
template <class X>
class RoundedTokens {
public:
    typedef typename X::Tokens Tokens;

    RoundedTokens(const LinearArguments& a, int count) : a_(a), count_(count) {}

    const Tokens* const* tokens() {
        static thread_local std::vector<Tokens> memory;
        static thread_local std::vector<const Tokens*> tokens;
        if (!made_) {
            const size_t each = a_.inputs / 32;
            const bool shared = a_.scratch && !a_.panels16;
            if (!shared && memory.size() < each * count_) memory.resize(each * count_);
            tokens.resize(count_);
            for (int t = 0; t < count_; t++) {
                if (!shared) round_row(a_.x + (size_t)t * a_.inputs, a_.inputs, &memory[t * each]);
                tokens[t] = (shared ? shared_inputs<X>(a_) : memory.data()) + t * each;
            }
            made_ = true;
        }
        return tokens.data();
    }

private:
    const LinearArguments& a_;
    const int count_;
    bool made_ = false;
};

// For all threads once: see LinearArguments::scratch.
inline void round_inputs(const void* arguments, Turn turn) {
    const auto& a = *(const LinearArguments*)arguments;
    const size_t each = a.inputs / 32;
    const bool pairs = any_wants(a, false), fours = any_wants(a, true);
    for (int t; (t = turn.take(a.tokens)) >= 0;) {
        const float* x = a.x + (size_t)t * a.inputs;
        if (pairs) round_row(x, a.inputs, shared_inputs<Pairs>(a) + t * each);
        if (fours) round_row(x, a.inputs, shared_inputs<Fours>(a) + t * each);
    }
}

// Work of dots and packed rows, cut along outputs in units of 16: first one long piece for each thread, because memory is
// read fastest in long runs, then short ones that even things out.
struct DotPieces {
    int units = 0, longest, shortest, threads, count;

    DotPieces(const LinearArguments& a, int threads) : threads(threads) {
        for (int p = 0; p < a.num_parts; p++) units += (a.parts[p].outputs + GROUP - 1) / GROUP;
        longest = threads == 1 ? units : units * 3 / (4 * threads);
        shortest = std::max(2, units / (threads * 32));
        count = threads + (units - longest * threads + shortest - 1) / shortest;
    }
    int begin(int i) const {
        return i <= threads ? i * longest : std::min(units, threads * longest + (i - threads) * shortest);
    }
};

// Leading tokens of a part whose products are not made by panels; panels of packed weights are bf16 alone.
inline int dot_tokens(const LinearArguments& a, const WeightPart& part) {
    return is_packed(part) && (part.fours || !a.panels16) ? a.tokens : a.exact;
}

inline void dot_piece(const LinearArguments& a, RoundedTokens<Pairs>& pairs, RoundedTokens<Fours>& fours, int begin,
                      int end) {
    for (int p = 0, unit = 0, before = 0; p < a.num_parts && unit < end; p++) {
        const WeightPart& part = a.parts[p];
        const int units = (part.outputs + GROUP - 1) / GROUP, tokens = dot_tokens(a, part);
        const int first = std::max(0, begin - unit) * GROUP, last = std::min(part.outputs, (end - unit) * GROUP);
        if (first < last && tokens) {
            with_format(part.format, [&](auto format) {
                typedef decltype(format) F;
                if constexpr (F::PACKED) {
                    const uint8_t* rows = part.rows + (size_t)(first / GROUP) * part.row_bytes;
                    const int groups = (last - first + GROUP - 1) / GROUP;
                    float* y = a.y + before + first;
                    if constexpr (F::LARGEST > 0)
                        if (part.fours)
                            return packed_rows<F, Fours>(rows, part.row_bytes, groups, fours.tokens(), tokens, a.inputs, y,
                                                         a.outputs, last - first);
                    packed_rows<F, Pairs>(rows, part.row_bytes, groups, pairs.tokens(), tokens, a.inputs, y, a.outputs,
                                          last - first);
                } else
                    dots<F>(part.rows, part.row_bytes, a.x, a.inputs, tokens, a.inputs, a.y + before, a.outputs, first,
                            last);
            });
            finish_outputs(a, 0, tokens, before + first, before + last);
        }
        unit += units;
        before += part.outputs;
    }
}

inline void panel_piece(const LinearArguments& a, int i, float* panel) {
    int p = 0, before = 0;
    for (;; before += a.parts[p++].outputs) {
        const int here = (a.parts[p].outputs + PANEL - 1) / PANEL;
        if (i < here) break;
        i -= here;
    }
    const WeightPart& part = a.parts[p];
    const int begin = i * PANEL, end = std::min(part.outputs, begin + PANEL), first = dot_tokens(a, part);
    if (first == a.tokens) return;
    if (a.panels16)
        a.panels16(a, part, begin, a.y + before, panel);
    else
        with_format(part.format, [&](auto format) {
            typedef decltype(format) F;
            if constexpr (!F::PACKED)
                panels<F>(part.rows, part.row_bytes, a.x + (size_t)first * a.inputs, a.inputs, a.tokens - first, a.inputs,
                          a.y + (size_t)first * a.outputs + before, a.outputs, begin, part.outputs, panel);
        });
    finish_outputs(a, first, a.tokens, before + begin, before + end);
}

// Work is cut along outputs only, so every (token, output) is computed by one thread in one order.
inline void linear(const void* arguments, Turn turn) {
    auto a = *(const LinearArguments*)arguments;
    static thread_local std::vector<float> panel, made;
    float* kept = nullptr;
    if (a.before.row) {
        kept = (float*)a.x;
        made.resize((size_t)a.tokens * a.inputs);
        for (int t = 0; t < a.tokens; t++) a.before.row(a.before.arguments, t, &made[(size_t)t * a.inputs]);
        a.x = made.data();
    }
    int panels = 0, dotted = 0;
    bool wants_panels = false;
    for (int p = 0; p < a.num_parts; p++) {
        const int tokens = dot_tokens(a, a.parts[p]);
        dotted = std::max(dotted, tokens);
        wants_panels |= tokens < a.tokens;
        panels += (a.parts[p].outputs + PANEL - 1) / PANEL;
    }
    if (!wants_panels) panels = 0;
    if (panels && panel.empty()) panel.resize((size_t)PANEL_INPUTS * PANEL);
    RoundedTokens<Pairs> pairs(a, dotted);
    RoundedTokens<Fours> fours(a, dotted);
    const DotPieces pieces(a, turn.threads);
    for (int i; (i = turn.take(panels + (dotted ? pieces.count : 0))) >= 0;) {
        // One thread leaves them where others would look for them.
        if (i == 0 && kept) memcpy(kept, a.x, (size_t)a.tokens * a.inputs * sizeof(float));
        if (i < panels)
            panel_piece(a, i, panel.data());
        else
            dot_piece(a, pairs, fours, pieces.begin(i - panels), pieces.begin(i - panels + 1));
    }
}

inline void embedding(const void* arguments, Turn turn) {
    const auto& a = *(const EmbeddingArguments*)arguments;
    for (int t; (t = turn.take(a.tokens)) >= 0;) {
        float* y = a.y + (size_t)t * a.width;
        with_format(a.table.format, [&](auto format) {
            typedef decltype(format) F;
            if constexpr (F::PACKED) {
                packed_row<F>(a.table.rows, a.table.row_bytes, a.ids[t], a.width, y);
            } else {
                const uint8_t* row = a.table.rows + (size_t)a.ids[t] * a.table.row_bytes;
                for (int k = 0; k < a.width; k += 32) {
                    V v[PARTS];
                    F::values(row + (size_t)(k / 32) * F::BYTES, v);
                    for (int i = 0; i < PARTS; i++) store(y + k + i * W, v[i]);
                }
            }
        });
        if (a.scale != 1.0f)
            for (int k = 0; k < a.width; k++) y[k] *= a.scale;
    }
}

inline V activated(V x, int act) {
    if (act == ACT_SILU) return x * sigmoid(x);
    // 0.5 x (1 + tanh(u)) = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
    V u = all(0.7978845608028654f) * fma(all(0.044715f) * x * x, x, x);
    return x * sigmoid(u + u);
}

inline void gate_range(const GateArguments& a, int token, int begin, int end, float* y) {
    const float* g = a.gate_up + (size_t)token * 2 * a.inner;
    const float* up = g + a.inner;
    int d = begin;
    for (; d + W <= end; d += W) store(y + d, activated(load(g + d), a.act) * load(up + d));
    for (; d < end; d++) {
        float lanes[W];
        store(lanes, activated(all(g[d]), a.act));
        y[d] = lanes[0] * up[d];
    }
}

inline void gate(const void* arguments, Turn turn) {
    const auto& a = *(const GateArguments*)arguments;
    constexpr int PIECE = 512;
    const int pieces = (a.inner + PIECE - 1) / PIECE;
    for (int i; (i = turn.take(a.tokens * pieces)) >= 0;) {
        const int token = i / pieces, begin = i % pieces * PIECE;
        gate_range(a, token, begin, std::min(a.inner, begin + PIECE), a.y + (size_t)token * a.inner);
    }
}

// As LinearArguments::before.
inline void gated_row(const void* arguments, int token, float* to) {
    const auto& a = *(const GateArguments*)arguments;
    gate_range(a, token, 0, a.inner, to);
}

constexpr Kernels table(const char* name) {
    return {name, W, nullptr, nullptr, round_inputs, linear, embedding, norm, rotary, attend_any, attend_merge, gate,
            sample, finite, mask, delta, conv, gated_norm,
            normed_row, gated_row, merged_row};
}

}  // namespace TROTH_ISA
}  // namespace troth

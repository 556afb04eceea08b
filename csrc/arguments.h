// The arguments of every operation: plain structs of pointers and sizes, filled by tape.h and device.h, read by kernels.h.
//
// Legend: T tokens, R rows, H query heads, K key-value heads, D head size, N blocks, B blocks per table row. Of recurrent
// layers: G key heads and H value heads of sizes D and E, P rows of the persistent batch, L drafts of a trail.
// Activations are float32, row-major. Pointers belong to the caller and stay valid while the operation can run.
#pragma once

#include <cstddef>
#include <cstdint>

namespace troth {

enum Format : int { FORMAT_Q4_0, FORMAT_Q4_1, FORMAT_Q5_0, FORMAT_Q5_1, FORMAT_Q8_0, FORMAT_Q4_K, FORMAT_Q5_K,
                    FORMAT_Q6_K, FORMAT_A4_32, FORMAT_A4_64, FORMAT_A4_128, FORMAT_A8_32, FORMAT_A8_64, FORMAT_A8_128,
                    FORMAT_F32, FORMAT_F16, FORMAT_BF16, FORMATS };

constexpr bool is_affine(int format) { return format >= FORMAT_A4_32 && format <= FORMAT_A8_128; }

// Whether inputs can meet weights of a format as integers of 8 bits (fours.h).
constexpr bool has_fours(int format) { return format <= FORMAT_Q6_K && format != FORMAT_Q8_0; }

enum KvType : int { KV_F32, KV_F16, KV_BF16, KV_I8 };

enum Act : int { ACT_SILU, ACT_GELU_TANH };

// One matrix of a linear layer: rows of numbers, `row_bytes` apart, or groups of 16 quantised rows (packed.h).
struct WeightPart {
    int format;
    const uint8_t* rows;
    size_t row_bytes;     // of a row of numbers, or of a group
    int outputs;
    bool fours;           // inputs meet it as integers of 8 bits (fours.h), not of 16
};

// Quantised rows in file layout, to be laid out in groups.
struct PackArguments {
    int format;
    const uint8_t* rows;
    size_t row_bytes;
    int outputs;
    int inputs;
    uint8_t* packed;
};

struct LinearArguments;

// The panel of outputs begin and after it of one part, times the tokens past the exact ones, rounded to bf16 in
// LinearArguments::scratch. y is that part's first output; panel is memory for one panel.
using Panels16 = void (*)(const LinearArguments&, const WeightPart&, int begin, float* y, float* panel);

// The operation before a linear layer, where that computes its inputs itself: of few tokens, by every thread, which costs
// less than to wait for one another.
struct Before {
    void (*row)(const void* arguments, int token, float* to);  // null: there is none, inputs are where they should be
    const void* arguments;
};

struct LinearArguments {
    const WeightPart* parts;
    int num_parts;
    int inputs;
    int outputs;          // of all parts, side by side
    const float* bias;    // [outputs] or null
    const float* x;       // [T, inputs]
    float* y;             // [T, outputs]
    int exact;            // leading tokens that may not go through panels: Rows.num_exact of ops/rows.py
    int tokens;           // T
    void* scratch;        // inputs rounded once for all threads: bf16 [T - exact, inputs] for panels16, else Rounded16
                          // [T, inputs / 32] if any part wants them (pairs.h), and Rounded8 likewise behind them (fours.h);
                          // null: threads round for themselves
    Panels16 panels16;    // null without scratch
    Before before = {};   // one thread also writes what it makes to x
    const float* residual = nullptr;  // [T, outputs]: total becomes y + residual; null: there is no total
    float* total = nullptr;           // may be residual
};

constexpr size_t ROUNDED16_BYTES = 80, ROUNDED8_BYTES = 48;  // of 32 rounded inputs

struct EmbeddingArguments {
    WeightPart table;
    int width;
    const int64_t* ids;   // [T]
    float scale;
    float* y;             // [T, width]
    int tokens;
};

struct NormArguments {
    const float* x;          // [T, width]
    const float* residual;   // [T, width] to add first, or null
    float* total;            // [T, width]: x + residual, when there is one
    const float* weight;     // [width]
    float eps;
    float* y;                // [T, width]
    int width;
    int tokens;
};

// One layer's keys and values in a pool of blocks (ops/layer_kv.py). Blocks of all layers may lie together.
struct KvPool {
    void* k;                  // [N, K, D, 16]
    void* v;                  // [N, K, 16, D]
    float* k_scale;           // [N, K, 16] of int8 keys, else null
    float* v_scale;
    int type;
    int heads;                // K
    size_t stride;            // numbers from one block's keys, and values, to the next one's
    size_t scale_stride;      // the same of scales
};

struct RotaryArguments {
    const float* qkv;         // [T, (H + 2 K) D]
    int heads, head_dim;
    const int64_t* positions; // [T]
    const float* cos;         // [P, half]
    const float* sin;
    int half;                 // rotated pairs
    const float* q_norm;      // [D] or null
    const float* k_norm;
    float eps;
    const int64_t* slots;     // [T]
    KvPool kv;
    float* q;                 // [T, H, D]
    int tokens;
};

struct AttentionArguments {
    const float* q;           // [T, H, D]
    KvPool kv;
    int heads, head_dim;
    const int32_t* tables;    // [R, table_stride] block ids
    size_t table_stride;
    const int32_t* starts;    // [R + 1]: first token of each row in the step
    const int32_t* lengths;   // [R]: tokens of each row's context, this step's included
    int rows;
    int single;               // rows at the head that have one token; their segments are shared out among threads
    float scale;
    int window;               // 0: everything before is seen
    float softcap;            // 0: off
    float* out;               // [T, H, D]
    float* parts;             // [single, H, max_segments, D + 2]: values, highest score, mass of each segment
    int max_segments;
    float* scratch;           // [threads, scratch_stride]
    size_t scratch_stride;    // at least attention_scratch(head_dim) floats
    const RotaryArguments* rotary = nullptr;  // makes q, and the newest keys and values, of rows that all have one token;
                                              // null: they are there
};

// The rows of a step for operations that keep a state per row (ops/rows.py).
struct StepRows {
    const int64_t* ids;       // [R]: place of each row in the persistent batch
    const int32_t* starts;    // [R + 1]: first token of each row in the step
    const int32_t* lengths;   // [R]: tokens of each row's context, this step's included
    const int64_t* recalls;   // [R]: drafts of its trail that each row takes in first, or null
    int count;                // R
    int single;               // rows at the head that have one token
    int verifies;             // rows behind those whose tokens are drafts, all but the first
    int trail_tokens;         // L
};

struct DeltaArguments {
    const float* qkv;         // [T, 2 G D + H E]
    int key_heads, heads, key_dim, value_dim;
    const float* decay;       // [T, H], gate_stride apart
    const float* beta;
    size_t gate_stride;
    const float* decay_rate;  // [H]
    const float* decay_bias;
    float* state;             // [P, H, D, E]
    float* trail;             // [P, L, G D + H E + H]
    StepRows rows;
    float* out;               // [T, H, E]
};

struct ConvArguments {
    const float* x;           // [T, channels], stride apart
    size_t stride;
    const float* weight;      // [taps, channels]
    int taps, channels;
    bool silu;                // false: the sum itself
    float* state;             // [P, taps - 1, channels]
    float* trail;             // [P, L, channels]
    StepRows rows;
    float* y;                 // [T, channels]
};

struct GatedNormArguments {
    const float* x;           // [T, heads, width]
    const float* gate;        // [T, heads width], gate_stride apart
    size_t gate_stride;
    const float* weight;      // [width], or null: x times a sigmoid instead
    float eps;
    float* y;                 // [T, heads, width]
    int width, heads, tokens;
};

struct GateArguments {
    const float* gate_up;     // [T, 2 inner]
    int act;
    float* y;                 // [T, inner]
    int inner;
    int tokens;
};

struct SampleArguments {
    const float* logits;      // [R, vocab], without nan
    int rows, vocab;
    const float* temperature; // [R] each; see ops/sample.py
    const int32_t* top_k;
    const float* top_p;
    const float* min_p;
    const float* xtc_probability;
    const float* xtc_threshold;
    const int64_t* key;
    int64_t* token;           // [R]
};

struct MaskArguments {
    float* logits;            // [R, vocab], changed in place
    int vocab;
    const int64_t* rows;      // [masks], each at most once
    const uint32_t* allowed;  // [masks, vocab / 32, rounded up]: bit i % 32 of word i / 32 is token i's
    int masks;
};

struct FiniteArguments {
    const float* x;           // [R, width]
    int rows, width;
    bool* finite;             // [R]
};

}  // namespace troth

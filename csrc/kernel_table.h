// One instruction set's operations.
#pragma once

#include "arguments.h"
#include "pool.h"

namespace troth {

// What an instruction set provides: one function per operation, all of the same type.
struct Kernels {
    const char* name;
    int vector_floats;
    Panels16 panels16;                         // null without bf16 products
    void (*round_to_bf16)(const void*, Turn);  // fills LinearArguments::scratch for panels16; null without it
    void (*round_inputs)(const void*, Turn);   // fills it for packed weights
    void (*linear)(const void*, Turn);
    void (*embedding)(const void*, Turn);
    void (*norm)(const void*, Turn);
    void (*rotary)(const void*, Turn);
    void (*attention)(const void*, Turn);
    void (*attention_merge)(const void*, Turn);
    void (*gate)(const void*, Turn);
    void (*sample)(const void*, Turn);
    void (*finite)(const void*, Turn);
    void (*mask)(const void*, Turn);
    void (*delta)(const void*, Turn);
    void (*conv)(const void*, Turn);
    void (*gated_norm)(const void*, Turn);
    // Of norm, gate and attention_merge: one token's row, as LinearArguments::before.
    void (*normed_row)(const void*, int, float*);
    void (*gated_row)(const void*, int, float*);
    void (*merged_row)(const void*, int, float*);
};

}  // namespace troth

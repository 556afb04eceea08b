// Rows of plain numbers as they lie in a file: 32 consecutive weights as floats, exactly, in 32 / W vectors.
#pragma once

#include "simd.h"

namespace troth {
namespace TROTH_ISA {

constexpr int PARTS = 32 / W;   // vectors per 32 weights

struct F32 {
    static constexpr bool PACKED = false;
    static constexpr int BYTES = 128;
    static inline void values(const uint8_t* b, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load((const float*)b + i * W);
    }
};

struct F16 {
    static constexpr bool PACKED = false;
    static constexpr int BYTES = 64;
    static inline void values(const uint8_t* b, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load_f16((const uint16_t*)b + i * W);
    }
};

struct BF16 {
    static constexpr bool PACKED = false;
    static constexpr int BYTES = 64;
    static inline void values(const uint8_t* b, V* out) {
        for (int i = 0; i < PARTS; i++) out[i] = load_bf16((const uint16_t*)b + i * W);
    }
};

}  // namespace TROTH_ISA
}  // namespace troth

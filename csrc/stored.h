// How keys and values lie in the cache: the numbers of a block, as vectors of floats and back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "arguments.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

constexpr int BLOCK_KEYS = 16;

// SCALED: each key and each value of a head is integers times one float, which belongs to
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

}  // namespace TROTH_ISA
}  // namespace troth

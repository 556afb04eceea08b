// The mask of a grammar on the logits of a row: a bit for each token, minus infinity where it is not set.
#pragma once

#include <algorithm>
#include <limits>

#include "arguments.h"
#include "packed.h"
#include "pool.h"

namespace troth {
namespace TROTH_ISA {

constexpr int MASK_WORDS = 256;   // of one piece of work: 8,192 tokens

// Logits of the 32 tokens of a word.
inline void mask_word(float* x, uint32_t bits) {
    const V forbidden = all(-std::numeric_limits<float>::infinity());
    U first;   // bit l in lane l
    for (int l = 0; l < W; l++) first[l] = 1u << l;
    for (int j = 0; j < 32; j += W) {
        const U allowed = (U{} + (bits >> j)) & first;
        store(x + j, allowed != 0u ? load(x + j) : forbidden);
    }
}

inline void mask(const void* arguments, Turn turn) {
    const auto& a = *(const MaskArguments*)arguments;
    const int words = (a.vocab + 31) / 32, pieces = (words + MASK_WORDS - 1) / MASK_WORDS;
    for (int i; (i = turn.take(a.masks * pieces)) >= 0;) {
        const uint32_t* allowed = a.allowed + (size_t)(i / pieces) * words;
        float* x = a.logits + (size_t)a.rows[i / pieces] * a.vocab;
        const int begin = i % pieces * MASK_WORDS, end = std::min(words, begin + MASK_WORDS);
        for (int w = begin; w < end; w++) {
            if (allowed[w] == 0xffffffffu) continue;
            if (32 * (w + 1) <= a.vocab) {
                mask_word(x + 32 * w, allowed[w]);
                continue;
            }
            for (int id = 32 * w; id < a.vocab; id++)
                if (!(allowed[w] >> id % 32 & 1)) x[id] = -std::numeric_limits<float>::infinity();
        }
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

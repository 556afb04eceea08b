// RMSNorm (Zhang and Sennrich 2019), of a sum or of what is there.
#pragma once

#include <cmath>

#include "arguments.h"
#include "pool.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

// y = x * weight / sqrt(mean(x^2) + eps); lanes past the last whole vector are done one by one.
inline void normalise_row(const float* x, const float* weight, float eps, int width, float* y) {
    V squares = zero();
    int d = 0;
    for (; d + W <= width; d += W) {
        V v = load(x + d);
        squares = fma(v, v, squares);
    }
    float total = sum(squares);
    for (; d < width; d++) total += x[d] * x[d];
    const float scale = 1.0f / sqrtf(total / (float)width + eps);
    const V scales = all(scale);
    for (d = 0; d + W <= width; d += W) store(y + d, load(x + d) * scales * load(weight + d));
    for (; d < width; d++) y[d] = x[d] * scale * weight[d];
}

inline void norm(const void* arguments, Turn turn) {
    const auto& a = *(const NormArguments*)arguments;
    for (int t; (t = turn.take(a.tokens)) >= 0;) {
        const float* x = a.x + (size_t)t * a.width;
        if (a.residual) {
            const float* residual = a.residual + (size_t)t * a.width;
            float* total = a.total + (size_t)t * a.width;
            for (int d = 0; d < a.width; d++) total[d] = x[d] + residual[d];
            x = total;
        }
        normalise_row(x, a.weight, a.eps, a.width, a.y + (size_t)t * a.width);
    }
}

// As LinearArguments::before.
inline void normed_row(const void* arguments, int token, float* to) {
    const auto& a = *(const NormArguments*)arguments;
    normalise_row(a.x + (size_t)token * a.width, a.weight, a.eps, a.width, to);
}

}  // namespace TROTH_ISA
}  // namespace troth

// The keyed draw of ops/sample.py, one row per piece of work: argmax over the filtered vocabulary of
// logit / T + gumbel(key, id). Noise: splitmix64's finaliser (Steele, Lea, Flood 2014) over key + (id + 1) * stride.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "arguments.h"
#include "pool.h"
#include "simd.h"

namespace troth {
namespace TROTH_ISA {

struct Candidate {
    float score;
    int id;
};

inline uint64_t mixed(uint64_t key, int64_t id) {
    uint64_t x = (uint64_t)(id + 1) * 0xD1342543DE82EF95ull + key;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

inline float noise_of(uint64_t bits) {
    const float u = std::min((float)(((double)(bits >> 11) + 0.5) * 0x1p-53), 1.0f - 0x1p-24f);
    return -logf(-log1pf(-u));
}

// No noise is larger: -log(-log1p(-u)) <= -log u, and u is at least 2^-(z - 9) for z leading zeros of its 53 bits in 64.
inline float noise_bound(uint64_t bits) {
    return (float)(__builtin_clzll((bits >> 11) | 1) - 9) * 0.69314725f;
}

// The winner among scores of consecutive ids (ids null) or of listed ones; the first among equals.
inline int keyed_winner(const float* scores, const int* ids, int count, uint64_t key) {
    if (!count) return 0;  // no score was a number; whoever asked is told by `finite`
    // The likeliest token first: its score alone rules most others out before a logarithm is taken.
    const int likeliest = (int)(std::max_element(scores, scores + count) - scores);
    auto noise_bits = [&](int i) { return mixed(key, ids ? ids[i] : i); };
    int winner = likeliest;
    float best = scores[likeliest] + noise_of(noise_bits(likeliest));
    for (int i = 0; i < count; i++) {
        const uint64_t bits = noise_bits(i);
        if (scores[i] + noise_bound(bits) < best) continue;
        const float total = scores[i] + noise_of(bits);
        if (total > best || (total == best && i < winner)) {
            best = total;
            winner = i;
        }
    }
    return ids ? ids[winner] : winner;
}

constexpr int CHAINS = 4;  // vectors side by side: one alone waits for itself

inline float largest_of(const float* x, int count) {
    V highest[CHAINS];
    for (int c = 0; c < CHAINS; c++) highest[c] = all(-INFINITY);
    int i = 0;
    for (; i + CHAINS * W <= count; i += CHAINS * W)
        for (int c = 0; c < CHAINS; c++) highest[c] = max(highest[c], load(x + i + c * W));
    float top = largest(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
    for (; i < count; i++) top = std::max(top, x[i]);
    return top;
}

// Piece by piece, so that only one piece is looked through for the place.
inline int first_largest(const float* x, int count) {
    constexpr int PIECE = 1024;
    float top = -INFINITY;
    int place = 0;
    for (int first = 0; first < count; first += PIECE) {
        const float here = largest_of(x + first, std::min(PIECE, count - first));
        if (here > top) {
            top = here;
            place = first;
        }
    }
    for (int i = place; i < count; i++)
        if (x[i] == top) return i;
    return 0;
}

// The row's scores, and what the filters have left of them so far.
struct Filtered {
    const std::vector<float>& scores;
    float top;
    std::vector<Candidate>& kept;

    // Keeps the tokens whose score is at least `top - depth`.
    void collect(float depth) {
        const float floor = std::max(top - depth, -std::numeric_limits<float>::max());
        kept.clear();
        for (int i = 0; i < (int)scores.size(); i++)
            if (scores[i] >= floor) kept.push_back({scores[i], i});
    }
};

constexpr float DEPTHS[] = {4, 8, 16, 32, INFINITY};  // few tokens come near the best: look there first

// Ties at the threshold stay.
inline void keep_top_k(Filtered& f, int k) {
    for (float depth : DEPTHS) {
        f.collect(depth);
        if ((int)f.kept.size() >= k) break;
    }
    if ((int)f.kept.size() <= k) return;
    std::vector<float> scores;
    scores.reserve(f.kept.size());
    for (const auto& one : f.kept) scores.push_back(one.score);
    std::nth_element(scores.begin(), scores.begin() + (k - 1), scores.end(), std::greater<float>());
    const float threshold = scores[k - 1];
    f.kept.erase(
        std::remove_if(f.kept.begin(), f.kept.end(), [&](const Candidate& c) { return c.score < threshold; }),
        f.kept.end());
}

inline double mass_of(const std::vector<float>& scores, float top) {
    double whole = 0;
    size_t i = 0;
    for (; i + W <= scores.size();) {
        V part = zero();
        for (int n = 0; n < 64 && i + W <= scores.size(); n++, i += W) part = part + exp(load(&scores[i]) - all(top));
        whole += sum(part);
    }
    for (; i < scores.size(); i++) whole += expf(scores[i] - top);
    return whole;
}

// Of candidates that hold the likeliest tokens: the smallest set whose share of `whole` reaches top_p, by falling score;
// the token that crosses it stays. False when they do not reach it.
inline bool cut_nucleus(std::vector<Candidate>& kept, float top, double whole, float top_p) {
    std::sort(kept.begin(), kept.end(), [](const Candidate& a, const Candidate& b) {
        return a.score > b.score || (a.score == b.score && a.id < b.id);
    });
    double before = 0;
    for (auto one = kept.begin(); one != kept.end(); ++one) {
        if (before / whole >= top_p) {
            kept.erase(one, kept.end());
            return true;
        }
        before += expf(one->score - top);
    }
    return false;
}

inline void keep_nucleus(Filtered& f, bool collected, float top_p) {
    if (collected) {
        double whole = 0;
        for (const auto& one : f.kept) whole += expf(one.score - f.top);
        cut_nucleus(f.kept, f.top, whole, top_p);
        return;
    }
    const double whole = mass_of(f.scores, f.top);
    for (float depth : DEPTHS) {
        f.collect(depth);
        if (cut_nucleus(f.kept, f.top, whole, top_p)) return;
    }
}

inline void keep_min_p(std::vector<Candidate>& kept, float top, float min_p) {
    if (min_p <= 0.0f) return;
    kept.erase(std::remove_if(kept.begin(), kept.end(), [&](const Candidate& c) { return expf(c.score - top) < min_p; }),
               kept.end());
}

// XTC: drop every token as likely as the threshold, but the least likely of them.
inline void drop_top_choices(std::vector<Candidate>& kept, float top, float threshold) {
    double whole = 0;
    for (const auto& one : kept) whole += expf(one.score - top);
    int above = 0, spared = -1;
    for (int i = 0; i < (int)kept.size(); i++) {
        if (expf(kept[i].score - top) / whole < threshold) continue;
        above++;
        if (spared < 0 || kept[i].score < kept[spared].score) spared = i;
    }
    if (above < 2) return;
    const Candidate least = kept[spared];
    kept.erase(std::remove_if(kept.begin(), kept.end(),
                              [&](const Candidate& c) {
                                  return c.id != least.id && expf(c.score - top) / whole >= threshold;
                              }),
               kept.end());
}

inline int64_t draw_row(const SampleArguments& a, int r) {
    const float* logits = a.logits + (size_t)r * a.vocab;
    const int highest = first_largest(logits, a.vocab);
    const float temperature = a.temperature[r];
    if (temperature <= 0.0f) return highest;
    static thread_local std::vector<float> scores;
    static thread_local std::vector<int> ids;
    static thread_local std::vector<Candidate> kept;
    const uint64_t key = (uint64_t)a.key[r];
    scores.resize(a.vocab);
    for (int i = 0; i < a.vocab; i++) scores[i] = logits[i] / temperature;
    const bool choices_dropped = (double)(mixed(key, -1) >> 11) * 0x1p-53 < (double)a.xtc_probability[r];
    if (a.top_k[r] <= 0 && a.top_p[r] >= 1.0f && a.min_p[r] <= 0.0f && !choices_dropped)
        return keyed_winner(scores.data(), nullptr, a.vocab, key);
    Filtered f{scores, scores[highest], kept};
    const bool by_rank = a.top_k[r] > 0 && a.top_k[r] < a.vocab, by_mass = a.top_p[r] < 1.0f;
    if (by_rank) keep_top_k(f, a.top_k[r]);
    if (by_mass) keep_nucleus(f, by_rank, a.top_p[r]);
    if (!by_rank && !by_mass) f.collect(a.min_p[r] > 0.0f ? 0.01f - logf(a.min_p[r]) : INFINITY);
    const float top = f.top;
    keep_min_p(kept, top, a.min_p[r]);
    if (choices_dropped) drop_top_choices(kept, top, a.xtc_threshold[r]);
    ids.clear();
    scores.clear();
    for (const auto& one : kept) {
        scores.push_back(one.score);
        ids.push_back(one.id);
    }
    return keyed_winner(scores.data(), ids.data(), (int)ids.size(), key);
}

inline void sample(const void* arguments, Turn turn) {
    const auto& a = *(const SampleArguments*)arguments;
    for (int r; (r = turn.take(a.rows)) >= 0;) a.token[r] = draw_row(a, r);
}

// Whether every number of a row is finite: 0 * x is nan for the others.
inline void finite(const void* arguments, Turn turn) {
    const auto& a = *(const FiniteArguments*)arguments;
    for (int r; (r = turn.take(a.rows)) >= 0;) {
        const float* x = a.x + (size_t)r * a.width;
        V zeros[CHAINS];
        for (int c = 0; c < CHAINS; c++) zeros[c] = zero();
        int i = 0;
        for (; i + CHAINS * W <= a.width; i += CHAINS * W)
            for (int c = 0; c < CHAINS; c++) zeros[c] = fma(load(x + i + c * W), zero(), zeros[c]);
        float total = sum((zeros[0] + zeros[1]) + (zeros[2] + zeros[3]));
        for (; i < a.width; i++) total += x[i] * 0.0f;
        a.finite[r] = total == 0.0f;
    }
}

}  // namespace TROTH_ISA
}  // namespace troth

// A program that runs every operation with two instruction sets on the same numbers and compares the results: for
// processors that the tests do not run on (`make check-neon`, in an emulator). Built by scripts/check_neon.sh alone.
//
// Usage: check NAME [NAME]; the second is "baseline" unless told otherwise. Exit status 1 when they differ.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "kernel_table.h"
#include "packing.h"

namespace troth {

namespace {

constexpr int INPUTS = 512, OUTPUTS = 40, TOKENS = 7, EXACT = 3;
constexpr int HEADS = 6, KV_HEADS = 2, HEAD_DIM = 48, BLOCKS = 24, CONTEXT = 300, CHUNK = 21;
constexpr int VOCAB = 1003;

// Named results, floats all.
typedef std::map<std::string, std::vector<float>> Results;

class Random {
public:
    uint32_t bits() {
        state_ = state_ * 6364136223846793005ull + 1442695040888963407ull;
        return (uint32_t)(state_ >> 33);
    }
    float number() {  // about normal: a sum of uniform ones
        float total = 0;
        for (int i = 0; i < 12; i++) total += (float)bits() / 2147483648.0f;
        return total - 6;
    }
    std::vector<float> numbers(size_t count) {
        std::vector<float> made(count);
        for (auto& x : made) x = number();
        return made;
    }

private:
    uint64_t state_ = 1;
};

template <class Arguments>
void run(void (*operation)(const void*, Turn), const Arguments& arguments) {
    std::atomic<int> next{0};
    operation(&arguments, Turn{0, 1, &next});
}

// Rows of any bits but for the scales, which are float16 numbers near 2^-8, or float32 ones of affine groups.
std::vector<uint8_t> quantised(Random& random, int format) {
    const packing::Sizes size = packing::sizes(format);
    std::vector<uint8_t> rows((size_t)OUTPUTS * INPUTS / size.block * size.bytes);
    for (auto& byte : rows) byte = (uint8_t)random.bits();
    const bool has_minimum = format == FORMAT_Q4_1 || format == FORMAT_Q5_1 || format == FORMAT_Q4_K || format == FORMAT_Q5_K;
    for (size_t block = 0; block < rows.size(); block += size.bytes) {
        if (is_affine(format)) {
            const float numbers[2] = {random.number() / 256, random.number()};
            memcpy(&rows[block], numbers, sizeof numbers);
            continue;
        }
        for (int i = 0; i <= (int)has_minimum; i++) {
            const uint16_t scale = (uint16_t)(0x1c00 | (random.bits() & 0x83ff));
            memcpy(&rows[block + (format == FORMAT_Q6_K ? 208 : 2 * i)], &scale, 2);
        }
    }
    return rows;
}

void products(const Kernels& kernels, Random& random, Results& results) {
    const auto x = random.numbers((size_t)TOKENS * INPUTS), bias = random.numbers(OUTPUTS);
    const std::vector<int64_t> ids = {3, OUTPUTS - 1, 0};
    for (int format = 0; format < FORMATS; format++) {
        std::vector<uint8_t> memory;
        WeightPart part{format, nullptr, 0, OUTPUTS, false};
        if (format < FORMAT_F32) {
            const auto rows = quantised(random, format);
            const packing::Sizes size = packing::sizes(format);
            part.row_bytes = (size_t)INPUTS / size.block * size.packed;
            memory.resize((size_t)(OUTPUTS + 15) / 16 * part.row_bytes);
            run(packing::pack, PackArguments{format, rows.data(), rows.size() / OUTPUTS, OUTPUTS, INPUTS, memory.data()});
        } else {
            const int bytes = format == FORMAT_F32 ? 4 : 2;
            part.row_bytes = (size_t)INPUTS * bytes;
            memory.resize(OUTPUTS * part.row_bytes);
            for (size_t i = 0; i < memory.size(); i += bytes) {
                const float number = random.number();
                uint32_t bits;
                memcpy(&bits, &number, 4);
                // The upper half of a float32 is a bf16; float16 gets numbers near 1 of either sign.
                const uint16_t half = format == FORMAT_BF16 ? bits >> 16 : 0x3800 | (random.bits() & 0x83ff);
                memcpy(&memory[i], format == FORMAT_F32 ? (const void*)&number : &half, bytes);
            }
        }
        part.rows = memory.data();
        const std::string name = "format " + std::to_string(format);
        auto& y = results["linear " + name];
        y.resize((size_t)TOKENS * OUTPUTS);
        const LinearArguments arguments{&part, 1, INPUTS, OUTPUTS, bias.data(), x.data(), y.data(), EXACT, TOKENS,
                                        nullptr, nullptr};
        run(kernels.linear, arguments);
        if (has_fours(format)) {
            auto& rounded = results["linear of 8-bit inputs " + name];
            rounded.resize(y.size());
            WeightPart fours = part;
            fours.fours = true;
            LinearArguments with_fours = arguments;
            with_fours.parts = &fours;
            with_fours.y = rounded.data();
            run(kernels.linear, with_fours);
        }
        auto& rows = results["embedding " + name];
        rows.resize(ids.size() * INPUTS);
        run(kernels.embedding, EmbeddingArguments{part, INPUTS, ids.data(), 1.5f, rows.data(), (int)ids.size()});
    }
}

// Keys and values are written by one set of kernels and read by both: a number between two steps may go either way.
void attention(const Kernels& writer, const Kernels& kernels, Random& random, Results& results) {
    const int total = CONTEXT + CHUNK, half = HEAD_DIM / 2;
    const auto qkv = random.numbers((size_t)total * (HEADS + 2 * KV_HEADS) * HEAD_DIM);
    const auto cos = random.numbers((size_t)total * half), sin = random.numbers((size_t)total * half);
    const auto norm = random.numbers(HEAD_DIM);
    std::vector<int64_t> positions(total), slots(total);
    std::vector<int32_t> tables(2 * BLOCKS);
    for (int i = 0; i < BLOCKS; i++) tables[i] = tables[BLOCKS + i] = (i * 7 + 3) % BLOCKS;
    for (int t = 0; t < total; t++) {
        positions[t] = t;
        slots[t] = tables[t / 16] * 16 + t % 16;
    }
    // One token that sees 300, and the chunk that ends the same context.
    const std::vector<int32_t> starts = {0, 1, 1 + CHUNK}, lengths = {CONTEXT, total};
    for (int type = KV_F32; type <= KV_I8; type++)
        for (int window : {0, 40}) {
            // Something of others lies between two blocks.
            constexpr size_t HELD = (size_t)KV_HEADS * HEAD_DIM * 16, STRIDE = HELD + 32, SCALES = KV_HEADS * 16 + 16;
            std::vector<float> k(BLOCKS * STRIDE), v(k.size()), q((size_t)total * HEADS * HEAD_DIM);
            std::vector<float> k_scale(BLOCKS * SCALES), v_scale(k_scale.size());
            const KvPool kv{k.data(), v.data(), k_scale.data(), v_scale.data(), type, KV_HEADS, STRIDE, SCALES};
            RotaryArguments rotary{qkv.data(), HEADS,       HEAD_DIM, positions.data(), cos.data(), sin.data(), half,
                                   norm.data(), norm.data(), 1e-6f,    slots.data(),     kv,         q.data(),   total};
            const std::string name = "type " + std::to_string(type) + " window " + std::to_string(window);
            if (type == KV_F32) {
                run(kernels.rotary, rotary);
                results["rotary queries"] = q;
                results["rotary keys"] = k;
                results["rotary values"] = v;
            }
            run(writer.rotary, rotary);
            auto& out = results["attention " + name];
            out.resize((size_t)(1 + CHUNK) * HEADS * HEAD_DIM);
            std::vector<float> parts((size_t)HEADS * 2 * (HEAD_DIM + 2)), scratch(24 * (256 + HEAD_DIM));
            const AttentionArguments a{q.data(),      kv,             HEADS, HEAD_DIM, tables.data(), BLOCKS,
                                       starts.data(), lengths.data(), 2,     1,        0.14f,         window,
                                       window ? 30.0f : 0.0f, out.data(), parts.data(), 2, scratch.data(), scratch.size()};
            run(kernels.attention, a);
            run(kernels.attention_merge, a);
        }
}

void elementary(const Kernels& kernels, Random& random, Results& results) {
    constexpr int WIDTH = 75, INNER = 531;
    const auto x = random.numbers(TOKENS * WIDTH), residual = random.numbers(TOKENS * WIDTH), weight = random.numbers(WIDTH);
    auto &sums = results["norm sums"], &normed = results["norm"];
    sums.resize(x.size());
    normed.resize(x.size());
    run(kernels.norm,
        NormArguments{x.data(), residual.data(), sums.data(), weight.data(), 1e-6f, normed.data(), WIDTH, TOKENS});
    const auto gate_up = random.numbers((size_t)TOKENS * 2 * INNER);
    for (int act : {ACT_SILU, ACT_GELU_TANH}) {
        auto& y = results["gate " + std::to_string(act)];
        y.resize((size_t)TOKENS * INNER);
        run(kernels.gate, GateArguments{gate_up.data(), act, y.data(), INNER, TOKENS});
    }
    const auto logits = random.numbers(4 * VOCAB);
    const float temperature[] = {0, 1, 0.7f, 1.3f}, top_p[] = {1, 0.9f, 1, 1}, min_p[] = {0, 0, 0.05f, 0};
    const float never[] = {0, 0, 0, 0}, threshold[] = {0.1f, 0.1f, 0.1f, 0.1f};
    const int32_t top_k[] = {0, 0, 50, 0};
    const int64_t key[] = {1, 2, 3, 4};
    int64_t token[4];
    run(kernels.sample, SampleArguments{logits.data(), 4, VOCAB, temperature, top_k, top_p, min_p, never, threshold, key, token});
    auto wrong = logits;
    wrong[VOCAB + 1000] = NAN;
    wrong[2 * VOCAB] = INFINITY;
    bool finite[4];
    run(kernels.finite, FiniteArguments{wrong.data(), 4, VOCAB, finite});
    auto& masked = results["mask"] = logits;
    std::vector<uint32_t> allowed(2 * (VOCAB + 31) / 32 + 2);
    for (auto& word : allowed) word = random.bits() << 1 | (random.bits() & 1);
    const int64_t masked_rows[] = {3, 1};
    run(kernels.mask, MaskArguments{masked.data(), VOCAB, masked_rows, allowed.data(), 2});
    for (auto& x : masked) x = std::max(x, -100.0f);  // results are compared where they are finite
    results["sample"] = {token, token + 4};
    results["finite"] = {finite, finite + 4};
}

Results results_of(const Kernels& writer, const Kernels& kernels) {
    Random random;
    Results results;
    products(kernels, random, results);
    attention(writer, kernels, random, results);
    elementary(kernels, random, results);
    return results;
}

// Sums in another order, and exp to a few units in the last place.
int compare(const Results& got, const Results& want) {
    int different = 0;
    for (const auto& [name, wanted] : want) {
        const auto& ours = got.at(name);
        float largest = 0, error = 0;
        bool same_kind = ours.size() == wanted.size();
        for (size_t i = 0; same_kind && i < wanted.size(); i++) {
            same_kind = std::isfinite(ours[i]) && std::isfinite(wanted[i]);
            largest = std::max(largest, std::fabs(wanted[i]));
            error = std::max(error, std::fabs(ours[i] - wanted[i]));
        }
        const bool equal = same_kind && largest > 0 && error <= 2e-5f * largest;
        printf("%-32s %s  error %.1e of %.3g\n", name.c_str(), equal ? "same" : "DIFFERENT", error, largest);
        different += !equal;
    }
    return different;
}

}  // namespace

}  // namespace troth

int main(int count, char** words) {
    using namespace troth;
    const Kernels* one = kernels_named(count > 1 ? words[1] : "");
    const Kernels* other = kernels_named(count > 2 ? words[2] : "baseline");
    if (!one || !other) {
        fprintf(stderr, "usage: check NAME [NAME]; this build runs");
        for (const auto& name : instruction_sets()) fprintf(stderr, " %s", name.c_str());
        fprintf(stderr, "\n");
        return 2;
    }
    const int different = compare(results_of(*other, *one), results_of(*other, *other));
    printf("%s against %s: %d results differ\n", one->name, other->name, different);
    return different > 0;
}

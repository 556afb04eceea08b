// A program of operations that can be run again: a decode step is recorded once per batch size and then costs Python one
// call. While recording, each operation also runs at once, so that recording is an ordinary step.
//
// What is kept is shorter than what was recorded: small operations become part of their neighbours where that changes no
// bit of any result, because in a decode step threads wait for one another longer than those take.
//
//     linear, norm of a sum   -> linear that adds, norm
//     norm, linear            -> linear that norms its inputs; and so for the gated activation and the merge of attention
//     rotary, attention       -> attention that turns its queries, and writes the newest keys and values
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <vector>

#include "device.h"
#include "hand_over.h"

namespace troth {

class Tape {
public:
    Tape(Device& device, bool keep) : device_(device), keep_(keep) {}

    // Run everything that was kept, in order.
    void run() { device_.run(operations_.data(), (int)operations_.size()); }

    const std::vector<Operation>& operations() const { return operations_; }
    int size() const { return (int)operations_.size(); }

    // scratch: Device::scratch_bytes of them, or null where that is 0.
    void linear(const Weight& w, uintptr_t bias, uintptr_t x, uintptr_t y, int exact, int tokens, uintptr_t scratch) {
        LinearArguments a{w.parts.data(), (int)w.parts.size(), w.inputs, w.outputs, at<const float>(bias),
                          at<const float>(x), at<float>(y), exact, tokens, at<void>(scratch),
                          device_.panels16(w, exact, tokens)};
        if (scratch) take(a.panels16 ? kernels().round_to_bf16 : kernels().round_inputs, a);
        take(kernels().linear, a);
        if (keep_ && !scratch) make_own_inputs();
    }

    void embedding(const Weight& w, uintptr_t ids, float scale, uintptr_t y, int tokens) {
        EmbeddingArguments a{w.parts.at(0), w.inputs, at<const int64_t>(ids), scale, at<float>(y), tokens};
        take(kernels().embedding, a);
    }

    void norm(uintptr_t x, uintptr_t residual, uintptr_t total, uintptr_t weight, float eps, uintptr_t y, int width,
              int tokens) {
        NormArguments a{at<const float>(x), at<const float>(residual), at<float>(total), at<const float>(weight), eps,
                        at<float>(y), width, tokens};
        take(kernels().norm, a);
        if (keep_ && residual) leave_sum_to_linear();
    }

    void rotary(uintptr_t qkv, int heads, int head_dim, uintptr_t positions, uintptr_t cos, uintptr_t sin, int half,
                uintptr_t q_norm, uintptr_t k_norm, float eps, uintptr_t slots, const KvPool& kv, uintptr_t q,
                int tokens) {
        RotaryArguments a{at<const float>(qkv), heads, head_dim, at<const int64_t>(positions), at<const float>(cos),
                          at<const float>(sin), half, at<const float>(q_norm), at<const float>(k_norm), eps,
                          at<const int64_t>(slots), kv, at<float>(q), tokens};
        take(kernels().rotary, a);
    }

    void attention(uintptr_t q, const KvPool& kv, int heads, int head_dim, uintptr_t tables, size_t table_stride,
                   uintptr_t starts, uintptr_t lengths, int rows, int single, float scale, int window, float softcap,
                   uintptr_t out, uintptr_t parts, int max_segments, uintptr_t scratch, size_t scratch_stride) {
        AttentionArguments a{at<const float>(q), kv, heads, head_dim, at<const int32_t>(tables), table_stride,
                             at<const int32_t>(starts), at<const int32_t>(lengths), rows, single, scale, window, softcap,
                             at<float>(out), at<float>(parts), max_segments, at<float>(scratch), scratch_stride};
        take(kernels().attention, a);
        if (keep_) make_own_queries();
        if (single) take(kernels().attention_merge, a);
    }

    void gate(uintptr_t gate_up, int act, uintptr_t y, int inner, int tokens) {
        GateArguments a{at<const float>(gate_up), act, at<float>(y), inner, tokens};
        take(kernels().gate, a);
    }

    void delta(uintptr_t qkv, int key_heads, int heads, int key_dim, int value_dim, uintptr_t decay, uintptr_t beta,
               size_t gate_stride, uintptr_t rate, uintptr_t bias, uintptr_t state, uintptr_t trail, const StepRows& rows,
               uintptr_t out) {
        DeltaArguments a{at<const float>(qkv), key_heads, heads, key_dim, value_dim, at<const float>(decay),
                         at<const float>(beta), gate_stride, at<const float>(rate), at<const float>(bias),
                         at<float>(state), at<float>(trail), rows, at<float>(out)};
        take(kernels().delta, a);
    }

    void conv(uintptr_t x, size_t stride, uintptr_t weight, int taps, int channels, bool silu, uintptr_t state,
              uintptr_t trail, const StepRows& rows, uintptr_t y) {
        ConvArguments a{at<const float>(x), stride, at<const float>(weight), taps, channels, silu,
                        at<float>(state), at<float>(trail), rows, at<float>(y)};
        take(kernels().conv, a);
    }

    void gated_norm(uintptr_t x, uintptr_t gate, size_t gate_stride, uintptr_t weight, float eps, uintptr_t y, int width,
                    int heads, int tokens) {
        GatedNormArguments a{at<const float>(x), at<const float>(gate), gate_stride, at<const float>(weight), eps,
                             at<float>(y), width, heads, tokens};
        take(kernels().gated_norm, a);
    }

    void sample(uintptr_t logits, int rows, int vocab, uintptr_t temperature, uintptr_t top_k, uintptr_t top_p,
                uintptr_t min_p, uintptr_t xtc_probability, uintptr_t xtc_threshold, uintptr_t key, uintptr_t token) {
        SampleArguments a{at<const float>(logits), rows, vocab, at<const float>(temperature), at<const int32_t>(top_k),
                          at<const float>(top_p), at<const float>(min_p), at<const float>(xtc_probability),
                          at<const float>(xtc_threshold), at<const int64_t>(key), at<int64_t>(token)};
        take(kernels().sample, a, rows);
    }

    void finite(uintptr_t x, int rows, int width, uintptr_t finite) {
        FiniteArguments a{at<const float>(x), rows, width, at<bool>(finite)};
        take(kernels().finite, a, rows);
    }

    void mask(uintptr_t logits, int vocab, uintptr_t rows, uintptr_t allowed, int masks) {
        MaskArguments a{at<float>(logits), vocab, at<const int64_t>(rows), at<const uint32_t>(allowed), masks};
        take(kernels().mask, a, masks);
    }

    // Copy `bytes` of staged numbers to the inputs; `count` tokens and rows are among them. By one thread: a few kB.
    void feed(uintptr_t staged, uintptr_t inputs, size_t bytes, uintptr_t tokens, uintptr_t rows, uintptr_t last,
              int count) {
        FeedArguments a{at<const void>(staged), at<void>(inputs),        bytes, at<int64_t>(tokens),
                        at<const int64_t>(rows), at<const int64_t>(last), count};
        take(troth::feed, a, 1);
    }

    // Tokens of `count` rows become their last ones.
    void note(uintptr_t tokens, uintptr_t rows, uintptr_t last, int count) {
        NoteArguments a{at<const int64_t>(tokens), at<const int64_t>(rows), at<int64_t>(last), count};
        take(troth::note, a, 1);
    }

private:
    const Kernels& kernels() const { return device_.kernels(); }

    // `pieces` tells how many threads the operation can use: one piece is not worth waking the others.
    template <class Arguments>
    void take(void (*run)(const void*, Turn), const Arguments& arguments, int pieces = 2) {
        if (!keep_) {
            Operation operation{run, &arguments};
            if (pieces < 2) {
                device_.finish_started();
                std::atomic<int> next{0};
                run(&arguments, Turn{0, 1, &next});
                return;
            }
            device_.run(&operation, 1);
            return;
        }
        auto kept = std::make_shared<Arguments>(arguments);
        kept_.push_back(kept);
        operations_.push_back({run, kept.get()});
        device_.run(&operations_.back(), 1);
    }

    // Arguments of the operation `back` places from the end, if it is of this kind; null: it is not.
    template <class Arguments>
    Arguments* kept(void (*run)(const void*, Turn), size_t back) {
        if (operations_.size() <= back) return nullptr;
        const Operation& asked = operations_[operations_.size() - 1 - back];
        return asked.run == run ? (Arguments*)asked.arguments : nullptr;
    }

    // The operation before the last becomes part of it.
    void drop_before_last() { operations_.erase(operations_.end() - 2); }

    // The last operation is a linear layer: what its inputs are made by becomes part of it.
    void make_own_inputs() {
        auto& a = *kept<LinearArguments>(kernels().linear, 0);
        if (a.tokens > MADE_BY_EACH) return;
        auto* normed = kept<NormArguments>(kernels().norm, 1);
        auto* gated = kept<GateArguments>(kernels().gate, 1);
        auto* merged = kept<AttentionArguments>(kernels().attention_merge, 1);
        // A norm of a sum changes that sum, which the other threads would read.
        if (normed && normed->y == a.x && normed->tokens == a.tokens && normed->width == a.inputs && !normed->residual)
            a.before = {kernels().normed_row, normed};
        else if (gated && gated->y == a.x && gated->tokens == a.tokens && gated->inner == a.inputs)
            a.before = {kernels().gated_row, gated};
        else if (merged && merged->out == a.x && merged->single == a.tokens && merged->rows == a.tokens &&
                 merged->heads * merged->head_dim == a.inputs)
            a.before = {kernels().merged_row, merged};
        else
            return;
        drop_before_last();
    }

    // The last operation is a norm of a sum: whoever has computed an output of the linear layer before it adds that.
    void leave_sum_to_linear() {
        auto& a = *kept<NormArguments>(kernels().norm, 0);
        auto* linear = kept<LinearArguments>(kernels().linear, 1);
        if (!linear || linear->y != a.x || linear->tokens != a.tokens || linear->outputs != a.width || linear->total)
            return;
        // Not where its inputs come from the sum as it was.
        if (linear->x == a.total || linear->before.row == kernels().normed_row) return;
        linear->residual = a.residual;
        linear->total = a.total;
        a.x = a.total;
        a.residual = nullptr;
    }

    // The last operation is attention: rows of one token turn their queries in it.
    void make_own_queries() {
        auto& a = *kept<AttentionArguments>(kernels().attention, 0);
        auto* rotary = kept<RotaryArguments>(kernels().rotary, 1);
        if (!rotary || rotary->q != a.q || rotary->tokens != a.single || a.rows != a.single || rotary->kv.k != a.kv.k ||
            rotary->heads != a.heads || rotary->head_dim != a.head_dim)
            return;
        a.rotary = rotary;
        drop_before_last();
    }

    Device& device_;
    bool keep_;
    std::vector<Operation> operations_;
    std::deque<std::shared_ptr<void>> kept_;
};

}  // namespace troth

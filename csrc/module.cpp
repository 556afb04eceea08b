// troth._cpu: the CPU kernels as a Python module. Pointers and sizes only; ops/impl/cpu.py keeps what they point to.
//
// A Tape is a program of operations that can be run again: a decode step is recorded once per batch size and then costs
// Python one call. While recording, each operation also runs at once, so that recording is an ordinary step.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <deque>
#include <memory>
#include <stdexcept>
#include <string>

#include "arguments.h"
#include "dispatch.h"
#include "kernel_table.h"
#include "pool.h"
#include "packing.h"

namespace nb = nanobind;

namespace troth {

namespace {

template <class T>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// One linear layer's weights. Holds addresses only.
struct Weight {
    std::vector<WeightPart> parts;
    int inputs = 0;
    int outputs = 0;

    explicit Weight(int inputs) : inputs(inputs) {}

    void add(int format, uintptr_t rows, size_t row_bytes, int count, bool fours) {
        if (format < 0 || format >= FORMATS) throw std::invalid_argument("unknown weight format");
        if (fours && !has_fours(format)) throw std::invalid_argument("inputs of this format are not rounded to 8 bits");
        parts.push_back({format, at<const uint8_t>(rows), row_bytes, count, fours});
        outputs += count;
    }

    int count(bool packed, bool fours) const {  // parts of that kind
        int found = 0;
        for (const auto& part : parts) found += (part.format < FORMAT_F32) == packed && part.fours == fours;
        return found;
    }
    bool is_all_fours() const { return count(true, true) == (int)parts.size(); }
};

size_t group_bytes(int format, int inputs) {
    const packing::Sizes size = packing::sizes(format);
    if (!size.block || inputs % size.block) throw std::invalid_argument("rows of this format cannot be packed");
    return (size_t)(inputs / size.block) * size.packed;
}

// The processor's side: which kernels, and the threads they run on.
class Device {
public:
    Device(int threads, const std::string& isa) : pool_(threads), kernels_(kernels_named(isa)) {
        if (!kernels_) throw std::invalid_argument("this processor cannot run the kernels for " + isa);
    }

    const Kernels& kernels() const { return *kernels_; }
    int threads() const { return pool_.threads(); }
    void run(const Operation* operations, int count) { pool_.run(operations, count); }

    // Bytes that a product wants for rounded inputs. Few tokens are rounded by each thread, which costs less than to wait
    // for one another.
    size_t scratch_bytes(const Weight& w, int exact, int tokens) const {
        if (panels16(w, exact, tokens)) return (size_t)(tokens - exact) * w.inputs * 2;
        const size_t bytes = (w.count(true, false) ? ROUNDED16_BYTES : 0) + (w.count(true, true) ? ROUNDED8_BYTES : 0);
        return tokens > 3 ? (size_t)tokens * (w.inputs / 32) * bytes : 0;
    }

    Panels16 panels16(const Weight& w, int exact, int tokens) const {
        return exact < tokens && !w.is_all_fours() ? kernels().panels16 : nullptr;
    }

    // Lay rows of a quantised format out in groups of 16 at `packed`, group_bytes apart.
    void pack(int format, uintptr_t rows, size_t row_bytes, int outputs, int inputs, uintptr_t packed) {
        PackArguments a{format, at<const uint8_t>(rows), row_bytes, outputs, inputs, at<uint8_t>(packed)};
        Operation operation{packing::pack, &a};
        run(&operation, 1);
    }

private:
    Pool pool_;
    const Kernels* kernels_;
};

class Tape {
public:
    Tape(Device& device, bool keep) : device_(device), keep_(keep) {}

    // Run everything that was kept, in order.
    void run() { device_.run(operations_.data(), (int)operations_.size()); }

    int size() const { return (int)operations_.size(); }

    // scratch: Device::scratch_bytes of them, or null where that is 0.
    void linear(const Weight& w, uintptr_t bias, uintptr_t x, uintptr_t y, int exact, int tokens, uintptr_t scratch) {
        LinearArguments a{w.parts.data(), (int)w.parts.size(), w.inputs, w.outputs, at<const float>(bias),
                          at<const float>(x), at<float>(y), exact, tokens, at<void>(scratch),
                          device_.panels16(w, exact, tokens)};
        if (scratch) take(a.panels16 ? kernels().round_to_bf16 : kernels().round_inputs, a);
        take(kernels().linear, a);
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

private:
    const Kernels& kernels() const { return device_.kernels(); }

    // `pieces` tells how many threads the operation can use: one piece is not worth waking the others.
    template <class Arguments>
    void take(void (*run)(const void*, Turn), const Arguments& arguments, int pieces = 2) {
        if (!keep_) {
            Operation operation{run, &arguments};
            if (pieces < 2) {
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

    Device& device_;
    bool keep_;
    std::vector<Operation> operations_;
    std::deque<std::shared_ptr<void>> kept_;
};

}  // namespace

}  // namespace troth

NB_MODULE(_cpu, m) {
    using namespace troth;
    m.doc() = "CPU kernels of Troth. Use through troth.ops; addresses are not checked.";
    m.attr("INTERFACE") = 10;  // counts changes of what ops/impl/cpu.py calls: a stale build is found before it fails
    m.def("instruction_sets", &instruction_sets, "Names this processor can run, widest first.");
    m.def("group_bytes", &group_bytes, "Bytes of 16 packed rows of a quantised format.");
    nb::class_<StepRows>(m, "StepRows")
        .def("__init__", [](StepRows* self, uintptr_t ids, uintptr_t starts, uintptr_t lengths, uintptr_t recalls,
                            int count, int single, int verifies, int trail_tokens) {
            new (self) StepRows{at<const int64_t>(ids), at<const int32_t>(starts), at<const int32_t>(lengths),
                                at<const int64_t>(recalls), count, single, verifies, trail_tokens};
        });
    nb::class_<KvPool>(m, "KvPool")
        .def("__init__", [](KvPool* self, uintptr_t k, uintptr_t v, uintptr_t k_scale, uintptr_t v_scale, int type,
                            int heads, size_t stride, size_t scale_stride) {
            new (self) KvPool{at<void>(k), at<void>(v), at<float>(k_scale), at<float>(v_scale),
                              type,        heads,       stride,             scale_stride};
        });
    nb::class_<Weight>(m, "Weight")
        .def(nb::init<int>(), nb::arg("inputs"))
        .def("add", &Weight::add)
        .def_ro("inputs", &Weight::inputs)
        .def_ro("outputs", &Weight::outputs);
    nb::class_<Device>(m, "Device")
        .def(nb::init<int, const std::string&>(), nb::arg("threads"), nb::arg("isa"))
        .def("pack", &Device::pack, nb::call_guard<nb::gil_scoped_release>())
        .def("scratch_bytes", &Device::scratch_bytes)
        .def_prop_ro("threads", &Device::threads)
        .def_prop_ro("name", [](const Device& d) { return std::string(d.kernels().name); });
    nb::class_<Tape>(m, "Tape")
        .def(nb::init<Device&, bool>(), nb::arg("device"), nb::arg("keep"), nb::keep_alive<1, 2>())
        .def("run", &Tape::run, nb::call_guard<nb::gil_scoped_release>())
        .def("__len__", &Tape::size)
        .def("linear", &Tape::linear, nb::keep_alive<1, 2>(), nb::call_guard<nb::gil_scoped_release>())
        .def("embedding", &Tape::embedding, nb::keep_alive<1, 2>(), nb::call_guard<nb::gil_scoped_release>())
        .def("norm", &Tape::norm, nb::call_guard<nb::gil_scoped_release>())
        .def("rotary", &Tape::rotary, nb::call_guard<nb::gil_scoped_release>())
        .def("attention", &Tape::attention, nb::call_guard<nb::gil_scoped_release>())
        .def("gate", &Tape::gate, nb::call_guard<nb::gil_scoped_release>())
        .def("delta", &Tape::delta, nb::call_guard<nb::gil_scoped_release>())
        .def("conv", &Tape::conv, nb::call_guard<nb::gil_scoped_release>())
        .def("gated_norm", &Tape::gated_norm, nb::call_guard<nb::gil_scoped_release>())
        .def("sample", &Tape::sample, nb::call_guard<nb::gil_scoped_release>())
        .def("finite", &Tape::finite, nb::call_guard<nb::gil_scoped_release>())
        .def("mask", &Tape::mask, nb::call_guard<nb::gil_scoped_release>());
}

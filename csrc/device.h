// What Python holds of the kernels: weights, and the processor's side. Addresses only; Python keeps what they point to.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"
#include "dispatch.h"
#include "kernel_table.h"
#include "packing.h"
#include "pool.h"

namespace troth {

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

inline size_t group_bytes(int format, int inputs) {
    const packing::Sizes size = packing::sizes(format);
    if (!size.block || inputs % size.block) throw std::invalid_argument("rows of this format cannot be packed");
    return (size_t)(inputs / size.block) * size.packed;
}

constexpr int MADE_BY_EACH = 3;  // tokens whose inputs each thread makes for itself: to wait for one another costs more

// The processor's side: which kernels, and the threads they run on.
class Device {
public:
    Device(int threads, const std::string& isa) : pool_(threads), kernels_(kernels_named(isa)) {
        if (!kernels_) throw std::invalid_argument("this processor cannot run the kernels for " + isa);
    }

    const Kernels& kernels() const { return *kernels_; }
    int threads() const { return pool_.threads(); }
    void run(const Operation* operations, int count) { finish(pool_.start(operations, count)); }
    long start(const std::vector<Operation>& made) { return pool_.start(made.data(), (int)made.size()); }
    void finish(long program) { pool_.finish(program); }
    void finish_started() { pool_.finish(pool_.last()); }
    bool is_finished(long program) const { return pool_.is_finished(program); }

    // Bytes that a product wants for rounded inputs.
    size_t scratch_bytes(const Weight& w, int exact, int tokens) const {
        if (panels16(w, exact, tokens)) return (size_t)(tokens - exact) * w.inputs * 2;
        const size_t bytes = (w.count(true, false) ? ROUNDED16_BYTES : 0) + (w.count(true, true) ? ROUNDED8_BYTES : 0);
        return tokens > MADE_BY_EACH ? (size_t)tokens * (w.inputs / 32) * bytes : 0;
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

}  // namespace troth

// troth._cpu: the CPU kernels as a Python module. Pointers and sizes only; ops/impl/cpu.py keeps what they point to.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "tape.h"

namespace nb = nanobind;

namespace troth {

namespace {

// Have tapes run one after the other; the number of this program. They must be kept until it has ended.
long start(Device& device, const std::vector<const Tape*>& tapes) {
    std::vector<Operation> operations;
    for (const Tape* tape : tapes)
        operations.insert(operations.end(), tape->operations().begin(), tape->operations().end());
    return device.start(operations);
}

}  // namespace

}  // namespace troth

NB_MODULE(_cpu, m) {
    using namespace troth;
    m.doc() = "CPU kernels of Troth. Use through troth.ops; addresses are not checked.";
    m.attr("INTERFACE") = 11;  // counts changes of what ops/impl/cpu.py calls: a stale build is found before it fails
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
        .def("start", &start, nb::call_guard<nb::gil_scoped_release>())
        .def("finish", &Device::finish, nb::call_guard<nb::gil_scoped_release>())
        .def("is_finished", &Device::is_finished)
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
        .def("mask", &Tape::mask, nb::call_guard<nb::gil_scoped_release>())
        .def("feed", &Tape::feed, nb::call_guard<nb::gil_scoped_release>())
        .def("note", &Tape::note, nb::call_guard<nb::gil_scoped_release>());
}

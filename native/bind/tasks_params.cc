// Parameters of tasks, as Python creates them.
//
// It rejects values that are not operands; Python code checks the description of an output (tilewise.runtime.params).
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

namespace {

/// call: named in errors. Rejects objects that are not operands.
void init_param(Param* self, const char* call, nb::handle x, pto_mode mode, pto_kernel combine = 0) {
  if (!nb::isinstance<Operand>(x) || !nb::inst_ready(x)) checked_in_python("operand")(call, x);
  const Operand& operand = *nb::inst_ptr<Operand>(x);
  new (self) Param{};
  self->rt = operand.rt;
  self->native.mode = mode;
  self->native.combine = combine;
  self->native.handle = operand.handle;
  self->has_region = operand.has_region;
  self->region = operand.region;
  self->target = nb::borrow(x);
}

struct Input : Param {};
struct InOut : Param {};
struct Commute : Param {};
struct Output : Param {};

/// An output with an operand, or one that the runtime allocates; Python computes its size from shape and dtype.
void init_output(Output* self, nb::handle x, nb::handle bytes, nb::handle shape, nb::handle dtype) {
  if (!x.is_none() && bytes.is_none() && shape.is_none() && dtype.is_none()) {
    return init_param(self, "Output", x, PTO_OUTPUT);
  }
  const nb::object described =
      nb::module_::import_("tilewise.runtime.params").attr("describe_output")(x, bytes, shape, dtype);
  new (self) Output{};
  self->native.mode = PTO_OUTPUT;
  self->native.bytes = nb::cast<uint64_t>(described.attr("num_bytes"));
  self->target = described;
}

}  // namespace

void bind_params(nb::module_& m) {
  nb::class_<Operand>(m, "Operand", "A buffer or a region of one; base of Buffer and Region.")
      .def_ro("handle", &Operand::handle, "The runtime's id of the buffer.");
  nb::class_<Param>(m, "Param", "One parameter of a task.")
      .def(
          "__init__",
          [](Param* self, const char* call, nb::handle operand, int mode, pto_kernel combine) {
            init_param(self, call, operand, static_cast<pto_mode>(mode), combine);
          },
          nb::arg("call"), nb::arg("operand").none(), nb::arg("mode"), nb::arg("combine") = 0)
      .def(
          "__init__",
          [](Param* self, int mode, uint64_t address, nb::object target) {
            new (self) Param{};
            self->native.mode = static_cast<pto_mode>(mode);
            self->native.address = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
            self->target = std::move(target);
          },
          nb::arg("mode"), nb::arg("address"), nb::arg("target").none())
      .def_prop_ro("mode", [](const Param& param) { return static_cast<int>(param.native.mode); })
      .def_ro("target", &Param::target, "The operand, or the description of a new output.");
  nb::class_<Input, Param>(m, "Input", "The task reads the operand; readers run in parallel.")
      .def("__init__", [](Input* self, nb::handle x) { init_param(self, "Input", x, PTO_INPUT); }, nb::arg("x").none());
  nb::class_<Output, Param>(m, "Output",
                            "The task overwrites the whole operand. Without one, the runtime allocates the output, as "
                            "a number of `bytes` or "
                            "as an array of `shape` and `dtype`; `TaskHandle.outputs` has it.")
      .def("__init__", &init_output, nb::arg("x") = nb::none(), nb::kw_only(), nb::arg("bytes") = nb::none(),
           nb::arg("shape") = nb::none(), nb::arg("dtype") = nb::none());
  nb::class_<InOut, Param>(m, "InOut", "The task reads and writes the operand.")
      .def("__init__", [](InOut* self, nb::handle x) { init_param(self, "InOut", x, PTO_INOUT); }, nb::arg("x").none());
  nb::class_<Commute, Param>(
      m, "Commute",
      "The task reads and writes the operand; neighbouring commuting tasks run one at a time in any order.")
      .def(
          "__init__", [](Commute* self, nb::handle x) { init_param(self, "Commute", x, PTO_COMMUTE); },
          nb::arg("x").none());
}

}  // namespace tilewise::bind

// submit() from Python. Every task uses this path, so it allocates only for rare options.
//
// It keeps the GIL; the runtime's hook releases it if the call must block.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "bind/items.h"
#include "bind/tasks.h"

namespace nb = nanobind;

namespace tilewise::bind {

bool is_numpy_bool(PyObject* value) {
  static PyObject* const type = nb::object(nb::module_::import_("numpy").attr("bool_")).release().ptr();
  return Py_TYPE(value) == reinterpret_cast<PyTypeObject*>(type);
}

namespace {

/// bits_of for values other than plain integers, and integers of 64 bits.
uint64_t other_bits_of(const char* call, nb::handle value) {
  if (PyFloat_Check(value.ptr())) return std::bit_cast<uint64_t>(PyFloat_AsDouble(value.ptr()));
  if (is_numpy_bool(value.ptr())) return PyObject_IsTrue(value.ptr()) == 1;  // like True, which is 1
  if (!PyIndex_Check(value.ptr())) {
    const double real = PyFloat_AsDouble(value.ptr());
    if (real == -1.0 && PyErr_Occurred() != nullptr) checked_in_python("scalar")(call, value);
    return std::bit_cast<uint64_t>(real);
  }
  const nb::object number = nb::steal(PyNumber_Index(value.ptr()));
  if (!number.is_valid()) checked_in_python("scalar")(call, value);
  int overflow = 0;
  const auto bits = static_cast<uint64_t>(PyLong_AsLongLongAndOverflow(number.ptr(), &overflow));
  if (overflow == 0) return bits;
  const uint64_t large = overflow > 0 ? PyLong_AsUnsignedLongLong(number.ptr()) : 0;
  if (overflow < 0 || PyErr_Occurred() != nullptr) checked_in_python("scalar")(call, value);
  return large;
}

}  // namespace

// Integers in two's complement: 64 bits, signed or unsigned.
uint64_t bits_of(const char* call, nb::handle value) {
  if (PyLong_CheckExact(value.ptr())) [[likely]] {
    int overflow = 0;
    const long long bits = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow == 0) [[likely]]
      return static_cast<uint64_t>(bits);
  }
  return other_bits_of(call, value);
}

namespace {

// The converted arguments of submit(), on the stack.
struct Arguments {
  pto_param params[PTO_MAX_PARAMS];
  uint64_t scalars[PTO_MAX_SCALARS];
  std::optional<More> more;
  uint32_t num_new = 0;
  uint32_t new_outputs[PTO_MAX_PARAMS];
};

bool is_list(nb::handle values) { return PyTuple_CheckExact(values.ptr()) || PyList_CheckExact(values.ptr()); }

/// Another collection as a tuple. Rejects iterators, because the values are needed twice.
nb::object list_of(nb::handle values, const char* name, const char* what) {
  const nb::object checked = checked_in_python("sequence")("submit", name, values, what);
  nb::object list = nb::steal(PySequence_Tuple(checked.ptr()));
  if (!list.is_valid()) throw nb::python_error();
  return list;
}

void read_params(const OpenRuntime& rt, nb::handle values, pto_task_spec& spec, Arguments& args) {
  static PyTypeObject* const param_type = reinterpret_cast<PyTypeObject*>(nb::type<Param>().ptr());
  const Items items(values.ptr());
  const Py_ssize_t count = items.size();
  spec.num_params = static_cast<uint32_t>(count);
  if (count > PTO_MAX_PARAMS) return;  // the runtime reports the error
  for (Py_ssize_t p = 0; p < count; ++p) {
    if (!PyObject_TypeCheck(items[p], param_type)) checked_in_python("parameter")("submit", nb::handle(items[p]));
    const Param& param = *nb::inst_ptr<Param>(nb::handle(items[p]));
    if (param.rt != nullptr && param.rt != &rt) {
      const std::string text =
          "[runtime.submit] a buffer must belong to the runtime of the task; got one of another "
          "runtime in parameter " +
          std::to_string(p) + "; register it here";
      raise_status(PTO_BAD_ARGUMENT, text.c_str());
    }
    args.params[p] = param.native;
    if (param.has_region) args.params[p].region = &param.region;
    if (param.native.handle == 0 && param.native.mode == PTO_OUTPUT)
      args.new_outputs[args.num_new++] = static_cast<uint32_t>(p);
  }
  spec.params = args.params;
}

void read_scalars(nb::handle values, pto_task_spec& spec, Arguments& args) {
  const Items items(values.ptr());
  const Py_ssize_t count = items.size();
  if (count == 0) return;
  spec.num_scalars = static_cast<uint32_t>(count);
  spec.scalars = args.scalars;
  for (Py_ssize_t s = 0; s < std::min<Py_ssize_t>(count, PTO_MAX_SCALARS); ++s) {
    args.scalars[s] = bits_of("submit", items[s]);
  }
}

/// The view of a parameter: type, bytes of an element, sizes, strides in bytes.
using View = std::tuple<int, uint64_t, std::vector<uint64_t>, std::vector<uint64_t>>;

// (after ids, [(event, value)], priority, target worker + 1, predicate handle, name, deadline in s, views)
using Extras = std::tuple<std::vector<uint64_t>, std::vector<std::pair<uint64_t, uint64_t>>, int32_t, int32_t, uint64_t,
                          std::string, double, std::vector<std::optional<View>>>;

void set_views(const std::vector<std::optional<View>>& descriptions, const pto_task_spec& spec, pto_param* params,
               std::vector<pto_view>& views) {
  views.resize(descriptions.size());
  for (size_t p = 0; p < std::min<size_t>(descriptions.size(), spec.num_params); ++p) {
    const std::optional<View>& description = descriptions[p];
    if (!description) continue;
    const auto& [type, item_bytes, sizes, strides] = *description;
    pto_view& view = views[p];
    view.ndim = static_cast<uint32_t>(sizes.size());  // the runtime rejects too many
    view.type = static_cast<pto_type>(type);
    view.item_bytes = item_bytes;
    std::copy_n(sizes.begin(), std::min<size_t>(sizes.size(), PTO_MAX_DIMS), view.size);
    std::copy_n(strides.begin(), std::min<size_t>(strides.size(), PTO_MAX_DIMS), view.stride);
    params[p].view = &view;
  }
}

}  // namespace

[[gnu::noinline]] void read_extras(nb::handle values, pto_task_spec& spec, More& more, pto_param* params) {
  auto [after, waits, priority, target_worker, predicate, name, deadline_s, views] = nb::cast<Extras>(values);
  more.after = std::move(after);
  for (const auto& [event, value] : waits) more.waits.push_back({event, value});
  spec.after = more.after.data();
  spec.num_after = static_cast<uint32_t>(more.after.size());
  spec.waits = more.waits.data();
  spec.num_waits = static_cast<uint32_t>(more.waits.size());
  spec.priority = priority;
  spec.target_worker = target_worker;
  spec.predicate = predicate;
  more.name = std::move(name);
  spec.name = more.name.empty() ? nullptr : more.name.c_str();
  // The smallest deadlines must not become 0, which means none.
  spec.deadline_s = deadline_s > 0 ? std::max(static_cast<float>(deadline_s), FLT_MIN) : 0.0F;
  if (spec.num_params <= PTO_MAX_PARAMS) set_views(views, spec, params, more.views);
}

pto_worker_type worker_type_of(const char* call, nb::handle worker_type) {
  const Py_ssize_t type = PyIndex_Check(worker_type.ptr()) ? PyNumber_AsSsize_t(worker_type.ptr(), nullptr) : -1;
  if (type < PTO_CUBE || type > PTO_ACCELERATOR) checked_in_python("worker_type")(call, worker_type);
  return static_cast<pto_worker_type>(type);
}

nb::object handle_of(OpenRuntimeRef self, pto_task task) {
  nb::object handle = nb::inst_alloc(self.p->task_type);
  Task* made = new (nb::inst_ptr<Task>(handle)) Task{};
  nb::inst_mark_ready(handle);
  made->rt = self.p;
  made->owner = nb::borrow(self.h);
  made->id = task;
  made->outputs = nb::none();
  return handle;
}

namespace {

/// The arguments of submit. record: the record of a Python kernel, referenced as soon as the task is submitted, because
/// a signal handler may raise right after. A native kernel has scalars instead.
struct Submission {
  pto_kernel kernel;
  nb::handle worker_type;
  nb::handle params;
  nb::handle scalars;
  nb::handle extras;
  nb::handle record;
};

[[gnu::always_inline]] inline nb::object submit_task(OpenRuntimeRef self, const Submission& arguments) {
  const auto& [kernel, worker_type, params, scalars, extras, record] = arguments;
  OpenRuntime& rt = *self.p;
  const Call call(rt);
  drop_finished_records();
  pto_task_spec spec;
  std::memset(&spec, 0, sizeof(spec));
  Arguments args;
  spec.kernel = kernel;
  spec.worker_type = worker_type_of("submit", worker_type);
  spec.flags = PTO_KEEP;
  read_params(rt, params, spec, args);
  if (record.is_valid()) {
    args.scalars[0] = reinterpret_cast<uintptr_t>(record.ptr());
    spec.scalars = args.scalars;
    spec.num_scalars = 1;
  } else {
    read_scalars(scalars, spec, args);
  }
  if (!extras.is_none()) [[unlikely]]
    read_extras(extras, spec, args.more.emplace(), args.params);
  const pto_task task = pto_submit(rt.runtime, &spec);
  if (task == 0) raise_status(pto_last_status());
  if (record.is_valid()) keep_until_done(rt, task, nb::borrow(record));
  raise_interrupt();  // it may have waited for room and run kernels meanwhile
  nb::object handle = handle_of(self, task);
  if (args.num_new > 0) {
    nb::list outputs;
    for (uint32_t n = 0; n < args.num_new; ++n) outputs.append(args.params[args.new_outputs[n]].handle);
    nb::inst_ptr<Task>(handle)->outputs = nb::tuple(outputs);
    handle.attr("_take_outputs")(params);
  }
  return handle;
}

}  // namespace

nb::object submit(OpenRuntimeRef self, pto_kernel kernel, nb::handle worker_type, nb::handle params, nb::handle scalars,
                  nb::handle extras) {
  if (!is_list(params) || !is_list(scalars)) [[unlikely]] {
    return submit(self, kernel, worker_type, list_of(params, "params", "parameters"),
                  list_of(scalars, "scalars", "numbers"), extras);
  }
  return submit_task(self, {kernel, worker_type, params, scalars, extras, nb::handle()});
}

nb::object submit_python(OpenRuntimeRef self, pto_kernel kernel, nb::handle worker_type, const nb::tuple& params,
                         nb::handle record, nb::handle extras) {
  return submit_task(self, {kernel, worker_type, params, nb::handle(), extras, record});
}

}  // namespace tilewise::bind

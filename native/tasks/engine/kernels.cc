// See kernels.h.
#include "tasks/engine/kernels.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstring>
#include <mutex>
#include <stdexcept>

#include "tasks/engine/builtin_kernels.h"
#include "tasks/store/status.h"
#include "tasks/store/text.h"

namespace tilewise::tasks {

Kernels::Kernels(const Store& store) : store_(store) { kernels_.reserve(kMaxKernels); }

void Kernels::expect_names() {
  while (kernels_.size() < kMaxKernels) kernels_.push_back(std::make_unique<Kernel>());
}

pto_kernel Kernels::add(const std::string& name, pto_kernel_fn function, uint32_t flags) {
  Header& header = *store_.header;
  const auto length = name.size();
  if (length == 0 || length >= sizeof(KernelName::name) || function == nullptr) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.kernel_add] a kernel must have an address and a name of 1 to ",
                sizeof(KernelName::name) - 1, " bytes; got '", name, "'; correct it");
  }
  if (!is_text(name)) {
    throw_error(PTO_BAD_ARGUMENT,
                "[runtime.kernel_add] a kernel's name must be UTF-8 without control characters; got other bytes; ",
                "correct it");
  }
  std::lock_guard guard(header.kernel_lock);
  const uint32_t id = header.num_kernels.load(std::memory_order_relaxed);
  if (id == kMaxKernels) {
    throw_error(PTO_NO_MEMORY, "[runtime.kernel_add] a runtime must have at most ", kMaxKernels,
                " kernels; got one more; reuse ids");
  }
  auto kernel = std::make_unique<Kernel>();
  kernel->name = name;
  kernel->function = function;
  kernels_.push_back(std::move(kernel));
  std::memcpy(store_.kernels[id].name, name.c_str(), length + 1);
  store_.kernels[id].flags = flags;
  header.num_kernels.store(id + 1, std::memory_order_release);
  return static_cast<pto_kernel>(id);
}

pto_kernel Kernels::find(const std::string& name, uint32_t flags) {
  Header& header = *store_.header;
  const uint32_t count = header.num_kernels.load(std::memory_order_acquire);
  for (uint32_t id = 0; id < count; ++id) {
    if (name != store_.kernels[id].name) continue;
    if (flags == 0 || flags == store_.kernels[id].flags) return static_cast<pto_kernel>(id);
    throw_error(PTO_BAD_ARGUMENT, "[runtime.kernel_find] a kernel must be used as it was added; got '", name,
                "' with flags ", flags, " after ", store_.kernels[id].flags, "; use the same flags");
  }
  for (void* library : libraries_) {
    if (void* symbol = dlsym(library, name.c_str())) {
      return add(name, reinterpret_cast<pto_kernel_fn>(symbol), flags);
    }
  }
  throw_error(PTO_BAD_ARGUMENT,
              "[runtime.kernel_find] a kernel must be built in, added, or a symbol of a loaded library; got '", name,
              "'; load its library first");
}

void Kernels::load(const std::string& path) { libraries_.push_back(open_library(path, "library_load")); }

const char* Kernels::name_of(pto_kernel kernel) const {
  const bool is_valid = kernel >= 0 && kernel < static_cast<int32_t>(store_.header->num_kernels.load());
  return is_valid ? store_.kernels[kernel].name : "";
}

// The workers' process looks up each kernel by its name, once.
pto_kernel_fn Kernels::function_of(int32_t id) {
  const std::string name = store_.kernels[id].name;
  pto_kernel_fn function = nullptr;
  for (const BuiltinKernel& kernel : builtin_kernels()) {
    if (name == kernel.name) function = kernel.function;
  }
  for (void* library : libraries_) {
    if (function == nullptr) function = reinterpret_cast<pto_kernel_fn>(dlsym(library, name.c_str()));
  }
  if (function == nullptr) {
    throw std::runtime_error("kernel '" + name + "' is in no library that the workers' process loaded");
  }
  std::atomic_ref(kernels_[id]->function).store(function, std::memory_order_release);
  return function;
}

void* open_library(const std::string& path, const char* where) {
  const bool is_name = path.find('/') == std::string::npos;
  const bool is_local = is_name && access(path.c_str(), F_OK) == 0;
  void* library = dlopen(is_local ? ("./" + path).c_str() : path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    throw_error(PTO_BAD_ARGUMENT, "[runtime.", where, "] a library must load; got '", dlerror(), "'",
                is_name && !is_local ? ", and no file of that name in the current folder" : "",
                "; check path and symbols");
  }
  return library;
}

}  // namespace tilewise::tasks

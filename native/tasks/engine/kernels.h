// The kernels of a runtime: their names in the store, their addresses in this process.
//
// Who may call: any thread. Blocks: add and find for kernel_lock. Memory: names in the store, so that a second process
// finds them; addresses here, in a list that never moves: readers index it without a lock.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tasks/store/layout.h"

namespace tilewise::tasks {

class Kernels {
 public:
  explicit Kernels(const Store& store);

  pto_kernel add(const std::string& name, pto_kernel_fn function, uint32_t flags);
  pto_kernel find(const std::string& name, uint32_t flags);
  void load(const std::string& path);
  const char* name_of(pto_kernel kernel) const;
  /// In the workers' process: every kernel is looked up when it is first called.
  void expect_names();

  /// nullptr: an empty task, or not looked up yet.
  pto_kernel_fn function_at(int32_t kernel) const {
    return kernel < 0 ? nullptr : std::atomic_ref(kernels_[kernel]->function).load(std::memory_order_acquire);
  }
  /// Looks the kernel up by its name.
  pto_kernel_fn function_of(int32_t kernel);

 private:
  struct Kernel {
    std::string name;
    pto_kernel_fn function = nullptr;  // nullptr: not looked up yet in this process
  };

  const Store& store_;
  std::vector<std::unique_ptr<Kernel>> kernels_;  // by id; grows under kernel_lock, capacity reserved
  std::vector<void*> libraries_;
};

/// dlopen, except that a name without a slash may be a file of the current folder.
void* open_library(const std::string& path, const char* where);

}  // namespace tilewise::tasks

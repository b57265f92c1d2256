// The items of a Python tuple or list as an array of borrowed references.
//
// Read in place, because submit() runs once per task. Python's stable ABI does not say where the items are, so a build
// for it copies the references.
#pragma once
#include <nanobind/nanobind.h>

#include <vector>

namespace tilewise::bind {

class Items {
 public:
  /// The items of `sequence`, a tuple or a list.
  explicit Items(PyObject* sequence) {
#if defined(Py_LIMITED_API)
    const bool is_tuple = PyTuple_Check(sequence);
    size_ = is_tuple ? PyTuple_Size(sequence) : PyList_Size(sequence);
    PyObject** to = few_;
    if (size_ > kFew) {
      many_.resize(static_cast<size_t>(size_));
      to = many_.data();
    }
    for (Py_ssize_t i = 0; i < size_; ++i)
      to[i] = is_tuple ? PyTuple_GetItem(sequence, i) : PyList_GetItem(sequence, i);
    data_ = to;
#else
    data_ = PySequence_Fast_ITEMS(sequence);
    size_ = PySequence_Fast_GET_SIZE(sequence);
#endif
  }
  /// The entries of an index: both of `x[a, b]`; for `x[a]` only `*key`.
  static Items of_key(PyObject* const* key) { return PyTuple_Check(*key) ? Items(*key) : Items(key, 1); }

  Items(const Items&) = delete;
  Items& operator=(const Items&) = delete;

  PyObject* operator[](Py_ssize_t i) const { return data_[i]; }
  Py_ssize_t size() const { return size_; }
  PyObject* const* begin() const { return data_; }
  PyObject* const* end() const { return data_ + size_; }

 private:
  Items(PyObject* const* data, Py_ssize_t size) : data_(data), size_(size) {}

  PyObject* const* data_;
  Py_ssize_t size_;
#if defined(Py_LIMITED_API)
  static constexpr Py_ssize_t kFew = 16;
  PyObject* few_[kFew];
  std::vector<PyObject*> many_;
#endif
};

}  // namespace tilewise::bind

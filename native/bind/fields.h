// Reads structs by the names of their members, instead of long lists of positional arguments.
//
// `read` reads an attribute of a Python object (a dataclass of the planner), `Keywords` the keyword arguments of a
// call. Both reject a value that the member's type cannot hold, with the member's name; Keywords also rejects unknown
// names. The native package checks everything else. Called with the GIL. Names are converted to Python strings once, so
// reading an attribute costs no more than in Python.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

namespace tilewise::bind {

/// A member's name as a template argument.
template <size_t kSize>
struct FieldName {
  char text[kSize]{};
  consteval FieldName(const char (&literal)[kSize]) {
    std::copy_n(literal, kSize, text);
  }  // NOLINT(google-explicit-constructor): converts literals
};

template <FieldName kName>
nanobind::handle interned() {
  static PyObject* const name = PyUnicode_InternFromString(kName.text);
  return name;
}

/// `value` as a T; throws a TypeError that names the member if it cannot be converted.
template <class T>
T field_value(const char* name, nanobind::handle value) {
  T converted{};
  if (!nanobind::try_cast(value, converted)) {
    const std::string got = nanobind::type_name(value.type()).c_str();
    throw nanobind::type_error(
        (std::string(name) + " has a value of another type or out of its range; got " + got).c_str());
  }
  return converted;
}

/// The attribute of that name of a Python object.
template <FieldName kName, class T>
T read(nanobind::handle object) {
  return field_value<T>(kName.text, nanobind::getattr(object, interned<kName>()));
}

/// Keyword arguments of one call; missing ones keep the struct's defaults.
class Keywords {
 public:
  explicit Keywords(const nanobind::kwargs& arguments) : arguments_(arguments) {}

  template <FieldName kName, class T>
  Keywords& set(T& member) {
    if (PyObject* value = PyDict_GetItemWithError(arguments_.ptr(), interned<kName>().ptr())) {
      member = field_value<T>(kName.text, value);
      ++num_read_;
    }
    names_ += std::string(names_.empty() ? "" : ", ") + kName.text;
    return *this;
  }

  /// Rejects names that no set() has read.
  void done() const {
    if (num_read_ == arguments_.size()) return;
    throw nanobind::type_error(("a keyword argument is unknown; expected one of " + names_).c_str());
  }

 private:
  const nanobind::kwargs& arguments_;
  size_t num_read_ = 0;
  std::string names_;
};

}  // namespace tilewise::bind

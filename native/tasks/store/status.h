// Errors of the task runtime: a status of pto_api.h and a message.
//
// Purpose: thrown inside, converted to a status by the C interface (api/pto_api.cc). Who may call: any thread. Blocks:
// never.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

#include "tilewise/pto_api.h"

namespace tilewise::tasks {

struct StatusError : std::runtime_error {
  StatusError(int code, const std::string& text) : std::runtime_error(text), status(code) {}
  int status;
};

template <class... Parts>
[[noreturn, gnu::cold, gnu::noinline]] void throw_error(int status, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw StatusError(status, text.str());
}

}  // namespace tilewise::tasks

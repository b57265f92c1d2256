// The trace of an execution: its steps in order, and their text in reports.
#pragma once
#include <string>

#include "checker/model.h"

namespace tilewise::checker {

/// A step of the execution.
struct Event {
  int thread;
  uint32_t number;  // within its thread
  Clock clock;      // earlier events that it depends on
  Op op;
  Choice choice;
};

std::string text_of(const Op& op, const std::string& location_name);

}  // namespace tilewise::checker

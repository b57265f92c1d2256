// What an execution was: its steps in order, and how a report words them.
#pragma once
#include <string>

#include "checker/model.h"

namespace tilewise::checker {

/// A step that was taken.
struct Event {
  int thread;
  uint32_t number;  // among its thread's
  Clock clock;      // dependent events before it
  Op op;
  Choice choice;
};

std::string text_of(const Op& op, const std::string& location_name);

}  // namespace tilewise::checker

// See trace.h.
#include "checker/trace.h"

#include <sstream>

namespace tilewise::checker {

namespace {

const char* text_of(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return " (relaxed)";
    case std::memory_order_acquire:
      return " (acquire)";
    case std::memory_order_release:
      return " (release)";
    case std::memory_order_acq_rel:
      return " (acq_rel)";
    default:
      return " (seq_cst)";
  }
}

}  // namespace

std::string text_of(const Op& op, const std::string& location_name) {
  std::ostringstream text;
  const std::string place = location_name + text_of(op.order);
  switch (op.kind) {
    case Kind::kLoad:
      text << "load " << place << " reads " << op.value;
      break;
    case Kind::kStore:
      text << "store " << place << " writes " << op.operand;
      break;
    case Kind::kChange:
      text << "change " << place << " from " << op.value << " to " << op.change(op.value, op.operand);
      break;
    case Kind::kCompare:
      text << "compare " << place << " reads " << op.value << ", expects " << op.expected
           << (op.has_succeeded ? ", writes " + std::to_string(op.operand) : ", fails");
      break;
    case Kind::kFence:
      text << "seq_cst fence";
      break;
    case Kind::kHeavy:
      text << "heavy barrier";
      break;
    case Kind::kLight:
      text << "light barrier";
      break;
    case Kind::kSleep:
      text << "sleep on " << location_name << " while " << op.expected
           << (op.has_succeeded ? ": sleeps" : ": does not");
      break;
    case Kind::kWake:
      text << "wake " << location_name;
      break;
  }
  return text.str();
}

}  // namespace tilewise::checker

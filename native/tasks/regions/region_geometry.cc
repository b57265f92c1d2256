// Compares two boxes that have no common coordinates in their tree; the rest of region_geometry.h is inline.
//
// A pure function. It returns kPartial if no system of strides contains both boxes, because it is then unknown whether
// they share a byte.
#include "tasks/regions/region_geometry.h"

namespace tilewise::tasks {

bool compare_slowly(const NormalBox& query, const NormalBox& node, Overlap& overlap) {
  const StrideSystem system = system_of(query.ndim >= node.ndim ? query : node);
  Cells a, b;
  if (query == node) {
    overlap = Overlap::kEqual;
  } else if (query.ndim == 1 && query.offset <= node.offset && node.end() <= query.end()) {
    overlap = Overlap::kCovered;
  } else if (node.ndim == 1 && node.offset <= query.offset && query.end() <= node.end()) {
    overlap = Overlap::kInside;
  } else if (place(system, query, a) && place(system, node, b)) {
    if (!a.meets(b)) return false;
    overlap = a.contains(b) ? Overlap::kCovered : b.contains(a) ? Overlap::kInside : Overlap::kPartial;
  } else {
    overlap = Overlap::kPartial;
  }
  return true;
}

}  // namespace tilewise::tasks

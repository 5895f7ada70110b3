#include "worker/geeps/table_use.h"

#include <algorithm>

namespace phub::geeps {

void TableUse::end_reading(Table& table) {
  if (--table.moving > 0) return;
  if (table.spec.local) return lanes_.make_due(Lane::Kind::kStore);
  lanes_.pull().due = true;
  lanes_.make_due(Lane::Kind::kPush);
}

void TableUse::end_replacing(Table& table) {
  ++table.changes;
  table.replacing = false;
  lanes_.make_due(Lane::Kind::kFetch);
}

bool TableUse::fills_replaced() const {
  return std::ranges::any_of(
      tables_, [](const Table& table) { return table.replacing && table.moving > 0; });
}

}  // namespace phub::geeps

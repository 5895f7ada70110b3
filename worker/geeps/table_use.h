// Who reads the rows of a mover's tables in host memory, and who replaces them.
#pragma once

#include <vector>

#include "worker/geeps/lanes.h"
#include "worker/geeps/tasks.h"

namespace phub::geeps {

// REQUIRES: the caller holds the cache's lock.
class TableUse {
 public:
  // All of these outlive this.
  TableUse(const std::vector<Table>& tables, Lanes& lanes) : tables_(tables), lanes_(lanes) {}

  // Between these calls the table's rows are not replaced, and its pieces are not pushed.
  void begin_reading(Table& table) { ++table.moving; }
  void end_reading(Table& table);
  // Between these calls a local table's rows are replaced, and no task begins to read them.
  void begin_replacing(Table& table) { table.replacing = true; }
  void end_replacing(Table& table);  // buffers that were filled before are filled again
  bool fills_replaced() const;       // a task reads the rows of such a table

 private:
  const std::vector<Table>& tables_;
  Lanes& lanes_;
};

}  // namespace phub::geeps

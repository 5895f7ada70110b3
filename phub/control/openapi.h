// The control port as a document of OpenAPI 3.1: its routes, and its messages as JSON Schema. Both
// are made from the tables that the code itself uses. A rule that a table cannot say (the
// optimizers that there are, that two fields fit together) is in transport/control/joining.md only:
// the server refuses everything that the schemas refuse, and more.
#pragma once

#include <string_view>

namespace phub {

// JSON text, the same each time.
std::string_view openapi_json();

}  // namespace phub

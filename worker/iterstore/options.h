// The options of a store, checked.
#pragma once

#include "worker/iterstore/store.h"

namespace phub::iterstore {

// Throws Error(kInvalid) that names the store and the option. Tables are not looked at
// (checked_tables()).
void check_options(const StoreOptions& options);

}  // namespace phub::iterstore

// The routes of the control port: what the request of each path means to the handler. Control
// thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "phub/control/router.h"

namespace phub {

struct Call;

struct Route {
  RouteInfo info;
  void (*handle)(Call&);
  // Whether bytes are wanted, before they are read: throws Error. Null: the body is a message.
  void (*want)(const Credential& who, const std::vector<uint64_t>& numbers, uint64_t bytes,
               ControlHandler& handler) = nullptr;
};
std::span<const Route> routes();

// `target` without its query, which no route has.
inline std::string_view path_of(std::string_view target) {
  return target.substr(0, target.find('?'));
}

}  // namespace phub

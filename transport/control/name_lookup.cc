#include "transport/control/name_lookup.h"

#include <netdb.h>

#include <cstring>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "transport/error.h"

namespace phub {
namespace {

FoundAddresses look_up_now(const std::string& host, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  FoundAddresses found;
  found.error = getaddrinfo(host.c_str(), nullptr, &hints, &list);
  if (found.error != 0) return found;
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(list, freeaddrinfo);
  for (const addrinfo* a = list; a != nullptr; a = a->ai_next) {
    if (a->ai_family != AF_INET && a->ai_family != AF_INET6) continue;
    if (a->ai_addrlen > sizeof(sockaddr_storage)) continue;
    std::memcpy(&found.addresses.emplace_back(), a->ai_addr, a->ai_addrlen);
  }
  return found;
}

}  // namespace

std::future<FoundAddresses> look_up(const std::string& host) {
  std::promise<FoundAddresses> promise;
  auto future = promise.get_future();
  FoundAddresses number = look_up_now(host, AI_NUMERICHOST);
  if (number.error == 0) {
    promise.set_value(std::move(number));
    return future;
  }
  try {
    std::thread([promise = std::move(promise), host]() mutable {
      try {
        promise.set_value(look_up_now(host, 0));
      } catch (...) {
        promise.set_exception(std::current_exception());
      }
    }).detach();
  } catch (const std::system_error& error) {
    fail(ErrorCode::kFull,
         "starting a thread to look up {}: {}; raise ulimit -u or the cgroup's pids.max", host,
         error.what());
  }
  return future;
}

}  // namespace phub

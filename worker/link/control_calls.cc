#include "worker/link/control_calls.h"

namespace phub {

ControlCalls::Running::Running(ControlCalls& calls) : all(calls) {
  Clients mine;
  {
    const std::lock_guard lock(all.mutex_);
    mine.splice(mine.end(), all.idle_);
  }
  if (mine.empty()) mine.emplace_back(all.server_, all.token_, all.tls_);
  client = mine.begin();
  const std::lock_guard lock(all.mutex_);
  if (all.cancelled_) client->cancel();
  all.running_.splice(all.running_.end(), mine);
}

ControlCalls::Running::~Running() {
  Clients mine;
  const std::lock_guard lock(all.mutex_);
  Clients& to = all.idle_.empty() ? all.idle_ : mine;
  to.splice(to.end(), all.running_, client);
}

void ControlCalls::cancel() {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  for (Clients* clients : {&running_, &idle_}) {
    for (ControlClient& client : *clients) client.cancel();
  }
}

}  // namespace phub

#include "phub/uplinks.h"

#include <optional>
#include <utility>

#include "phub/job/standby.h"
#include "transport/control/rules.h"
#include "transport/error.h"
#include "transport/greeting.h"

namespace phub {

Task<std::shared_ptr<Uplink>> Uplinks::join(std::shared_ptr<JoinRequest> join) {
  JoinRequest above;
  const auto order = [&] {
    complete_spec(join->spec);
    above = {.transport = parent_->transport(), .id = make_ticket()};
    if (is_standby_) {
      check_rules(join->spec, Feature::kHasStandby);
      above.spec = spec_at_standby(join->spec);
      above.rank = 0;
      above.owner = join->caller.id;
      return;
    }
    check_rules(join->spec, Feature::kBelowParent);
    above.spec = spec_above(join->spec);
    above.rank = rank_above(join->spec, join->rank);
    above.epoch = join->epoch;
    above.saves = join->saves;
  };
  if (const auto refused = co_await beside(host_.coder, order)) throw Error(*refused);
  const auto uplink = std::make_shared<Uplink>(*parent_, host_.time, std::move(above));
  uplinks_.push_back(uplink);
  const auto ask = [&](Reply<Done> reply) { uplink->join(std::move(reply)); };
  co_await answer_to<Done>(ask);
  co_return uplink;
}

void Uplinks::poll() {
  parent_->poll();
  std::erase_if(uplinks_, [](const std::weak_ptr<Uplink>& uplink) { return uplink.expired(); });
  for (const std::weak_ptr<Uplink>& uplink : std::vector(uplinks_)) {
    if (const std::shared_ptr<Uplink> alive = uplink.lock()) alive->tick();
  }
}

void Uplinks::drop() {
  for (const std::weak_ptr<Uplink>& uplink : uplinks_) {
    if (const std::shared_ptr<Uplink> alive = uplink.lock()) alive->drop();
  }
}

}  // namespace phub

// Two boxes with one job: the *source*, which the ranks are at, and its *standby*. The source sends
// the standby the gradient of every chunk and round, as it makes its step with (core/mirrored.h);
// the standby makes the same steps, so it has the same bits. When the source dies, the ranks join
// the standby, and go on after the last round that was complete anywhere.
//
// At the standby the source is the only rank of a job of its own, a rack with all of the training's
// ranks, whose rounds are applied as a whole. When it loses the source, it saves what it has, and
// ends; a job of the training's ranks goes on from that checkpoint.
//
// Only one of the two goes on. A rank counts for one of them, in one of its lives:
//
//   for the standby   when it is no member of the source any more, and joins the standby. More than
//                     half of the source's members have to do so.
//   for the source    when it has lost the standby, and the rank has said that it will never join
//                     that. More than half of its members have to do so; until then no rank gets a
//                     result that the standby may not have.
//
// Which ranks are members, and in which of their incarnations, the standby knows from the source.
// While a change is on its way, the source needs more than half of the members before it and of
// those after it. No clock matters.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "phub/checkpoint/manifest.h"
#include "transport/control/job_spec.h"
#include "transport/control/messages.h"
#include "transport/layout.h"
#include "transport/transport.h"

namespace phub {

// The data from which the source makes its job, once the standby has admitted it.
struct Standby {
  Layout layout;         // the layout of its job at the standby,
  ResultFormat results;  // and the format of the results, which it does not send
  // The connection, over the sizes and threads of this layout. Builder's thread.
  std::function<std::unique_ptr<WorkerLink>(const LinkLayout& layout)> connect;
};

// Whether the job has a standby, where its server has one: there is state to keep, and it may be
// saved.
bool wants_standby(const JobSpec& spec);
// The spec of the source's job at the standby. REQUIRES: check_rules(spec, Feature::kHasStandby).
JobSpec spec_at_standby(const JobSpec& spec);

// More than half of the members are among those of whom `counts` is true.
bool is_majority(const RackNews& members,
                 const std::function<bool(uint32_t rank, uint32_t incarnation)>& counts);

// Puts the source's members into the checkpoint with which the standby ends.
void save_members(const RackNews& members, Manifest& saved);

}  // namespace phub

// A switch that adds, between a server and the workers of one of its jobs: the jobs that may use
// it, the offer to their workers, and the intakes of their cores.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "phub/core/switch_intake.h"
#include "phub/plan/plan.h"
#include "transport/control/messages.h"

namespace phub {

struct SwitchOptions {
  // The address at which this box hears the sums: an IPv4 address of its NIC behind the switch, and
  // the UDP port of its first core, "10.0.0.1:7718"; further cores have the ports after it.
  std::string address;
  uint32_t slots = 512;                // the switch's
  uint32_t worker_port = kSwitchPort;  // workers hear the answers there; 0: any
  // Other addresses, if something stands between: workers send to the first, and answers to all go
  // to the second instead of the broadcast address of that NIC; ports count up as above. Empty:
  // nothing stands between.
  std::string workers_send_to;
  std::string answers_go_to;
  // The least rounds between two generations of a stream (SwitchIntake); 0: there is no second one.
  uint32_t rounds_between = 100;
  OpenDatagrams open;  // null: UDP
};

// Whether some key of the job would go through a switch: in format int32.
bool may_switch(const JobSpec& spec);
// Throws Error(kInvalid), with the reason and the way out, if the job cannot use a switch.
void check_switched(const JobSpec& spec, std::string_view transport, uint32_t boxes);

// The offer for the job's chunks in int32: a stream for each core that has some, with an equal part
// of the slots. Throws Error(kInvalid) if there are more such cores than slots, or a chunk is too
// large.
SwitchOffer make_switch_offer(const Plan& plan, const JobSpec& spec, const SwitchOptions& options,
                              uint64_t generation);

// Makes a core's intake; null if the core has none of the streams. `first_round` is 0 if the job is
// new. Throws Error: kUnavailable, the core's port is in use; kNotFound, no interface here has the
// address.
std::unique_ptr<SwitchIntake> make_switch_intake(const Plan& plan, uint32_t core,
                                                 const SwitchOffer& offer,
                                                 const SwitchOptions& options,
                                                 uint64_t first_round);

// The switch of one job.
struct SwitchedJob {
  SwitchOptions options;
  SwitchOffer offer;
};

// The bytes that the intakes of all cores hold.
uint64_t switch_bytes(const Plan& plan, const SwitchOffer& offer);

}  // namespace phub

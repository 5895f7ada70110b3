// A switch that adds, between a server and the workers of one of its jobs: which jobs may use it,
// what their workers are told, and what their cores take.
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
  // Where this box hears the sums: an IPv4 address of its NIC behind the switch, and the UDP port
  // of its first core, "10.0.0.1:7718"; further cores have the ports after it.
  std::string address;
  uint32_t slots = 512;                // of the switch
  uint32_t worker_port = kSwitchPort;  // at which workers hear the answers; 0: any
  // Where workers send instead, and where answers to all go instead of to the broadcast address of
  // that NIC, if something stands between: ports count up as above. Empty: nothing does.
  std::string workers_send_to;
  std::string answers_go_to;
  // Two generations of a stream, at least (SwitchIntake); 0: there is no second one.
  uint32_t rounds_between = 100;
  OpenDatagrams open;  // null: UDP
};

// Whether some key of the job would go through a switch: in format int32.
bool may_switch(const JobSpec& spec);
// Throws Error(kInvalid), with the reason and the way out, if the job cannot.
void check_switched(const JobSpec& spec, std::string_view transport, uint32_t boxes);

// The job's chunks in int32: a stream for each core that has some, with an equal part of the slots.
// Throws Error(kInvalid): there are more such cores than slots, or a chunk is too large.
SwitchOffer make_switch_offer(const Plan& plan, const JobSpec& spec, const SwitchOptions& options,
                              uint64_t generation);

// What a core takes; null: none of the streams is its own. `first_round`: 0: the job begins. Throws
// Error: kUnavailable, its port is in use; kNotFound, the address is no interface's here.
std::unique_ptr<SwitchIntake> make_switch_intake(const Plan& plan, uint32_t core,
                                                 const SwitchOffer& offer,
                                                 const SwitchOptions& options,
                                                 uint64_t first_round);

// Of one job.
struct SwitchedJob {
  SwitchOptions options;
  SwitchOffer offer;
};

// What all of them hold.
uint64_t switch_bytes(const Plan& plan, const SwitchOffer& offer);

}  // namespace phub

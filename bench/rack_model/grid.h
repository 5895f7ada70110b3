// SimGrid (Casanova et al., JPDC 2014) as the model uses it: links that flows share, and CPUs that
// work shares, both max-min fairly, in virtual time. Events call back: there are no actors.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace phub::rack_model {

using LinkId = uint32_t;
using PortId = uint32_t;
using CpuId = uint32_t;

struct LinkUse {
  std::string name;
  double bytes_per_s = 0;
  double bytes = 0;  // bytes that crossed it
};

// One per process, as SimGrid allows no more; used by one thread. Everything is added before run().
class Grid {
 public:
  using Then = std::function<void()>;

  Grid();
  ~Grid();

  LinkId add_link(std::string name, double bytes_per_s);
  // Makes a place where flows begin and end: one from port A to port B crosses A's `out` and B's
  // `in`. A link that is in both is crossed once.
  PortId add_port(const std::vector<LinkId>& out, const std::vector<LinkId>& in);
  // One piece of work uses one core at most.
  CpuId add_cpu(uint32_t cores);

  // Calls `then` when so many bytes have crossed all links between the ports; without links soon().
  void flow(PortId from, PortId to, double bytes, Then then);
  void work(CpuId cpu, double seconds, Then then);
  void soon(Then then);  // at this time, after the present callback

  double now() const;
  // Runs until nothing is going on.
  void run();

  uint64_t flows() const { return flows_; }
  const std::vector<LinkUse>& links() const { return links_; }

 private:
  struct Engine;
  void drain();

  std::unique_ptr<Engine> engine_;
  std::vector<LinkUse> links_;
  uint64_t flows_ = 0;
};

}  // namespace phub::rack_model

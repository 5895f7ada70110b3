// Neural nets as a parameter cache sees them: tables, and the calls and computations of an
// iteration. Nothing is computed: a layer takes the time of its arithmetic, or of its memory
// traffic, on a stated device.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "worker/device/device.h"
#include "worker/geeps/cache.h"
#include "worker/geeps/placement.h"

namespace phub::geeps_bench {

// The stated device: about a GPU of 2016 in a PCIe 3.0 x16 slot.
struct Machine {
  double flops_per_second = 10e12;
  double memory_bytes_per_second = 480e9;
  double copy_bytes_per_second = 12e9;  // per direction
  std::chrono::nanoseconds copy_latency{10'000};
  // The network link of each worker, per direction: the rate that GeePS's machines reached of 40
  // Gbit/s.
  double link_bytes_per_second = 12e9 / 8;
  // A GPU whose memory, streams and copies are used, which are as fast as they are; negative: host
  // memory. Computations take the stated time on either.
  int cuda = -1;
};
// With the GPUs of GeePS's machines, by their data sheet: Tesla K20C, PCIe 2.0.
Machine geeps_machine();

// The same machine, slower by `factor` in everything. Ratios of times stay the same, and this
// machine's processors have more time for their work.
Machine slower(const Machine& machine, double factor);
// A device for a part of a net (part_of()): its copies are such parts, and so is their latency.
std::unique_ptr<Device> make_device(const Machine& machine, uint64_t budget_bytes,
                                    double parts = 1);

struct Layer {
  std::string name;
  double weights = 0;      // floats
  double outputs = 0;      // floats per image
  double connections = 0;  // multiplications per image; 0: of a layer that only moves data
};

struct Net {
  std::string name;
  double inputs = 0;  // floats per image
  std::vector<Layer> layers;
  double images = 0;  // per iteration
  double parts = 1;   // this is such a part of the net that the figure is about

  double weights() const;
};

// GeePS's AdamLike by its figures, with AlexNet's geometry (conv, pool, norm; 1.5 times the
// channels; 22k classes): 2.4 billion connections, 470 MB of parameters, 123 MB of inputs at 200
// images.
Net adam_like();
// GeePS's very large one: fully connected layers of 373 MB each.
Net very_large(uint32_t layers);
// AlexNet, to measure the memory that is free if gradients are summed elsewhere.
Net alexnet();
// A part of the net: of the images and the weights, and of the size of the pieces of tables. Layers
// take a part of the time.
Net part_of(Net net, double parts);

// The treatment of gradients and tables in an iteration.
struct Style {
  bool one_table = false;  // all parameters, clocked together at the end
  bool whole = false;      // tables of parameters are exchanged and copied whole
  // Weights and gradients stay on the device, where an optimizer uses them at the end of the
  // iteration: they are local data, without a log of updates and without an exchange.
  bool keep_gradients = false;
  // Mini-batches of an iteration, of the net's images each; tables are clocked in the last one.
  // More than one REQUIRES that the gradients are not kept.
  uint32_t batches = 1;
};

class HostParameters;

// The tables of a net, and its iteration.
class Training {
 public:
  Training(const Net& net, const Machine& machine, const Style& style = {});

  const std::vector<geeps::TableSpec>& tables() const { return tables_; }
  std::chrono::nanoseconds compute_time() const;  // that of an iteration
  double weights() const { return weights_; }
  double parts() const { return parts_; }  // the net is such a part

  // Enqueues the computations on `compute`. In a virtual iteration that is null. `gradient` is
  // written to both ends of each layer's update; 0: updates are never written. REQUIRES of another
  // one: gradients that are not kept.
  void iterate(geeps::Cache& cache, Stream* compute, float gradient = 0) const;
  // The floats of each layer with weights, in the order of the layers: so they lie in the tables of
  // parameters, one behind the other.
  std::vector<uint64_t> weight_floats() const;
  // Runs the iteration without a cache. REQUIRES: a table per layer, and gradients that are not
  // kept.
  void iterate(HostParameters& parameters, Stream& compute) const;
  geeps::Demand demand() const;  // the demand of iterate() on device memory

  // All tables, their updates, and the double-buffered pool of accesses: GeePS's "everything in
  // device memory".
  uint64_t everything_bytes() const;
  // The least memory with which place() moves nothing.
  uint64_t least_unmoved_bytes() const;
  // Whether with so much memory only weights and their gradients are moved.
  bool keeps_local_data(uint64_t budget_bytes) const;

 private:
  using Keys = std::vector<uint64_t>;
  struct Rows {
    uint32_t table = 0;
    Keys keys;
  };
  struct Step {
    bool has_weights;
    Rows weights, output, error, gradient;
    std::chrono::nanoseconds forward, backward;
  };

  template <class Calls>
  void run(Calls& calls) const;
  template <class Calls>
  void forward(Calls& calls, uint64_t& output) const;
  template <class Calls>
  void backward(Calls& calls, uint64_t output, bool last) const;
  template <class Calls>
  uint64_t read_weights(Calls& calls, const Step& step) const;
  template <class Calls>
  void post_read_weights(Calls& calls, const Step& step, uint64_t weights) const;
  Rows add_table(const std::string& name, double floats, bool local);
  Rows add_weights(const std::string& name, double floats);

  Style style_;
  double parts_;
  uint64_t piece_bytes_;
  std::vector<geeps::TableSpec> tables_;
  Rows input_;
  std::vector<Step> steps_;
  double weights_ = 0;
};

}  // namespace phub::geeps_bench

#include "bench/geeps_net.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "bench/geeps_host.h"
#include "transport/error.h"
#include "worker/device/cuda_device.h"
#include "worker/device/host_device.h"
#include "worker/geeps/moves.h"
#include "worker/geeps/sequence.h"

namespace phub::geeps_bench {
namespace {

using std::chrono::nanoseconds;

constexpr uint32_t kRowFloats = 1024;
constexpr uint64_t kRowBytes = kRowFloats * sizeof(float);
constexpr uint64_t kPlenty = uint64_t{1} << 50;  // of device memory

nanoseconds scaled(nanoseconds time, double factor) {
  return nanoseconds(std::llround(static_cast<double>(time.count()) * factor));
}

// A convolution: channels in and out, their pixels out, the kernel's pixels.
Layer convolution(std::string name, double in, double out, double pixels, double kernel) {
  return {std::move(name), in * out * kernel, out * pixels, in * out * kernel * pixels};
}
Layer connected(std::string name, double in, double out) {
  return {std::move(name), in * out, out, in * out};
}
Layer data_only(std::string name, double outputs) { return {std::move(name), 0, outputs, 0}; }

}  // namespace

Machine slower(const Machine& machine, double factor) {
  return {.flops_per_second = machine.flops_per_second / factor,
          .memory_bytes_per_second = machine.memory_bytes_per_second / factor,
          .copy_bytes_per_second = machine.copy_bytes_per_second / factor,
          .copy_latency = scaled(machine.copy_latency, factor),
          .link_bytes_per_second = machine.link_bytes_per_second / factor,
          .cuda = machine.cuda};
}

Machine geeps_machine() {
  return {
      .flops_per_second = 3.52e12, .memory_bytes_per_second = 208e9, .copy_bytes_per_second = 6e9};
}

std::unique_ptr<Device> make_device(const Machine& machine, uint64_t budget_bytes, double parts) {
  if (machine.cuda >= 0) {
    return make_cuda_device({.ordinal = machine.cuda, .budget_bytes = budget_bytes});
  }
  return make_host_device({.budget_bytes = budget_bytes,
                           .copy_bytes_per_second = machine.copy_bytes_per_second,
                           .copy_latency = scaled(machine.copy_latency, 1 / parts)});
}

double Net::weights() const {
  return std::accumulate(layers.begin(), layers.end(), 0.0,
                         [](double sum, const Layer& layer) { return sum + layer.weights; });
}

Net adam_like() {
  return {
      .name = "AdamLike",
      .inputs = 227 * 227 * 3,
      .layers = {convolution("conv1", 3, 144, 55 * 55, 11 * 11), data_only("pool1", 144 * 27 * 27),
                 data_only("norm1", 144 * 27 * 27), convolution("conv2", 144, 384, 27 * 27, 5 * 5),
                 data_only("pool2", 384 * 13 * 13), data_only("norm2", 384 * 13 * 13),
                 convolution("conv3", 384, 576, 13 * 13, 3 * 3),
                 convolution("conv4", 576, 576, 13 * 13, 3 * 3),
                 convolution("conv5", 576, 384, 13 * 13, 3 * 3), data_only("pool5", 384 * 6 * 6),
                 connected("fc6", 384 * 6 * 6, 2830), connected("fc7", 2830, 2830),
                 connected("fc8", 2830, 21841)},
      .images = 200};
}

Net alexnet() {
  // Groups of two in conv2, conv4 and conv5: half of the inputs.
  return {
      .name = "AlexNet",
      .inputs = 227 * 227 * 3,
      .layers = {convolution("conv1", 3, 96, 55 * 55, 11 * 11), data_only("pool1", 96 * 27 * 27),
                 data_only("norm1", 96 * 27 * 27), convolution("conv2", 48, 256, 27 * 27, 5 * 5),
                 data_only("pool2", 256 * 13 * 13), data_only("norm2", 256 * 13 * 13),
                 convolution("conv3", 256, 384, 13 * 13, 3 * 3),
                 convolution("conv4", 192, 384, 13 * 13, 3 * 3),
                 convolution("conv5", 192, 256, 13 * 13, 3 * 3), data_only("pool5", 256 * 6 * 6),
                 connected("fc6", 256 * 6 * 6, 4096), connected("fc7", 4096, 4096),
                 connected("fc8", 4096, 1000)},
      .images = 256};
}

Net very_large(uint32_t layers) {
  constexpr double kWidth = 9660;
  Net net{.name = "very large", .inputs = kWidth, .layers = {}, .images = 2048};
  for (uint32_t l = 0; l < layers; ++l) {
    net.layers.push_back(connected("fc" + std::to_string(l + 1), kWidth, kWidth));
  }
  return net;
}

Net part_of(Net net, double parts) {
  net.images /= parts;
  net.parts *= parts;
  for (Layer& layer : net.layers) layer.weights /= parts;
  return net;
}

Training::Training(const Net& net, const Machine& machine, const Style& style)
    : style_(style),
      parts_(net.parts),
      piece_bytes_(style.whole ? 0 : static_cast<uint64_t>(geeps::kPieceBytes / net.parts)),
      weights_(net.weights()) {
  if (style_.one_table) {
    tables_.push_back(
        {.name = "weights", .row_floats = kRowFloats, .keys = {}, .piece_bytes = piece_bytes_});
  }
  input_ = add_table("input", net.inputs * net.images, true);
  double inputs = net.inputs;
  for (const Layer& layer : net.layers) {
    const double moved = 4 * (net.images * (inputs + layer.outputs) + layer.weights);
    const double seconds = std::max(2 * layer.connections * net.images / machine.flops_per_second,
                                    moved / machine.memory_bytes_per_second);
    Step step{.has_weights = layer.weights > 0,
              .forward = nanoseconds(std::llround(seconds * 1e9))};
    // The gradients of the weights and of the inputs, each as much work.
    step.backward = 2 * step.forward;
    if (step.has_weights) step.weights = add_weights(layer.name, layer.weights);
    step.output = add_table(layer.name + ".out", layer.outputs * net.images, true);
    step.error = add_table(layer.name + ".error", layer.outputs * net.images, true);
    if (step.has_weights && style_.keep_gradients) {
      step.gradient = add_table(layer.name + ".gradient", layer.weights, true);
    }
    steps_.push_back(std::move(step));
    inputs = layer.outputs;
  }
}

Training::Rows Training::add_table(const std::string& name, double floats, bool local) {
  const auto rows = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(floats / kRowFloats)));
  tables_.push_back({.name = name,
                     .row_floats = kRowFloats,
                     .keys = geeps::dense(rows),
                     .local = local,
                     .piece_bytes = piece_bytes_});
  return {static_cast<uint32_t>(tables_.size() - 1), tables_.back().keys};
}

Training::Rows Training::add_weights(const std::string& name, double floats) {
  if (!style_.one_table) return add_table(name, floats, style_.keep_gradients);
  const auto rows = std::max<uint64_t>(1, static_cast<uint64_t>(std::ceil(floats / kRowFloats)));
  Keys& all = tables_[0].keys;
  Rows mine{0, Keys(rows)};
  std::iota(mine.keys.begin(), mine.keys.end(), all.size());
  all.insert(all.end(), mine.keys.begin(), mine.keys.end());
  return mine;
}

nanoseconds Training::compute_time() const {
  nanoseconds all{0};
  for (const Step& step : steps_) all += step.forward + step.backward;
  return all * style_.batches;
}

// A layer's output stays acquired until the next layer has used it, and so do errors on the way
// back: those are never in host memory. An output that is not needed again is not saved.
template <class Calls>
void Training::run(Calls& calls) const {
  for (uint32_t batch = 1; batch <= style_.batches; ++batch) {
    uint64_t output = 0;
    forward(calls, output);
    backward(calls, output, batch == style_.batches);
  }
}

template <class Calls>
uint64_t Training::read_weights(Calls& calls, const Step& step) const {
  if (!step.has_weights) return 0;
  return style_.keep_gradients ? calls.local(step.weights, true) : calls.read(step.weights);
}

template <class Calls>
void Training::post_read_weights(Calls& calls, const Step& step, uint64_t weights) const {
  if (!step.has_weights) return;
  style_.keep_gradients ? calls.post_local(weights, false) : calls.post_read(weights);
}

template <class Calls>
void Training::forward(Calls& calls, uint64_t& output) const {
  uint64_t input = calls.local(input_, false);
  for (const Step& step : steps_) {
    const uint64_t weights = read_weights(calls, step);
    output = calls.local(step.output, false);
    calls.compute(step.forward);
    post_read_weights(calls, step, weights);
    calls.post_local(input, true);
    input = output;
  }
}

template <class Calls>
void Training::backward(Calls& calls, uint64_t output, bool last) const {
  uint64_t error = calls.local(steps_.back().error, false);
  for (size_t l = steps_.size(); l-- > 0;) {
    const Step& step = steps_[l];
    const bool kept = step.has_weights && style_.keep_gradients;
    const uint64_t weights = read_weights(calls, step);
    uint64_t update = 0;
    if (kept) {
      update = calls.local(step.gradient, false);
    } else if (step.has_weights) {
      update = calls.pre_update(step.weights);
    }
    const uint64_t input = calls.local(l > 0 ? steps_[l - 1].output : input_, true);
    const uint64_t next = l > 0 ? calls.local(steps_[l - 1].error, false) : 0;
    calls.compute(step.backward);
    post_read_weights(calls, step, weights);
    if (kept) {
      calls.post_local(update, true);
    } else if (step.has_weights) {
      calls.update(update);
    }
    calls.post_local(output, false);
    calls.post_local(error, false);
    if (step.has_weights && !kept && !style_.one_table && last) calls.clock(step.weights.table);
    output = input;
    error = next;
  }
  calls.post_local(output, false);
  for (const Step& step : steps_) {
    if (!step.has_weights || !style_.keep_gradients) continue;
    const uint64_t gradient = calls.local(step.gradient, true);
    const uint64_t weights = calls.local(step.weights, true);
    calls.post_local(weights, true);
    calls.post_local(gradient, false);
  }
  if (style_.one_table && last) calls.clock(0);
}

std::vector<uint64_t> Training::weight_floats() const {
  std::vector<uint64_t> floats;
  for (const Step& step : steps_) {
    if (step.has_weights) floats.push_back(step.weights.keys.size() * kRowFloats);
  }
  return floats;
}

void Training::iterate(geeps::Cache& cache, Stream* compute, float gradient) const {
  struct Calls {
    geeps::Cache& cache;
    Stream* stream;
    float gradient;
    uint64_t read(const Rows& rows) { return cache.read(rows.table, rows.keys).handle; }
    void post_read(uint64_t handle) { cache.post_read(handle); }
    uint64_t pre_update(const Rows& rows) {
      const geeps::Buffer buffer = cache.pre_update(rows.table, rows.keys);
      if (stream != nullptr && gradient != 0) {
        stream->fill(buffer.data, gradient, 1);
        stream->fill(buffer.data + rows.keys.size() * kRowFloats - 1, gradient, 1);
      }
      return buffer.handle;
    }
    void update(uint64_t handle) { cache.update(handle); }
    uint64_t local(const Rows& rows, bool fetch) {
      return cache.local_access(rows.table, rows.keys, geeps::Fetch{fetch}).handle;
    }
    void post_local(uint64_t handle, bool save) {
      cache.post_local_access(handle, geeps::Save{save});
    }
    void clock(uint32_t table) { cache.table_clock(table); }
    void compute(nanoseconds time) {
      if (stream != nullptr && time.count() > 0) stream->work_for(time);
    }
  };
  Calls calls{cache, compute, gradient};
  run(calls);
}

void Training::iterate(HostParameters& parameters, Stream& compute) const {
  struct Calls {
    HostParameters& parameters;
    Stream& stream;
    uint64_t read(const Rows& rows) {
      parameters.read(rows.table);
      return 0;
    }
    void post_read(uint64_t /*handle*/) {}
    uint64_t pre_update(const Rows& rows) { return rows.table; }
    void update(uint64_t table) { parameters.update(static_cast<uint32_t>(table)); }
    uint64_t local(const Rows& /*rows*/, bool /*fetch*/) { return 0; }  // on the device
    void post_local(uint64_t /*handle*/, bool /*save*/) {}
    void clock(uint32_t table) { parameters.clock(table); }
    void compute(nanoseconds time) {
      if (time.count() > 0) stream.work_for(time);
    }
  };
  Calls calls{parameters, compute};
  run(calls);
}

geeps::Demand Training::demand() const {
  struct Calls {
    geeps::Recorder recorder;
    uint64_t read(const Rows& rows) { return recorder.read(rows.table, rows.keys); }
    void post_read(uint64_t step) { recorder.post_read(static_cast<uint32_t>(step)); }
    uint64_t pre_update(const Rows& rows) { return recorder.pre_update(rows.table, rows.keys); }
    void update(uint64_t step) { recorder.update(static_cast<uint32_t>(step)); }
    uint64_t local(const Rows& rows, bool fetch) {
      return recorder.local_access(rows.table, rows.keys, fetch);
    }
    void post_local(uint64_t step, bool save) {
      recorder.post_local_access(static_cast<uint32_t>(step), save);
    }
    void clock(uint32_t table) { recorder.table_clock(table); }
    void compute(nanoseconds /*time*/) {}
  };
  std::vector<geeps::TableInfo> infos;
  for (const geeps::TableSpec& table : tables_) {
    infos.push_back({table.name, table.row_floats, table.local});
  }
  Calls calls{geeps::Recorder(std::move(infos))};
  run(calls);
  return geeps::demand_of(calls.recorder.finish()).demand;
}

uint64_t Training::everything_bytes() const {
  uint64_t bytes = geeps::place(demand(), {.budget_bytes = kPlenty, .max_lead = 1}).pool_bytes;
  for (const geeps::TableSpec& table : tables_) {
    bytes += table.keys.size() * kRowBytes * (table.local ? 1 : 2);
  }
  return bytes;
}

uint64_t Training::least_unmoved_bytes() const {
  return geeps::place(demand(), {.budget_bytes = kPlenty, .max_lead = 1}).total_bytes();
}

bool Training::keeps_local_data(uint64_t budget_bytes) const {
  const geeps::Demand demand = this->demand();
  geeps::Placement placement;
  try {
    placement = geeps::place(demand, {.budget_bytes = budget_bytes});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kFull) throw;
    return false;
  }
  return std::ranges::none_of(demand.accesses, [&](const geeps::Access& access) {
    return access.kind == geeps::AccessKind::kLocal && geeps::moves_of(access) > 0 &&
           std::ranges::any_of(demand.batches[access.batch].parts, [&](const geeps::BatchPart& p) {
             return !placement.entries[p.entry].pinned;
           });
  });
}

}  // namespace phub::geeps_bench

#include "phub/job.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "transport/box_memory.h"
#include "transport/error.h"

namespace phub {
namespace {

kernels::DType dtype(const std::string& name, const char* field) {
  if (auto t = kernels::parse_dtype(name)) return *t;
  fail(ErrorCode::kInvalid, "{}: '{}' is not one of f32, bf16, f16", field, name);
}

kernels::Optimizer optimizer(const std::string& name) {
  if (auto o = kernels::parse_optimizer(name)) return *o;
  fail(ErrorCode::kInvalid,
       "optimizer: '{}' is not one of none, sgd, momentum, nesterov, adam, adamw, adagrad, rmsprop",
       name);
}

size_t states_of(const JobSpec& spec) { return element_bytes(spec).state / sizeof(float); }

LinkLayout link_layout(const JobSpec& spec, const Plan& plan) {
  LinkLayout layout = phub::link_layout(
      plan, spec.max_ranks, kernels::bytes_of(dtype(spec.gradient_dtype, "gradient_dtype")),
      kernels::bytes_of(dtype(spec.parameter_dtype, "parameter_dtype")),
      spec.consistency == "bsp" ? 1 : spec.max_ranks);
  layout.cores = static_cast<uint32_t>(plan.cores.size());
  for (const QueuePlan& queue : plan.queues) {
    layout.queue_core.push_back(queue.core);
    layout.queue_nic.push_back(plan.nics[queue.nic].name);
  }
  for (const CorePlan& core : plan.cores) layout.core_node.push_back(core.os_node);
  layout.runs = node_runs(plan);
  return layout;
}

OnNonFinite on_nonfinite(const std::string& word) {
  return word == "stop"      ? OnNonFinite::kStop
         : word == "exclude" ? OnNonFinite::kExclude
                             : OnNonFinite::kPass;
}

JobParameters parameters_of(const JobSpec& spec, const BoxLink& link, kernels::Store store) {
  return {.max_ranks = spec.max_ranks,
          .gradient_dtype = dtype(spec.gradient_dtype, "gradient_dtype"),
          .parameter_dtype = dtype(spec.parameter_dtype, "parameter_dtype"),
          .optimizer = optimizer(spec.optimizer),
          .mean = spec.reduction == "mean",
          .initial_broadcast = spec.initial == "broadcast",
          .on_nonfinite = on_nonfinite(spec.on_nonfinite),
          .work = spec.work == "all"   ? Work::kAll
                  : spec.work == "sum" ? Work::kSumOnly
                                       : Work::kNone,
          .slots_belong_to_worker = link.slots_belong_to_worker(),
          .lock_step = spec.consistency == "bsp",
          .slack = spec.consistency == "ssp" ? spec.slack : kNever,
          .store = store};
}

float* floats(const numa::Memory& memory) {
  return reinterpret_cast<float*>(memory.bytes().data());
}

}  // namespace

void complete_spec(JobSpec& spec) {
  validate(spec);
  if (spec.max_ranks == 0) spec.max_ranks = spec.world_size;
  optimizer(spec.optimizer);
  dtype(spec.gradient_dtype, "gradient_dtype");
  dtype(spec.parameter_dtype, "parameter_dtype");
  check_hyper(spec.hyper);
  const bool states_vary = spec.optimizer == "rmsprop";
  for (const HyperChange& change : spec.schedule) {
    check_hyper(change.values);
    if (states_vary && change.values.contains("rmsprop_momentum")) {
      fail(ErrorCode::kInvalid, "schedule: rmsprop_momentum cannot change after round 1");
    }
  }
}

NodeMemory total_memory(const Plan& plan, const JobSpec& spec) {
  NodeMemory total;
  for (const NodeMemory& node : memory_needed(plan, spec)) {
    total.slots += node.slots;
    total.parameters += node.parameters;
    total.master += node.master;
    total.state += node.state;
    total.bookkeeping += node.bookkeeping;
  }
  return total;
}

Job::Job(const JobSpec& spec, Plan plan, Nic& nic, kernels::Store store)
    : spec_(spec),
      plan_(std::move(plan)),
      optimizer_(optimizer(spec.optimizer)),
      memory_(total_memory(plan_, spec)),
      classes_(key_classes(spec)),
      hyper_(spec, optimizer_, classes_),
      link_(nic.open_job(link_layout(spec, plan_))),
      membership_(spec, static_cast<uint32_t>(plan_.cores.size()),
                  static_cast<uint32_t>(plan_.chunks.size())) {
  const uint32_t node = plan_.cores.front().os_node;
  const uint64_t f32 = plan_.box_elements * sizeof(float);
  const size_t states = states_of(spec_);
  if (memory_.master > 0)
    parameters_ = allocate(f32, node, "parameters of job '" + spec.name + "'");
  const std::string of_state = "optimizer state of job '" + spec.name + "'";
  if (states > 0) state0_ = allocate(f32, node, of_state);
  if (states > 1) state1_ = allocate(f32, node, of_state);
  // Before anything is touched: each chunk's pages go to the node of the core that handles it.
  const std::vector<NodeRun> runs = node_runs(plan_);
  for (const numa::Memory* array : {&parameters_, &state0_, &state1_}) {
    place(array->bytes(), sizeof(float), runs);
  }

  const JobParameters parameters = parameters_of(spec_, *link_, store);
  std::byte* results = link_->egress().data();
  const uint64_t result_bytes = kernels::bytes_of(parameters.parameter_dtype);
  const JobArrays arrays{
      .results = results,
      .result_stride = parameters.lock_step ? 0 : plan_.box_elements * result_bytes,
      .parameters = memory_.master > 0               ? floats(parameters_)
                    : spec_.parameter_dtype == "f32" ? reinterpret_cast<float*>(results)
                                                     : nullptr,
      .state0 = states > 0 ? floats(state0_) : nullptr,
      .state1 = states > 1 ? floats(state1_) : nullptr};

  std::vector<uint32_t> expected(spec_.world_size);
  for (uint32_t r = 0; r < spec_.world_size; ++r) expected[r] = r;
  for (uint32_t core = 0; core < plan_.cores.size(); ++core) {
    core_jobs_.push_back(std::make_unique<CoreJob>(
        core, parameters, arrays, chunks_of(core), link_->endpoint(core), hyper_.view(), expected,
        static_cast<uint32_t>(plan_.cores[core].queues.size())));
  }
}

std::vector<CoreChunk> Job::chunks_of(uint32_t core) const {
  std::vector<CoreChunk> out;
  const std::vector<uint32_t>& queues = plan_.cores[core].queues;
  for (size_t q = 0; q < queues.size(); ++q) {
    for (uint32_t id : plan_.queue_chunks[queues[q]]) {
      const ChunkLayout& chunk = plan_.chunks[id];
      CoreChunk c;
      c.queue = static_cast<uint16_t>(q);
      c.offset = chunk.box_offset;
      c.worker_offset = chunk.offset;
      c.elements = chunk.elements;
      c.id = id;
      c.priority = spec_.keys[chunk.key].priority;
      c.hyper_class = classes_.of_key[chunk.key];
      out.push_back(c);
    }
  }
  return out;
}

std::string Job::where(uint32_t chunk) const {
  const ChunkLayout& c = plan_.chunks[chunk];
  return fmt::format("key '{}', elements {} to {}", spec_.keys[c.key].name, c.key_element,
                     c.key_element + c.elements - 1);
}

}  // namespace phub

// The exchange of keys, of phub.h over worker.h.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/products.h"
#include "transport/control/layer_computing.h"
#include "worker/c_abi/with_worker.h"

namespace phub::c_abi {
namespace {

// The size of its first version: programs that were compiled with that go on to work.
constexpr size_t kLeastKeyMemory = 6 * sizeof(void*);

// Throws Refusal: the calls about the keys are those of the worker's phub_geeps or
// phub_device_keys.
void check_own_keys(const WorkerObject& object) {
  if (const Type other = object.exchanger; other != Type::kWorker) {
    throw Refusal(PHUB_INVALID,
                  fmt::format("the keys of this worker are exchanged by its {}", name_of(other)));
  }
}

// Throws Refusal: it is no matrix, or larger than a job can have.
void check_matrix(size_t key, size_t rows, size_t columns) {
  if (rows > 0 && columns > 0 && rows <= kMaxElements / columns) return;
  throw Refusal(PHUB_INVALID, fmt::format("key {} has {} rows of {} elements; both are at least 1, "
                                          "and a job has at most {} elements",
                                          key, rows, columns, kMaxElements));
}

struct Matrices {  // as a caller gives them
  size_t keys;
  const size_t* rows;
  const size_t* columns;
  const size_t* samples;
  const double* backward_s;
};

// In the order of forward; none if no times are given.
std::vector<LayerComputing> layers_of(const Matrices& given) {
  std::vector<LayerComputing> layers;
  for (size_t k = given.keys; given.backward_s != nullptr && k-- > 0;) {
    if (!(given.backward_s[k] >= 0 && std::isfinite(given.backward_s[k]))) {
      throw Refusal(PHUB_INVALID, fmt::format("backward_s of key {} is {}; it must be a finite "
                                              "number, and not negative",
                                              k, given.backward_s[k]));
    }
    layers.push_back({.keys = {static_cast<uint32_t>(k)}, .backward_s = given.backward_s[k]});
  }
  return layers;
}

void choose(ExchangeInputs inputs, const Matrices& given, unsigned char* as_factors,
            double* seconds) {
  need(given.rows, "rows");
  need(given.columns, "columns");
  need(given.samples, "samples");
  need(as_factors, "as_factors");
  inputs.samples_of = {given.samples, given.samples + given.keys};
  JobSpec spec;
  for (size_t k = 0; k < given.keys; ++k) {
    const size_t rows = given.rows[k], columns = given.columns[k];
    check_matrix(k, rows, columns);
    spec.keys.push_back({.elements = rows * columns, .shape = {rows, columns}});
  }
  const std::vector<LayerComputing> layers = layers_of(given);
  std::fill_n(as_factors, given.keys, 0);
  const Exchanges exchanges = choose_exchanges(spec, inputs, layers);
  for (const MatrixCosts& matrix : exchanges.matrices) {
    as_factors[matrix.key] = matrix.exchange == MatrixExchange::kWhole ? 0 : 1;
  }
  if (seconds == nullptr) return;
  seconds[0] = layers.empty() ? exchanges.all_whole.seconds(inputs)
                              : iteration_seconds(layers, exchanges.whole_of_layer, inputs, true);
  seconds[1] = layers.empty() ? exchanges.chosen.seconds(inputs)
                              : iteration_seconds(layers, exchanges.chosen_of_layer, inputs, true);
}

template <typename Body>
phub_code exchanging(const char* function, const phub_worker* handle, Body body) {
  return call(function, [&] {
    const auto object = object_of<WorkerObject>(handle);
    check_own_keys(*object);
    body(object->worker);
  });
}

}  // namespace
}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_gradient(phub_worker* worker, size_t key, void** memory, size_t* bytes) {
  return with(__func__, worker, [&](Worker& w) {
    need(memory, "memory");
    const std::span<std::byte> all = w.gradient_bytes(key);
    *memory = all.data();
    if (bytes != nullptr) *bytes = all.size();
  });
}

phub_code phub_gradient_dtype(const phub_worker* worker, size_t key, const char** dtype) {
  return get(__func__, worker, dtype, "dtype", [&](Worker& w) {
    return gradient_memory_format(w.spec(), w.spec().keys[key_in_range(w, key)]).c_str();
  });
}

phub_code phub_parameters(const phub_worker* worker, size_t key, const void** memory,
                          size_t* bytes) {
  return with(__func__, worker, [&](Worker& w) {
    need(memory, "memory");
    const std::span<const std::byte> all = w.parameter_bytes(key);
    *memory = all.data();
    if (bytes != nullptr) *bytes = all.size();
  });
}

phub_code phub_set_weight(phub_worker* worker, float weight) {
  return exchanging(__func__, worker, [&](Worker& w) { w.set_weight(weight); });
}

phub_code phub_add_products(const float* left, const float* right, size_t samples, size_t rows,
                            size_t columns, float* out) {
  return call(__func__, [&] {
    need(left, "left");
    need(right, "right");
    need(out, "out");
    kernels::add_products(left, right, samples, rows, columns, out);
  });
}

phub_code phub_choose_factors(uint32_t ranks, double rank_gbit_s, double box_gbit_s,
                              double product_gflop_s, size_t keys, const size_t* rows,
                              const size_t* columns, const size_t* samples,
                              const double* backward_s, unsigned char* as_factors,
                              double* seconds) {
  return call(__func__, [&] {
    choose({.ranks = ranks,
            .worker_gbit_s = rank_gbit_s,
            .box_gbit_s = box_gbit_s,
            .product_gflop_s = product_gflop_s},
           {keys, rows, columns, samples, backward_s}, as_factors, seconds);
  });
}

phub_code phub_choose_box_factors(uint32_t ranks, double rank_gbit_s, double box_gbit_s,
                                  uint32_t box_cores, double product_gflop_s, double result_bytes,
                                  size_t keys, const size_t* rows, const size_t* columns,
                                  const size_t* samples, const double* backward_s,
                                  unsigned char* as_factors, double* seconds) {
  return call(__func__, [&] {
    if (box_cores == 0) {
      throw Refusal(PHUB_INVALID, "box_cores: must be 1 or more, got 0");
    }
    choose({.ranks = ranks,
            .worker_gbit_s = rank_gbit_s,
            .box_gbit_s = box_gbit_s,
            .box_cores = box_cores,
            .box_product_gflop_s = product_gflop_s,
            .result_bytes = result_bytes,
            .to_ranks = false,
            .or_rows = true},
           {keys, rows, columns, samples, backward_s}, as_factors, seconds);
  });
}

phub_code phub_use_memory(phub_worker* worker, size_t key, const void* gradient, void* parameters) {
  return exchanging(__func__, worker, [&](Worker& w) {
    w.register_memory(key, {.gradient = gradient, .parameters = parameters, .in_place = false});
  });
}

phub_code phub_register_memory(phub_worker* worker, size_t key, const phub_key_memory* memory) {
  return exchanging(__func__, worker, [&](Worker& w) {
    need_struct(memory, "memory", kLeastKeyMemory);
    phub_key_memory all = {};
    std::memcpy(&all, memory, std::min(memory->size, sizeof all));
    KeyMemory ours{.gradient = all.gradient, .parameters = all.parameters};
    if (all.gradient_dtype != nullptr) ours.gradient_dtype = all.gradient_dtype;
    if (all.parameter_dtype != nullptr) ours.parameter_dtype = all.parameter_dtype;
    if (all.gradient_scale != 0) ours.gradient_scale = all.gradient_scale;
    w.register_memory(key, ours);
  });
}

phub_code phub_broadcast(phub_worker* worker, const float* initial, size_t elements) {
  return waiting(__func__, worker, [&](Worker& w) {
    if (elements > 0) need(initial, "initial");
    w.broadcast({initial, elements});
  });
}

phub_code phub_broadcast_keys(phub_worker* worker, const float* const* initial, size_t keys) {
  return waiting(__func__, worker, [&](Worker& w) {
    if (keys > 0) need(initial, "initial");
    w.broadcast_keys({initial, keys});
  });
}

phub_code phub_push(phub_worker* worker, size_t key, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w) { w.push(key, priority); });
}

phub_code phub_push_null(phub_worker* worker, size_t key) {
  return exchanging(__func__, worker, [&](Worker& w) { w.push_null(key); });
}

phub_code phub_push_copy(phub_worker* worker, size_t key, const void* gradient, size_t bytes,
                         int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w) {
    need(gradient, "gradient");
    w.push_copy(key, {static_cast<const std::byte*>(gradient), bytes}, {.priority = priority});
  });
}

phub_code phub_push_factors(phub_worker* worker, size_t key, const float* left, const float* right,
                            uint32_t pairs, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w) {
    const FactorPairs factors{left, right, pairs};
    w.push_factors(key, {&factors, 1}, {.priority = priority});
  });
}

phub_code phub_push_rows(phub_worker* worker, size_t key, const int64_t* indices,
                         const float* elements, size_t rows, int32_t priority) {
  return exchanging(__func__, worker, [&](Worker& w) {
    if (rows > 0) need(indices, "indices"), need(elements, "elements");
    const uint64_t columns = key < w.keys() && w.spec().keys[key].shape.size() == 2
                                 ? w.spec().keys[key].shape[1]
                                 : 0;  // then the key is refused
    if (columns > 0 && rows > kMaxElements / columns) {
      throw Refusal(PHUB_INVALID, fmt::format("{} rows are more than a job can have", rows));
    }
    w.push_rows(key, {{indices, rows}, {elements, rows * columns}}, {.priority = priority});
  });
}

phub_code phub_push_then(phub_worker* worker, size_t key, int32_t priority,
                         phub_completion completion, void* user_data) {
  return call(__func__, [&] {
    const auto object = object_of<WorkerObject>(worker);
    check_own_keys(*object);
    if (completion == nullptr) throw Refusal(PHUB_INVALID, "completion is null");
    object->has_completions = true;
    object->completions.push(key, priority,
                             [completion, user_data](const Pushed& pushed, const Error* error) {
                               completion(user_data, pushed.key, pushed.round,
                                          error != nullptr ? code_of(error->code()) : PHUB_OK,
                                          error != nullptr ? error->what() : "");
                             });
  });
}

phub_code phub_wait(phub_worker* worker, size_t key) {
  return waiting(__func__, worker, [&](Worker& w) { w.wait(key); });
}

phub_code phub_wait_all(phub_worker* worker) {
  return waiting(__func__, worker, [](Worker& w) { w.wait_all(); });
}

phub_code phub_try_wait(phub_worker* worker, size_t key, int* ready) {
  return get(__func__, worker, ready, "ready", [&](Worker& w) { return w.test(key); });
}

phub_code phub_poll(phub_worker* worker, size_t* outstanding) {
  return get(__func__, worker, outstanding, "outstanding", [&](Worker& w) { return w.poll(); });
}

phub_code phub_pull(phub_worker* worker, size_t key, void* into, size_t bytes) {
  return waiting(__func__, worker, [&](Worker& w) {
    need(into, "into");
    w.pull(key, {static_cast<std::byte*>(into), bytes});
  });
}

phub_code phub_verdict(const phub_worker* worker, phub_round_verdict* verdict) {
  return with(__func__, worker, [&](Worker& w) {
    need_struct(verdict, "verdict");
    const RoundVerdict latest = w.verdict().value_or(RoundVerdict());
    copy_struct(verdict,
                {.size = 0, .round = latest.round, .norm = latest.norm, .skipped = latest.skipped});
  });
}

phub_code phub_round(const phub_worker* worker, size_t key, uint64_t* round) {
  return get(__func__, worker, round, "round", [&](Worker& w) { return w.round(key); });
}

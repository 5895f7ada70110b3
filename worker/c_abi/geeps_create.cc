// How the caches of phub.h are made: their exchange, and the stream in which their caller computes.
#include <fmt/format.h>

#include <utility>

#include "worker/c_abi/call.h"
#include "worker/c_abi/geeps.h"
#include "worker/c_abi/options.h"
#include "worker/geeps/standalone_exchange.h"
#include "worker/geeps/worker_exchange.h"

namespace phub::c_abi {
namespace {

// Where the work of the caller runs. Null: in its own thread.
Stream* stream_of_caller(GeepsObject& object, std::optional<void*> stream) {
  Device& device = *object.device->device;
  if (!device.in_host_memory()) {
    object.compute = stream ? device.adopt_stream(*stream, "caller") : device.make_stream("caller");
    if (!stream) object.awaited = object.compute.get();
    return object.compute.get();
  }
  if (!stream || *stream == nullptr) return nullptr;
  object.host_stream = object_of<HostStreamObject>(*stream);
  if (object.host_stream->device != object.device) {
    throw Refusal(PHUB_INVALID, "the phub_host_stream is of another device");
  }
  return object.host_stream->stream.get();
}

}  // namespace

OwnExchange exchange_of(phub_worker* worker, std::span<const geeps::TableSpec> tables,
                        Type exchanger) {
  OwnExchange own;
  own.keys = std::make_unique<KeysOfWorker>(object_of<WorkerObject>(worker), exchanger);
  own.exchange = std::make_unique<geeps::WorkerExchange>(own.keys->worker(), tables);
  return own;
}

OwnExchange standalone_exchange(const phub_options* job, const float* initial, size_t elements) {
  const auto given = object_of<OptionsObject>(job);
  if (elements > 0) need(initial, "initial");
  const std::lock_guard lock(given->mutex);
  return {.keys = nullptr,
          .exchange = std::make_unique<geeps::StandaloneExchange>(
              given->options.spec, std::span<const float>(initial, elements))};
}

phub_code create_geeps(const char* function, const phub_device* device,
                       const phub_geeps_options* options, phub_geeps** geeps,
                       const ExchangeFor& exchange_for) {
  return call(function, [&] {
    auto object = std::make_shared<GeepsObject>();
    object->device = object_of<DeviceObject>(device);
    const auto given = object_of<GeepsOptionsObject>(options);
    need(geeps, "geeps");
    check_may_wait();
    std::vector<geeps::TableSpec> tables;
    geeps::CacheOptions of_cache;
    std::optional<void*> stream;
    {
      const std::lock_guard lock(given->mutex);
      tables = given->tables;
      of_cache = given->options;
      stream = given->stream;
    }
    of_cache.compute = stream_of_caller(*object, stream);
    geeps::Exchange& exchange = exchange_for(*object, tables);
    object->cache = std::make_unique<geeps::Cache>(*object->device->device, exchange,
                                                   std::move(tables), of_cache);
    *geeps = handle_of<phub_geeps>(std::move(object), Type::kGeeps);
  });
}

}  // namespace phub::c_abi

using namespace phub;         // NOLINT: the functions below are C's
using namespace phub::c_abi;  // NOLINT

phub_code phub_geeps_create(phub_device* device, phub_worker* worker,
                            const phub_geeps_options* options, phub_geeps** geeps) {
  return create_geeps(__func__, device, options, geeps,
                      [&](GeepsObject& object, auto tables) -> geeps::Exchange& {
                        object.own = exchange_of(worker, tables, Type::kGeeps);
                        return *object.own.exchange;
                      });
}

phub_code phub_geeps_create_standalone(phub_device* device, const phub_options* job,
                                       const phub_geeps_options* options, const float* initial,
                                       size_t elements, phub_geeps** geeps) {
  return create_geeps(__func__, device, options, geeps,
                      [&](GeepsObject& object, auto /*tables*/) -> geeps::Exchange& {
                        object.own = standalone_exchange(job, initial, elements);
                        return *object.own.exchange;
                      });
}

#include "bench/geeps_host.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "transport/error.h"

namespace phub::geeps_bench {
namespace {

size_t largest_bytes(std::span<const geeps::TableSpec> tables) {
  size_t most = 0;
  for (const geeps::TableSpec& table : tables) {
    if (!table.local) most = std::max(most, table.keys.size() * table.row_floats * sizeof(float));
  }
  return most;
}

}  // namespace

HostParameters::HostParameters(Device& device, geeps::Exchange& exchange,
                               std::span<const geeps::TableSpec> tables, Stream& compute)
    : exchange_(exchange),
      compute_(compute),
      tables_(tables.size()),
      here_(exchange.keys(), true),
      parameters_(device, largest_bytes(tables), "parameters"),
      gradient_(device, largest_bytes(tables), "gradient"),
      staging_(device, largest_bytes(tables), "staging") {
  size_t key = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    if (!tables[t].local) tables_[t].key = key++;
  }
}

void HostParameters::await(size_t key) {
  while (!here_[key]) {
    const auto next = exchange_.next();
    if (!next)
      fail(ErrorCode::kInternal, "the exchange stopped before '{}' came", exchange_.name(key));
    here_[*next] = true;
  }
}

const float* HostParameters::read(uint32_t table) {
  const size_t key = tables_[table].key;
  await(key);
  const auto parameters = exchange_.parameters(key);
  std::memcpy(staging_.data(), parameters.data(), parameters.size_bytes());
  compute_.copy_to_device(parameters_.data(), staging_.data(), parameters.size_bytes());
  compute_.synchronize();
  return parameters_.floats();
}

void HostParameters::update(uint32_t table) {
  Table& mine = tables_[table];
  const auto gradient = exchange_.gradient(mine.key);
  compute_.copy_to_host(staging_.data(), gradient_.data(), gradient.size_bytes());
  compute_.synchronize();
  const auto added = staging_.floats().first(gradient.size());
  if (mine.updates++ == 0) {
    std::ranges::copy(added, gradient.begin());
  } else {
    std::ranges::transform(gradient, added, gradient.begin(), std::plus<>());
  }
}

void HostParameters::clock(uint32_t table) {
  Table& mine = tables_[table];
  mine.updates = 0;
  here_[mine.key] = false;
  exchange_.push(mine.key, -static_cast<int32_t>(mine.key));
}

void HostParameters::wait_all() {
  for (size_t key = 0; key < here_.size(); ++key) await(key);
}

size_t HostParameters::device_bytes(std::span<const geeps::TableSpec> tables) {
  return 2 * largest_bytes(tables);
}

}  // namespace phub::geeps_bench

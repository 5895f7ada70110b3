// Owners of libfabric's objects, and the requests of the transport to libfabric. Every error names
// the call, the provider and the way out.
#pragma once

#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "transport/error.h"

namespace phub {

struct OfiInfoDeleter {
  void operator()(fi_info* info) const { fi_freeinfo(info); }
};
using OfiInfo = std::unique_ptr<fi_info, OfiInfoDeleter>;

template <typename T>
struct OfiDeleter {
  void operator()(T* object) const { fi_close(&object->fid); }
};
template <typename T>
using OfiOwned = std::unique_ptr<T, OfiDeleter<T>>;

// "fi_cq_open of provider efa: Cannot allocate memory", Error(kFull). `error`: of libfabric,
// positive or negative.
[[noreturn]] void fail_ofi(std::string_view provider, const std::string& call, int64_t error);

bool has_ip_addresses(const fi_info& info);

// Asks a provider for the features that the transport needs. `provider` "": any. `source`: an IP
// address that endpoints are to have; "": any. `gpu_memory`: it must read and write memory of GPUs.
// Returns null if there is no such provider, or not at that address.
OfiInfo get_ofi_info(const std::string& provider, const std::string& source,
                     bool gpu_memory = false);

// Memory that a provider reads or that peers write.
struct OfiRegion {
  OfiOwned<fid_mr> mr;  // null: the provider needs none to read it
  uint64_t base = 0;    // the address of the first byte for a peer
  uint64_t key = 0;

  void* descriptor() const { return mr == nullptr ? nullptr : fi_mr_desc(mr.get()); }
};

// One network, or one NIC, of a provider. Any thread: providers are asked for objects that many
// threads may use.
class OfiDomain {
 public:
  // `cuda_ordinal`: of the device that all memory of endpoints is on; -1: it is the host's. Throws
  // Error: kUnavailable; kFull; kInvalid, the provider does not reach that device.
  OfiDomain(const std::string& provider, const std::string& source, int cuda_ordinal = -1);

  const fi_info& info() const { return *info_; }
  fid_fabric* fabric() const { return fabric_.get(); }
  fid_domain* domain() const { return domain_.get(); }
  const char* provider() const { return info_->fabric_attr->prov_name; }
  bool has_mode(uint64_t mr_mode) const {
    return (static_cast<uint64_t>(info_->domain_attr->mr_mode) & mr_mode) != 0;
  }
  // Whether registering costs no more than an entry in a table: no pages are locked.
  bool registers_freely() const { return !has_mode(FI_MR_ALLOCATED | FI_MR_LOCAL); }

  // Memory of a GPU goes to the NIC itself, or not at all. Throws Error(kInvalid).
  void forbid_bounces(fid_ep* endpoint) const;
  // Registers memory for peers that write to `endpoint`. The key is random, unless the provider
  // chooses it. Throws Error(kFull).
  OfiRegion register_target(std::span<const std::byte> memory, fid_ep* endpoint) const;
  // Registers memory for writes from the endpoint.
  OfiRegion register_source(std::span<const std::byte> memory, fid_ep* endpoint) const;

 private:
  OfiRegion register_memory(std::span<const std::byte> memory, uint64_t access,
                            fid_ep* endpoint) const;

  const int cuda_ordinal_;
  OfiInfo info_;
  OfiOwned<fid_fabric> fabric_;
  OfiOwned<fid_domain> domain_;
};

}  // namespace phub

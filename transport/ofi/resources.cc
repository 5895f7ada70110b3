#include "transport/ofi/resources.h"

#include <sys/random.h>
#include <sys/resource.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "transport/ofi/library.h"
#include "transport/ofi/providers.h"

namespace phub {
namespace {

constexpr double kMebibyte = 1 << 20;
constexpr uint32_t kApi = FI_VERSION(1, 14);

std::string locking_limit() {
  rlimit limit = {};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return "unlimited";
  return fmt::format("{:.1f} MiB", static_cast<double>(limit.rlim_cur) / kMebibyte);
}

// Random, so that only who was told it can write. `bytes`: as many as a key of the provider has.
uint64_t random_key(size_t bytes) {
  uint64_t key = 0;
  const size_t size = bytes == 0 ? sizeof(key) : std::min(bytes, sizeof(key));
  if (getrandom(&key, size, 0) != static_cast<ssize_t>(size)) {
    fail(ErrorCode::kInternal, "getrandom of a key: {}", std::strerror(errno));
  }
  return key;
}

OfiInfo make_hints(const std::string& provider, int mr_mode, bool gpu_memory) {
  OfiInfo hints(fi_allocinfo());
  if (hints == nullptr) fail(ErrorCode::kFull, "fi_allocinfo: no memory");
  hints->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  if (gpu_memory) hints->caps |= FI_HMEM;
  hints->domain_attr->mr_mode = gpu_memory ? mr_mode | FI_MR_HMEM : mr_mode;
  hints->domain_attr->threading = FI_THREAD_SAFE;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->domain_attr->cq_data_size = sizeof(uint32_t);
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
  return hints;
}

}  // namespace

void fail_ofi(std::string_view provider, const std::string& call, int64_t error) {
  fail(ErrorCode::kFull, "{} of libfabric's provider {}: {}", call, provider,
       fi_strerror(static_cast<int>(error < 0 ? -error : error)));
}

bool has_ip_addresses(const fi_info& info) {
  const uint32_t format = info.addr_format;
  return format == FI_SOCKADDR || format == FI_SOCKADDR_IN || format == FI_SOCKADDR_IN6;
}

// Keys of our own, and offsets in place of addresses, are asked for first: a peer then knows no
// address of ours, and shm copies at the receiver, where the end of an endpoint ends the copying.
OfiInfo get_ofi_info(const std::string& provider, const std::string& source, bool gpu_memory) {
  if (!ofi_library_problem().empty()) return nullptr;
  for (const int mr_mode :
       {0, FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_ENDPOINT}) {
    const OfiInfo hints = make_hints(provider, mr_mode, gpu_memory);
    const auto find = [&](const char* node) -> OfiInfo {
      fi_info* found = nullptr;
      const uint64_t flags = node == nullptr ? 0 : FI_SOURCE | FI_NUMERICHOST;
      if (fi_getinfo(kApi, node, nullptr, flags, hints.get(), &found) != 0) return nullptr;
      const OfiInfo all(found);
      for (const fi_info* info = all.get(); info != nullptr; info = info->next) {
        const bool named = provider.empty() || info->fabric_attr->prov_name == provider;
        if (named && info->domain_attr->cq_data_size >= sizeof(uint32_t)) {
          return OfiInfo(fi_dupinfo(info));
        }
      }
      return nullptr;
    };
    // A provider whose addresses are not IP's knows nothing of the source.
    OfiInfo any = find(nullptr);
    if (any == nullptr) continue;
    if (!has_ip_addresses(*any) || source.empty()) return any;
    return find(source.c_str());
  }
  return nullptr;
}

OfiDomain::OfiDomain(const std::string& provider, const std::string& source, int cuda_ordinal)
    : cuda_ordinal_(cuda_ordinal) {
  check_ofi_provider_name(provider);
  const std::string& problem = ofi_library_problem();
  if (!problem.empty()) fail(ErrorCode::kUnavailable, "no libfabric in this process: {}", problem);
  info_ = get_ofi_info(provider, source, cuda_ordinal >= 0);
  if (info_ == nullptr && cuda_ordinal >= 0 && get_ofi_info(provider, source) != nullptr) {
    fail(
        ErrorCode::kInvalid,
        "libfabric {}.{} here does not reach memory of a GPU with its provider '{}' (FI_HMEM): use "
        "one that is built with CUDA, or leave memory_device out",
        FI_MAJOR(fi_version()), FI_MINOR(fi_version()), provider);
  }
  if (info_ == nullptr) {
    fail(ErrorCode::kUnavailable,
         "libfabric {}.{} here has no provider '{}' with reliable datagrams and remote writes at "
         "{}: `phub doctor` lists those that it has",
         FI_MAJOR(fi_version()), FI_MINOR(fi_version()), provider,
         source.empty() ? "any address" : source);
  }
  fid_fabric* fabric = nullptr;
  int error = fi_fabric(info_->fabric_attr, &fabric, nullptr);
  if (error != 0) fail_ofi(provider, "fi_fabric", error);
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  error = fi_domain(fabric, info_.get(), &domain, nullptr);
  if (error != 0) fail_ofi(provider, "fi_domain", error);
  domain_.reset(domain);
}

void OfiDomain::forbid_bounces(fid_ep* endpoint) const {
  if (cuda_ordinal_ < 0) return;
  int required = FI_HMEM_P2P_REQUIRED;
  const int error =
      fi_setopt(&endpoint->fid, FI_OPT_ENDPOINT, FI_OPT_FI_HMEM_P2P, &required, sizeof(required));
  if (error == 0) return;
  fail(ErrorCode::kInvalid,
       "libfabric's provider {} copies memory of GPUs through the host (FI_OPT_FI_HMEM_P2P: {}): "
       "leave memory_device out",
       provider(), fi_strerror(std::abs(error)));
}

OfiRegion OfiDomain::register_target(std::span<const std::byte> memory, fid_ep* endpoint) const {
  return register_memory(memory, FI_REMOTE_WRITE, endpoint);
}

OfiRegion OfiDomain::register_source(std::span<const std::byte> memory, fid_ep* endpoint) const {
  return has_mode(FI_MR_LOCAL) || cuda_ordinal_ >= 0 ? register_memory(memory, FI_WRITE, endpoint)
                                                     : OfiRegion{};
}

OfiRegion OfiDomain::register_memory(std::span<const std::byte> memory, uint64_t access,
                                     fid_ep* endpoint) const {
  fid_mr* mr = nullptr;
  const uint64_t key = has_mode(FI_MR_PROV_KEY) ? 0 : random_key(info_->domain_attr->mr_key_size);
  const iovec all = {const_cast<std::byte*>(memory.data()), memory.size()};
  fi_mr_attr attributes = {};
  attributes.mr_iov = &all;
  attributes.iov_count = 1;
  attributes.access = access;
  attributes.requested_key = key;
  attributes.iface = cuda_ordinal_ >= 0 ? FI_HMEM_CUDA : FI_HMEM_SYSTEM;
  if (cuda_ordinal_ >= 0) attributes.device.cuda = cuda_ordinal_;
  int error = fi_mr_regattr(domain_.get(), &attributes, 0, &mr);
  OfiRegion region{.mr = OfiOwned<fid_mr>(mr)};
  if (error == 0 && has_mode(FI_MR_ENDPOINT)) {
    error = fi_mr_bind(mr, &endpoint->fid, 0);
    if (error == 0) error = fi_mr_enable(mr);
  }
  if (error != 0 && cuda_ordinal_ >= 0) {
    fail(ErrorCode::kInvalid,
         "fi_mr_regattr of {:.1f} MiB of CUDA device {}, libfabric's provider {}: {}; libfabric "
         "must be built with CUDA, and the NIC's driver reach the GPU's memory. Without "
         "memory_device, gradients and parameters lie in memory of the host",
         static_cast<double>(memory.size()) / kMebibyte, cuda_ordinal_, provider(),
         fi_strerror(std::abs(error)));
  }
  if (error != 0) {
    fail(
        ErrorCode::kFull,
        "fi_mr_regattr of {:.1f} MiB of libfabric's provider {}: {}; the limit of locked memory is "
        "{}: raise it with ulimit -l or LimitMEMLOCK=infinity",
        static_cast<double>(memory.size()) / kMebibyte, provider(), fi_strerror(std::abs(error)),
        locking_limit());
  }
  region.key = fi_mr_key(mr);
  region.base = has_mode(FI_MR_VIRT_ADDR) ? reinterpret_cast<uint64_t>(memory.data()) : 0;
  return region;
}

}  // namespace phub

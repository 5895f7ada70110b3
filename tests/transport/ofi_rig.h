// The ofi transport for the suite, over a provider of libfabric: box and workers are in one
// process, connecting in a thread.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "tests/transport/near_rig.h"
#include "tests/transport/transport_suite.h"
#include "transport/error.h"
#include "transport/ofi/providers.h"
#include "transport/ofi/transport.h"

namespace phub {

// Of libfabric's providers, those that every host with it has. PHUB_OFI_PROVIDER: that one alone.
inline std::vector<const char*> providers_to_test() {
  if (const char* one = std::getenv("PHUB_OFI_PROVIDER")) return {one};
  return {"net", "tcp;ofi_rxm", "shm"};
}

inline std::string name_of_provider(const ::testing::TestParamInfo<const char*>& instance) {
  std::string name = instance.param;
  std::replace(name.begin(), name.end(), ';', '_');
  return name;
}

class OfiRig final : public TransportRig {
 public:
  // PHUB_OFI_ADDRESS: where the box listens, for a provider that loopback does not have.
  // `device`: in whose memory the arrays of workers lie; null: in the host's.
  explicit OfiRig(OfiOptions options, std::unique_ptr<MemoryDevice> device = nullptr,
                  Near near = Near::kNone)
      : device_(std::move(device)), near_(near) {
    if (const char* address = std::getenv("PHUB_OFI_ADDRESS")) options.addresses = {address};
    transport_ = make_ofi_transport(options);
    if (near_ != Near::kNone) transport_ = make_beside(std::move(transport_));
  }

  // Null, and the test is skipped, where this host has no such provider.
  static std::unique_ptr<OfiRig> over(const std::string& provider,
                                      std::unique_ptr<MemoryDevice> device = nullptr,
                                      Near near = Near::kNone, OfiOptions options = {}) {
    try {
      options.provider = provider;
      return std::make_unique<OfiRig>(std::move(options), std::move(device), near);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kUnavailable) throw;
      [&] { GTEST_SKIP() << error.what(); }();
      return nullptr;
    }
  }

  Transport& transport() override { return *transport_; }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    return meanwhile([&] { return connect_link(offer, layout); });
  }
  void drive(Endpoint& endpoint) override {
    endpoint.arm({});
    endpoint.disarm();
  }

 private:
  std::unique_ptr<WorkerLink> connect_link(const Offer& offer, const LinkLayout& layout) {
    if (near_ == Near::kNone) {
      return connect_ofi(offer, layout, 10000, arrays_on(device_.get(), layout));
    }
    return connect_with(
        near_, offer, layout,
        [](const Offer& part, const LinkLayout& of, std::unique_ptr<LinkArrays> arrays) {
          return connect_ofi(part, of, 10000, std::move(arrays));
        });
  }

  const std::unique_ptr<MemoryDevice> device_;
  const Near near_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub

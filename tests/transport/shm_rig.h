// The shm transport for the suite: box and workers are in one process, connecting in a thread.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "tests/temporary_directory.h"
#include "tests/transport/transport_suite.h"
#include "transport/shm/transport.h"

namespace phub {

class ShmRig final : public TransportRig {
 public:
  explicit ShmRig(ShmOptions options = {}) {
    options.socket_dir = directory_.path();
    transport_ = make_shm_transport(options);
  }
  Transport& transport() override { return *transport_; }
  std::unique_ptr<WorkerLink> connect(const Offer& offer, const LinkLayout& layout) override {
    return meanwhile([&] { return connect_shm(offer, layout, 10000); });
  }

  const std::string& directory() const { return directory_.path(); }

 private:
  TemporaryDirectory directory_;
  std::unique_ptr<Transport> transport_;
};

}  // namespace phub

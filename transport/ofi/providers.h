// Finds the providers of libfabric that carry the ofi transport, and chooses one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace phub {

// A provider of this host that has everything that the transport needs: reliable datagrams, writes
// with remote data, and an address of its own on at least one network.
struct OfiProvider {
  std::string name;        // "tcp;ofi_rxm", "verbs;ofi_rxm", "efa"
  std::string domain;      // "rdmap0s6"; "": any that has the box's IP address
  bool this_host = false;  // no other host can reach it
};

// All of them, in the order in which the transport prefers them: fabrics that write without a
// processor of the receiver's come first. shm, which no other host can reach, is the last, and is
// used only when it is named. Empty without libfabric. Takes a fraction of a second. Any thread.
std::vector<OfiProvider> find_ofi_providers();

// Throws Error(kInvalid) unless this can be a provider's name: it comes from a configuration or an
// offer.
void check_ofi_provider_name(std::string_view name);

}  // namespace phub

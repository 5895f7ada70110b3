// The RDMA devices of this host, and the port and GID of each that the transport listens on.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

struct ibv_context;

namespace phub {

// One port of one device, with the GID and the IP address that connections are made to.
struct VerbsPort {
  ibv_context* context = nullptr;  // librdmacm's, for the life of the process
  std::string device;
  uint8_t port = 1;
  int gid_index = -1;
  std::string gid;      // for people
  std::string address;  // the IP address that the GID stands for (InfiniBand: of its IPoIB)
  std::string netdev;
  std::string link;  // "RoCE v2", "InfiniBand"
  uint32_t mtu_bytes = 0;
  uint32_t os_node = 0;
  std::string why;  // this port and this GID
  // The reason why no memory of a GPU can be registered with the device, whatever the GPU; "": it
  // can.
  std::string no_dma_buf;

  // "mlx5_0", "mlx5_0:2" for any port but the first.
  std::string name() const;
};

// "mlx5_0", "mlx5_0:1" or "mlx5_0:1:3": a device, a port of it, a GID of that.
struct VerbsChoice {
  std::string device;
  std::optional<uint8_t> port;
  std::optional<int> gid_index;
};
// Throws Error(kInvalid) that names the problem of the text.
VerbsChoice parse_verbs_choice(std::string_view text);

// A device or port that is there, usable or not: for `phub doctor` and for the messages below.
struct VerbsFinding {
  std::string device;
  uint8_t port = 0;  // 0: of the device
  std::string problem;
};

// The ports to use: those named in `choices`; otherwise every active port with a GID that has an IP
// address, one each, preferring an address of `listen`, then RoCE v2 over IPv4. Throws
// Error(kInvalid) when a choice names a device or port that is not there or not usable. Ports that
// were passed over go to `passed_over`. Empty: there is no usable device (or no RDMA at all).
std::vector<VerbsPort> choose_verbs_ports(std::span<const VerbsChoice> choices,
                                          std::span<const std::string> listen,
                                          std::vector<VerbsFinding>& passed_over);
bool has_usable_verbs();  // whether there is one

// NUMA node of a device; soft-RoCE has that of the network device below it. 0 where nobody knows.
uint32_t numa_node_of(std::string_view device);

}  // namespace phub

// The part of devices.h that needs no RDMA library.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "transport/error.h"
#include "transport/text.h"
#include "transport/verbs/devices.h"

namespace phub {
namespace {

template <typename T>
std::optional<T> number(std::string_view text) {
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

std::string VerbsPort::name() const {
  return port == 1 ? device : fmt::format("{}:{}", device, port);
}

VerbsChoice parse_verbs_choice(std::string_view text) {
  VerbsChoice choice;
  const size_t first = std::min(text.find(':'), text.size());
  choice.device = text.substr(0, first);
  std::string_view rest = text.substr(std::min(first + 1, text.size()));
  const auto bad = [text] {
    fail(ErrorCode::kInvalid, "must be DEVICE, DEVICE:PORT or DEVICE:PORT:GID, got '{}'",
         printable(std::string(text)));
  };
  if (choice.device.empty()) bad();
  if (first == text.size()) return choice;
  const size_t second = std::min(rest.find(':'), rest.size());
  choice.port = number<uint8_t>(rest.substr(0, second));
  if (!choice.port) bad();
  if (second == rest.size()) return choice;
  choice.gid_index = number<int>(rest.substr(second + 1));
  if (!choice.gid_index) bad();
  return choice;
}

bool has_usable_verbs() {
  std::vector<VerbsFinding> passed_over;
  return !choose_verbs_ports({}, {}, passed_over).empty();
}

uint32_t numa_node_of(std::string_view device) {
  const std::string folder = fmt::format("/sys/class/infiniband/{}", device);
  std::string node = first_line(folder + "/device/numa_node");
  if (node.empty()) {
    const std::string parent = first_line(folder + "/parent");
    if (!parent.empty())
      node = first_line(fmt::format("/sys/class/net/{}/device/numa_node", parent));
    // A network device on virtio: the PCI device is above it.
    if (node.empty() && !parent.empty()) {
      node = first_line(fmt::format("/sys/class/net/{}/device/../numa_node", parent));
    }
  }
  const auto number_read = number<int>(node);
  return number_read && *number_read > 0 ? static_cast<uint32_t>(*number_read) : 0;
}

}  // namespace phub

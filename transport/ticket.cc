#include "transport/ticket.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "transport/error.h"

namespace phub {

std::string make_ticket() {
  std::array<unsigned char, kTicketDigits / 2> random = {};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    fail(ErrorCode::kInternal, "getrandom of a ticket: {}", std::strerror(errno));
  }
  std::string ticket;
  for (const unsigned char byte : random) ticket += fmt::format("{:02x}", byte);
  return ticket;
}

}  // namespace phub

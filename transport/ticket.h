// Tickets: what proves that a connection or a request is of one incarnation.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace phub {

inline constexpr size_t kTicketDigits = 32;  // hexadecimal, of 128 random bits

std::string make_ticket();

// In a time that does not depend on where the two differ. An empty ticket is nobody's.
inline bool same_ticket(std::string_view a, std::string_view b) {
  if (a.size() != b.size() || a.empty()) return false;
  unsigned char different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned char>(a[i] ^ b[i]);
  return different == 0;
}

}  // namespace phub

// A worker's connection begins over every transport with a hello that shows a ticket, and an
// answer. This header has the common part of these messages; a transport adds its own fields.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "transport/error.h"
#include "transport/transport.h"

namespace phub {

// A ticket proves that a connection or a request is of one incarnation.
inline constexpr size_t kTicketDigits = 32;  // hexadecimal, of 128 random bits

std::string make_ticket();

// Compares two tickets in a time that does not depend on where they differ. An empty ticket is
// nobody's.
inline bool same_ticket(std::string_view a, std::string_view b) {
  if (a.size() != b.size() || a.empty()) return false;
  unsigned char different = 0;
  for (size_t i = 0; i < a.size(); ++i) different |= static_cast<unsigned char>(a[i] ^ b[i]);
  return different == 0;
}

// The box checks the ticket of a hello: throws Error(kUnauthorized) unless these can be a ticket's
// digits.
void check_ticket(std::span<const char> digits);

// At the worker: throws Error unless the offer is for `transport` and holds a ticket and, where
// `layout` is not null, as many queues as it has.
void check_offer(const Offer& offer, std::string_view transport, const LinkLayout* layout);
// Throws Error(kInvalid) unless it has an address for each of its queues.
void check_addresses(const Offer& offer);

// REQUIRES: the message has that many bytes.
template <typename T>
T read_as(std::span<const std::byte> message, size_t offset = 0) {
  T value;
  std::memcpy(&value, message.data() + offset, sizeof(T));
  return value;
}

struct ProtocolVersion {
  uint32_t magic = 0;
  uint32_t version = 0;
};
// Throws Error(kInvalid) that begins with `name` if the message is too short.
void check_length(const char* name, size_t bytes, size_t least);
// Throws the same if the peer speaks another protocol or version.
void check_protocol(const char* name, ProtocolVersion theirs, ProtocolVersion ours);

// The beginning of a message. `Header` has a magic and a version, which are ours by default. Throws
// Error(kInvalid) that begins with `name`.
template <typename Header>
Header read_header(const char* name, std::span<const std::byte> message) {
  check_length(name, message.size(), sizeof(Header));
  const auto header = read_as<Header>(message);
  const Header ours = {};
  check_protocol(name, {header.magic, header.version}, {ours.magic, ours.version});
  return header;
}

// Throws Error(kMismatch) unless the worker and the server derive the same `what` from the plan.
void check_same(std::string_view what, uint64_t at_worker, uint64_t at_server);

// A header and the bytes after it.
template <typename Header>
std::vector<std::byte> make_message(const Header& header, std::span<const std::byte> rest) {
  std::vector<std::byte> message(sizeof(header) + rest.size());
  std::memcpy(message.data(), &header, sizeof(header));
  if (!rest.empty()) std::memcpy(message.data() + sizeof(header), rest.data(), rest.size());
  return message;
}

inline constexpr size_t kMaxRefusalBytes = 1024;

// Returns the text of a refusal: "code: sentence", cut to `max_bytes`.
std::string refusal_text(ErrorCode code, std::string_view reason,
                         size_t max_bytes = kMaxRefusalBytes);
// The Error that the text of a refusal carries. Zeros behind the text do not belong to it.
Error parse_refusal(std::span<const std::byte> text);

}  // namespace phub

#include "transport/greeting.h"

#include <fmt/format.h>
#include <sys/random.h>

#include <algorithm>
#include <array>
#include <cerrno>

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

void check_ticket(std::span<const char> digits) {
  const auto is_digit = [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); };
  if (digits.size() != kTicketDigits || !std::all_of(digits.begin(), digits.end(), is_digit)) {
    fail(ErrorCode::kUnauthorized, "hello: the ticket is not {} hexadecimal digits", kTicketDigits);
  }
}

void check_offer(const Offer& offer, std::string_view transport, const LinkLayout* layout) {
  if (offer.transport != transport) {
    fail(ErrorCode::kInvalid, "an offer for transport '{}', not {}", offer.transport, transport);
  }
  if (offer.ticket.size() != kTicketDigits) {
    fail(ErrorCode::kInvalid, "a ticket of {} characters, {} expected", offer.ticket.size(),
         kTicketDigits);
  }
  if (layout == nullptr) return;
  const size_t planned = layout->queue_chunks.size();
  if (offer.queues.size() != planned || planned == 0) {
    fail(ErrorCode::kMismatch, "{} queues are offered, the plan has {}", offer.queues.size(),
         planned);
  }
}

void check_addresses(const Offer& offer) {
  for (size_t q = 0; q < offer.queues.size(); ++q) {
    if (!offer.queues[q].address.empty()) continue;
    fail(ErrorCode::kInvalid, "the offer has no address for queue {}", q);
  }
}

void check_length(const char* name, size_t bytes, size_t least) {
  if (bytes >= least) return;
  fail(ErrorCode::kInvalid, "{}: {} bytes, at least {} expected", name, bytes, least);
}

void check_protocol(const char* name, ProtocolVersion theirs, ProtocolVersion ours) {
  if (theirs.magic != ours.magic) {
    fail(ErrorCode::kInvalid, "{}: magic {:#x}, {:#x} expected: not a phub peer", name,
         theirs.magic, ours.magic);
  }
  if (theirs.version != ours.version) {
    fail(ErrorCode::kInvalid, "{}: protocol version {}, this side speaks {}; upgrade the older one",
         name, theirs.version, ours.version);
  }
}

void check_same(std::string_view what, uint64_t at_worker, uint64_t at_server) {
  if (at_worker == at_server) return;
  fail(ErrorCode::kMismatch,
       "{}: {} by the worker's plan and {} at the server; do both run the same version?", what,
       at_worker, at_server);
}

std::string refusal_text(ErrorCode code, std::string_view reason, size_t max_bytes) {
  return fmt::format("{}: {}", name_of(code), reason).substr(0, max_bytes);
}

Error parse_refusal(std::span<const std::byte> said) {
  std::string text(reinterpret_cast<const char*>(said.data()), said.size());
  text.resize(std::min(text.size(), text.find('\0')));
  const size_t colon = text.find(": ");
  if (colon == text.npos) {
    return {ErrorCode::kUnavailable, "the server refused the connection and did not say why"};
  }
  for (char& c : text) {
    if (c < ' ' || c > '~') c = '?';
  }
  return {parse_error_code(text.substr(0, colon)),
          fmt::format("refused by the server: {}", text.substr(colon + 2))};
}

}  // namespace phub

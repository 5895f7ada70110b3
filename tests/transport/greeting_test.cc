#include "transport/greeting.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace phub {
namespace greeting_test {

using ::testing::HasSubstr;

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

TEST(Ticket, IsNobodyElses) {
  std::set<std::string> tickets;
  for (int i = 0; i < 1000; ++i) {
    const std::string ticket = make_ticket();
    EXPECT_EQ(ticket.size(), kTicketDigits);
    EXPECT_EQ(ticket.find_first_not_of("0123456789abcdef"), std::string::npos) << ticket;
    EXPECT_TRUE(tickets.insert(ticket).second) << ticket;
  }
}

TEST(Ticket, EveryDigitCounts) {
  const std::string ticket = make_ticket();
  EXPECT_TRUE(same_ticket(ticket, std::string(ticket)));
  for (size_t i = 0; i < ticket.size(); ++i) {
    std::string other = ticket;
    other[i] = other[i] == '0' ? '1' : '0';
    EXPECT_FALSE(same_ticket(ticket, other)) << "digit " << i;
  }
  EXPECT_FALSE(same_ticket(ticket, ticket.substr(1)));
  EXPECT_FALSE(same_ticket(ticket.substr(1), ticket));
  EXPECT_FALSE(same_ticket("", "")) << "of nobody";
}

TEST(Refusal, ThereAndBack) {
  for (const ErrorCode code :
       {ErrorCode::kUnauthorized, ErrorCode::kMismatch, ErrorCode::kFull, ErrorCode::kInvalid}) {
    const std::string text = refusal_text(code, "rank 3: no (it was replaced)");
    const Error read = parse_refusal(bytes_of(text));
    EXPECT_EQ(name_of(read.code()), name_of(code));
    EXPECT_STREQ(read.what(), "refused by the server: rank 3: no (it was replaced)");
  }
  auto padded = bytes_of(refusal_text(ErrorCode::kFull, "no room"));
  padded.resize(148);
  EXPECT_STREQ(parse_refusal(padded).what(), "refused by the server: no room");
}

TEST(Refusal, IsCutToWhatTravels) {
  const std::string text = refusal_text(ErrorCode::kFull, std::string(5000, 'x'), 140);
  EXPECT_EQ(text.size(), 140u);
  EXPECT_EQ(parse_refusal(bytes_of(text)).code(), ErrorCode::kFull);
}

TEST(Refusal, OfOthers) {
  for (const std::string& text : {std::string(), std::string(148, '\0'), std::string("what?"),
                                  std::string("\0full: x", 8), std::string(148, '\xff')}) {
    const Error read = parse_refusal(bytes_of(text));
    EXPECT_EQ(read.code(), ErrorCode::kUnavailable);
    EXPECT_THAT(read.what(), HasSubstr("did not say why"));
  }
  EXPECT_EQ(parse_refusal(bytes_of("martian: x")).code(), ErrorCode::kInternal);
  // What a stranger sends does not reach a terminal as it is.
  const Error rude = parse_refusal(bytes_of("full: \x1b[2Jgone\r\n"));
  for (const char c : std::string(rude.what())) EXPECT_GE(c, ' ');
}

}  // namespace greeting_test
}  // namespace phub

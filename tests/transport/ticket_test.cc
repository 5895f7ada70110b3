#include "transport/ticket.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace phub {
namespace {

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

}  // namespace
}  // namespace phub

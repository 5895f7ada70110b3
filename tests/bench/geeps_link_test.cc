// Whether a link takes the time of its bytes, and nothing else of what goes through it.
#include "bench/geeps_link.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <vector>

#include "worker/geeps/standalone_exchange.h"

namespace phub::geeps_bench {
namespace geeps_link_test {

using Seconds = std::chrono::duration<double>;

JobSpec job() {
  JobSpec spec;
  spec.name = "link";
  spec.optimizer = "sgd";
  spec.hyper["lr"] = 1;
  spec.initial = "zeros";
  spec.keys = {{"large", 64 << 10}, {"small", 8 << 10}, {"tiny", 1}};
  return spec;
}

// Keys in the order in which they are here again, with the seconds since the beginning.
struct Arrival {
  size_t key;
  double seconds;
};
std::vector<Arrival> arrivals(geeps::Exchange& exchange, size_t keys,
                              std::chrono::steady_clock::time_point begin) {
  std::vector<Arrival> all;
  while (all.size() < keys) {
    const size_t key = exchange.next().value();
    all.push_back({key, Seconds(std::chrono::steady_clock::now() - begin).count()});
  }
  return all;
}

// Lower bounds only: a machine may always be slower. At 1 MB/s the large key takes 262 ms, the
// small one, a slice, 33 ms.
TEST(GeepsLink, BytesTakeTheirTimeAndHigherPrioritiesGoFirst) {
  geeps::StandaloneExchange behind(job());
  LinkedExchange link(behind, 1e6);
  const double large = 4 * (64 << 10) / 1e6, slice = 4 * (8 << 10) / 1e6;
  std::ranges::fill(link.gradient(0), -1.0F);
  std::ranges::fill(link.gradient(1), -2.0F);
  const auto begin = std::chrono::steady_clock::now();
  link.push(0, 0);
  link.push(1, 1);
  const std::vector<Arrival> here = arrivals(link, 2, begin);
  EXPECT_EQ(here[0].key, 1u) << "between two slices of the large one";
  EXPECT_GE(here[0].seconds, 2 * slice);
  EXPECT_EQ(here[1].key, 0u);
  EXPECT_GE(here[1].seconds, large + 2 * slice) << "the last slice comes down after both went up";
  EXPECT_EQ(link.parameters(0)[77], 1.0F);
  EXPECT_EQ(link.parameters(1)[77], 2.0F);

  const auto again = std::chrono::steady_clock::now();
  link.push_null(0);  // nothing goes up, all comes down
  EXPECT_GE(arrivals(link, 1, again)[0].seconds, large);
}

TEST(GeepsLink, ErrorsComeThrough) {
  geeps::StandaloneExchange behind(job());
  LinkedExchange link(behind, 1e9);
  link.gradient(2)[0] = 1e30F * 1e30F;
  link.push(2, 0);
  EXPECT_THROW((void)link.next(), Error);
  EXPECT_THROW(link.push(1, 0), Error);
}

TEST(GeepsLink, EndsWhileBytesAreUnderWay) {
  geeps::StandaloneExchange behind(job());
  LinkedExchange link(behind, 1e6);
  for (size_t key = 0; key < link.keys(); ++key) link.push(key, 0);
}

}  // namespace geeps_link_test
}  // namespace phub::geeps_bench

// The programs that bench/peers compares with, small: every rank's result is looked at by the
// programs themselves, so that a transfer that is cut short or mixed up is not a fast one.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>

namespace phub {
namespace peers_test {

// What a shell command printed; a failure if its status is not `status`.
std::string output_of(const std::string& command, int status) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::string output;
  std::array<char, 4096> text;
  while (const size_t n = fread(text.data(), 1, text.size(), pipe)) output.append(text.data(), n);
  const int ended = pclose(pipe);
  EXPECT_EQ(WEXITSTATUS(ended), status) << command << "\n" << output;
  return output;
}

TEST(SocketsFloorTest, MovesEverything) {
  // Less than a chunk per thread; a last chunk that is not whole; more threads than workers.
  for (const char* sizes :
       {"4096 1 1 3", "1000004 5 2 4", "4000000 2 5 4", "3000000 3 2 4 5000 4096"}) {
    const std::string output = output_of(std::string(PHUB_SOCKETS_FLOOR) + " " + sizes, 0);
    const nlohmann::json row = nlohmann::json::parse(output);
    EXPECT_EQ(row["wrong"], 0u) << sizes;
    EXPECT_GT(row["p50_us"], 0.0) << sizes;
  }
}

TEST(SocketsFloorTest, RefusesWhatItCannotMeasure) {
  for (const char* sizes : {"", "4097 1 1 3", "4096 0 1 3", "4096 1 x 3", "4096 1 1 0"}) {
    output_of(std::string(PHUB_SOCKETS_FLOOR) + " " + sizes, 2);
  }
}

#ifdef PHUB_PEERS_GLOO
TEST(PeersGlooTest, EveryAlgorithmIsRight) {
  for (const int ranks : {2, 3}) {
    const std::string script =
        "store=$(mktemp -d); for rank in $(seq 0 " + std::to_string(ranks - 1) +
        "); do RANK=$rank WORLD_SIZE=" + std::to_string(ranks) +
        " " PHUB_PEERS_GLOO
        " $store 127.0.0.1 ring,ring_chunked,halving_doubling,bcube 100003 1 3 & done; wait; "
        "rm -r $store";
    std::istringstream lines(output_of(script, 0));
    size_t rows = 0;
    for (std::string line; std::getline(lines, line); ++rows) {
      const nlohmann::json row = nlohmann::json::parse(line);
      EXPECT_EQ(row["wrong"], 0u) << line;
      EXPECT_EQ(row["bytes"], 400012u) << line;
    }
    EXPECT_EQ(rows, 4u);
  }
}
#endif

}  // namespace peers_test
}  // namespace phub

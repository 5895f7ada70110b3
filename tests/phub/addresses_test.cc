// By which addresses workers reach a box: phub serve and real workers, in networks of their own.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tests/transport/shm_rig.h"
#include "tests/worker/process.h"
#include "tests/worker/training.h"
#include "transport/control/messages_json.h"

namespace phub::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// What every script begins with. Status 77: this machine makes no such network.
constexpr const char* kPreamble = R"(
  phub=$1 worker=$2 folder=$3 job=$4
  set -eu
  mount -t tmpfs run /run && mkdir /run/netns && mount -t sysfs sys /sys && ip link set lo up || exit 77
  # make_host NAME: another host, with a wire from its eth0 to NAME here.
  make_host() {
    ip netns add "$1" && ip link add "$1" type veth peer name eth0 netns "$1" || exit 77
    nsenter --net=/run/netns/$1 sh -c 'ip link set lo up && ip link set eth0 up' && ip link set "$1" up
  }
  # address HOST ADDRESS DEVICE: HOST is here if it is empty.
  address() { ${1:+nsenter --net=/run/netns/$1} ip address add "$2" dev "$3" ${4:-}; }
  serve() {
    : > "$folder/box"
    "$phub" serve --topology 'pack:1 core:1 pu:1' --pin false "$@" > "$folder/box" 2>&1 & box=$!
    until grep -q '^listening on' "$folder/box"; do
      kill -0 $box 2> /dev/null || { cat "$folder/box"; exit 1; }
      sleep 0.02
    done
  }
  # train HOST SERVER [OPTION…]: a training of one rank. Fails if it does.
  train() {
    host=$1 server=$2
    shift 2
    echo "$host at $server:"
    nsenter --net=/run/netns/$host "$worker" --server "$server" --job "$job" --rank 0 --rounds 3 \
      --notes "$folder/notes" --transport tcp "$@"
  }
  end() { kill $box; wait $box; cat "$folder/box"; }
)";

class Addresses : public ::testing::Test {
 protected:
  // What the script prints, which must end well; nothing where this machine cannot run it.
  std::optional<std::string> run(const std::string& script, uint32_t lease_ms = 10000) {
    JobSpec spec = fault_spec("addresses", 1, "none");
    spec.lease_ms = lease_ms;
    const std::string file = folder_.path() + "/script";
    std::ofstream(file) << kPreamble << script;
    Process process({"/usr/bin/env", "unshare", "-rnmu", "bash", file, PHUB_BINARY, fault_worker(),
                     folder_.path(), to_json(spec)},
                    folder_.path() + "/output");
    const std::optional<int> status = process.wait(kLong);
    const std::string said = process.output();
    if (status == 77 || said.starts_with("unshare:")) return std::nullopt;
    EXPECT_EQ(status, 0) << said;
    return said;
  }

  const TemporaryDirectory folder_;
};

// As Debian names a host: its name with the domain is at 127.0.1.1.
TEST_F(Addresses, TheNameWithItsDomainMayBeAtALoopbackAddress) {
  const auto said = run(R"(
    hostname box && printf '127.0.0.1 localhost\n127.0.1.1 box.example.org box\n' > "$folder/hosts" &&
      mount --bind "$folder/hosts" /etc/hosts || exit 77
    serve --listen '*:7917' --insecure
    for name in box.example.org box 127.0.1.1; do "$phub" status --server $name:7917; done
    end
    serve --listen box.example.org:7917
    "$phub" status --server box.example.org:7917
    echo alone: && end
    serve --listen box.example.org:7917 --listen 127.0.0.1:7918
    echo meant: && end)");
  if (!said) GTEST_SKIP() << "no network of its own here";
  const size_t alone = said->find("alone:"), meant = said->find("meant:");
  ASSERT_LT(alone, meant) << *said;
  EXPECT_THAT(said->substr(alone, meant - alone),
              AllOf(HasSubstr("'box.example.org' means 127.0.1.1"), HasSubstr("--listen")));
  EXPECT_THAT(said->substr(0, alone), Not(HasSubstr("means 127.0.1.1")));
  EXPECT_THAT(said->substr(meant), Not(HasSubstr("means 127.0.1.1")));
}

}  // namespace
}  // namespace phub::testing

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
namespace addresses_test {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

// What every script begins with. Status 77: this machine makes no such network.
constexpr const char* kPreamble = R"(
  phub=$1 worker=$2 folder=$3 job=$4 box=
  set -eu
  trap '[[ -z $box ]] || kill $box 2> /dev/null || true' EXIT
  mount -t tmpfs run /run && mkdir /run/netns && mount -t sysfs sys /sys && ip link set lo up || exit 77
  # make_host NAME: another host, with a wire from its eth0 to NAME here.
  make_host() {
    ip netns add "$1" && ip link add "$1" type veth peer name eth0 netns "$1" || exit 77
    nsenter --net=/run/netns/$1 sh -c 'ip link set lo up && ip link set eth0 up' && ip link set "$1" up
  }
  # address HOST ADDRESS DEVICE: HOST is here if it is empty.
  address() { ${1:+nsenter --net=/run/netns/$1} ip address add "$2" dev "$3" ${4:-} || exit 77; }
  serve() {
    : > "$folder/box"
    "$phub" serve --topology 'pack:1 core:1 pu:1' --pin false "$@" > "$folder/box" 2>&1 & box=$!
    until grep -q '^listening on' "$folder/box"; do
      kill -0 $box 2> /dev/null || { cat "$folder/box"; exit 1; }
      sleep 0.02
    done
  }
  # train HOST SERVER: a training of one rank, for 3 rounds or $rounds. Fails if it does.
  train() {
    echo "$1 at $2:"
    nsenter --net=/run/netns/$1 "$worker" --server "$2" --job "$job" --rank 0 --rounds ${rounds:-3} \
      --notes "$folder/notes" --transport tcp
  }
  end() { kill $box; wait $box; box=; cat "$folder/box"; }
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

// Other hosts have such bridges with the same addresses.
TEST_F(Addresses, BridgesOfContainersAreNoNics) {
  const auto said = run(R"(
    make_host worker && address '' 10.9.0.1/24 worker && address '' fd09::1/64 worker nodad
    address '' 10.9.1.1/24 worker
    subnet=17
    for bridge in docker0 mine; do
      make_host veth-$bridge && ip link add $bridge type bridge || exit 77
      address '' 172.$subnet.0.1/16 $bridge && address '' fd$subnet::1/64 $bridge nodad
      ip link set $bridge up && ip link set veth-$bridge master $bridge
      address '' 172.$subnet.1.1/32 veth-$bridge
      subnet=$((subnet + 1))
    done
    until grep -q 1 /sys/class/net/mine/carrier; do sleep 0.02; done
    serve --listen '*:7917' --insecure --transports tcp
    echo named: && end
    serve --listen 172.17.0.1:7917 --insecure --transports tcp
    end
    echo alone: && ip link delete worker
    serve --listen '*:7917' --insecure --transports tcp
    end)");
  if (!said) GTEST_SKIP() << "no network of its own here";
  const size_t named = said->find("named:"), alone = said->find("alone:");
  ASSERT_LT(named, alone) << *said;
  const std::string by_name = said->substr(named, alone - named);
  EXPECT_THAT(by_name,
              ContainsRegex("tcp: 10.9.0.1:[0-9]+ or 10.9.1.1:[0-9]+ or \\[fd09::1\\]:[0-9]+;"));
  EXPECT_THAT(by_name, HasSubstr("tcp: 172.17.0.1:")) << "it is there for those who name it";
  EXPECT_THAT(said->substr(alone), ContainsRegex("tcp: .*172.17.0.1:"))
      << "and where there is no other";
}

// Whether the box has found its addresses, or was told them.
TEST_F(Addresses, WorkersOfEitherFamilyReachEveryBox) {
  const auto said = run(R"(
    for host in one two; do make_host $host; done
    address '' 10.9.0.1/24 one && address '' fd09::1/64 one nodad
    address '' 10.8.0.1/24 two && address '' fd08::1/64 two nodad
    four() { nsenter --net=/run/netns/one ip -6 address flush dev eth0 && address one 10.9.0.2/24 eth0; }
    six() { nsenter --net=/run/netns/one ip -4 address flush dev eth0 && address one fd09::2/64 eth0 nodad; }
    both() {
      serve "$@" --insecure --transports tcp
      four && train one 10.9.0.1:7917
      six && train one '[fd09::1]:7917'
      end
    }
    both --listen '*:7917'
    both --listen 10.9.0.1:7917 --listen '[fd09::1]:7917'
    both --listen 10.9.0.1:7917 --listen '[fd09::1]:7917' --listen '[fd08::1]:7917' --listen 10.8.0.1:7917
    both --listen '[fd09::1]:7917' --listen 10.8.0.1:7917 --listen 10.9.0.1:7917)");
  if (!said) GTEST_SKIP() << "no network of its own here";
  size_t left = 0;
  for (size_t at = 0; (at = said->find("\nleft\n", at)) != said->npos; ++at) ++left;
  EXPECT_EQ(left, 8u) << *said;
}

// What goes to the box's other network is lost on its way, and nobody says so.
TEST_F(Addresses, AnAddressThatCannotBeReachedIsLeftOut) {
  const auto said = run(R"(
    for host in far one; do make_host $host; done
    address '' 10.8.0.1/24 far && address '' 10.9.0.1/24 one && address one 10.9.0.9/24 eth0
    nsenter --net=/run/netns/one sh -c 'ip neighbour add 10.9.0.8 lladdr 02:00:00:00:00:08 dev eth0 &&
      ip route add default via 10.9.0.8'
    # The first is nearer to the worker: its name is looked up in this order.
    printf '10.9.0.8 box\n10.9.0.1 box\n' > "$folder/hosts" && mount --bind "$folder/hosts" /etc/hosts
    serve --listen '*:7917' --insecure --transports tcp
    train one 10.9.0.1:7917
    echo by name: && nsenter --net=/run/netns/one "$phub" status --server box:7917
    end)");
  if (!said) GTEST_SKIP() << "no network of its own here";
  EXPECT_THAT(*said, ContainsRegex("tcp: 10.8.0.1:[0-9]+, 10.9.0.1:[0-9]+;"));
  const size_t by_name = said->find("by name:");
  ASSERT_NE(by_name, said->npos) << *said;
  EXPECT_THAT(said->substr(0, by_name), HasSubstr("\nleft\n"));
  EXPECT_THAT(said->substr(by_name), HasSubstr("no jobs"));
}

// The box lives, and takes no data: each attempt is more work for it.
TEST_F(Addresses, AttemptsToReconnectBecomeRare) {
  const auto said = run(R"(
    make_host one && address '' 10.9.0.1/24 one && address one 10.9.0.2/24 eth0
    serve --listen 10.9.0.1:7917 --insecure --transports tcp
    nft 'add table inet t; add chain inet t in { type filter hook input priority 0; }' || exit 77
    rounds=0 train one 10.9.0.1:7917 > "$folder/worker" & trains=$!
    until grep -q ^joined "$folder/worker"; do
      kill -0 $trains 2> /dev/null || { cat "$folder/worker"; exit 1; }
      sleep 0.02
    done
    nft 'add rule inet t in tcp dport != 7917 counter reject with tcp reset' || exit 77
    wait $trains || cat "$folder/worker"
    nft list table inet t | grep -o 'packets [0-9]*'
    end)",
                        1000);
  if (!said) GTEST_SKIP() << "no network of its own here, or no nft";
  // Each attempt is a packet to the data port, in the 2 s of two leases; the broken connection had
  // some, too.
  int attempts = 0;
  const std::string mark = "packets ";
  if (const size_t at = said->find(mark); at != said->npos) {
    attempts = std::stoi(said->substr(at + mark.size()));
  }
  EXPECT_GE(attempts, 3) << *said;
  EXPECT_LE(attempts, 40) << *said;
}

}  // namespace addresses_test
}  // namespace phub::testing

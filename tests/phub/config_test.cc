#include "phub/commands/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "phub/text_table.h"
#include "tests/temporary_directory.h"
#include "transport/error.h"

namespace phub {
namespace config_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Config : public ::testing::Test {
 protected:
  std::string file(const std::string& text) {
    const std::string path = dir_ + "/phub.toml";
    std::ofstream(path) << text;
    return path;
  }
  ServeConfig load(std::vector<std::string> arguments,
                   const std::map<std::string, std::string>& environment = {}) {
    CLI::App app;
    GivenOptions given;
    add_serve_options(app, given);
    std::reverse(arguments.begin(), arguments.end());
    app.parse(arguments);
    return load_config(given, [&](const char* name) {
      const auto found = environment.find(name);
      return found == environment.end() ? nullptr : found->second.c_str();
    });
  }
  std::string error_of(const std::vector<std::string>& arguments,
                       const std::map<std::string, std::string>& environment = {}) {
    try {
      load(arguments, environment);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalid);
      return error.what();
    } catch (const CLI::ParseError& error) {
      return error.what();
    }
    return "no error";
  }
  const TemporaryDirectory folder_;
  const std::string dir_ = folder_.path();
};

TEST_F(Config, Defaults) {
  const ServeConfig config = load({});
  EXPECT_THAT(config.listen, ElementsAre("127.0.0.1:7717"));
  EXPECT_EQ(config.cores, 0u);
  EXPECT_TRUE(config.pin);
  EXPECT_GT(config.memory_limit_bytes, uint64_t{64} << 20);
  EXPECT_EQ(config.slot_window, uint64_t{64} << 20);
  EXPECT_EQ(config.topology, "this");
  EXPECT_EQ(config.spin_us, -1);
  EXPECT_EQ(config.log_level, "info");
  EXPECT_TRUE(config.transports.empty() && config.devices.empty());
}

// Each option through each of the three ways.
TEST_F(Config, FlagsEnvironmentAndFileSayTheSame) {
  const auto check = [](const ServeConfig& config) {
    EXPECT_THAT(config.listen, ElementsAre("10.0.0.1:80", "[::1]:0"));
    EXPECT_THAT(config.transports, ElementsAre("tcp", "verbs"));
    EXPECT_THAT(config.devices, ElementsAre("mlx5_0:1:3", "mlx5_1"));
    EXPECT_EQ(config.data_port, 7718u);
    EXPECT_EQ(config.cores, 12u);
    EXPECT_EQ(config.nic_bytes_per_s, 31'250'000u);
    EXPECT_FALSE(config.pin);
    EXPECT_EQ(config.memory_limit_bytes, uint64_t{3} << 30);
    EXPECT_EQ(config.slot_window, uint64_t{3} << 20);
    EXPECT_EQ(config.socket_dir, "/run/x");
    EXPECT_EQ(config.topology, "pack:2 core:4 pu:1");
    EXPECT_EQ(config.spin_us, 50);
    EXPECT_EQ(config.log_level, "debug");
    EXPECT_EQ(config.parent, "10.0.0.9:7717");
    EXPECT_EQ(config.parent_transport, "verbs");
    EXPECT_EQ(config.parent_bytes_per_s, 100'000u);
    EXPECT_EQ(config.tokens, "/t");
    EXPECT_EQ(config.tls_cert + config.tls_key + config.tls_client_ca, "/c/k/a");
    EXPECT_TRUE(config.insecure && config.tls_data);
    EXPECT_EQ(config.through_switch, "10.0.0.1:7718");
    EXPECT_EQ(config.switch_slots, 64u);
    EXPECT_EQ(config.shard_lease_ms, 500u);
    EXPECT_EQ(config.save_limit_ms, 60'000u);
    EXPECT_TRUE(config.end_with_input);
  };
  const struct {
    std::string name;
    std::vector<std::string> flags;  // one for each time; "": without a value
    std::string variable, in_file;
  } kOptions[] = {
      {"listen", {"10.0.0.1:80", "[::1]:0"}, "10.0.0.1:80,[::1]:0", "['10.0.0.1:80', '[::1]:0']"},
      {"cores", {"12"}, "12", "12"},
      {"pin", {"false"}, "no", "false"},
      {"memory_limit", {"3G"}, "3072M", "3221225472"},
      {"slot_window", {"3M"}, "3072K", "3145728"},
      {"socket_dir", {"/run/x"}, "/run/x", "'/run/x'"},
      {"topology", {"pack:2 core:4 pu:1"}, "pack:2 core:4 pu:1", "'pack:2 core:4 pu:1'"},
      {"spin_us", {"50"}, "50", "50"},
      {"log_level", {"debug"}, "debug", "\"debug\""},
      {"transports", {"tcp", "verbs"}, "tcp,verbs", "['tcp', 'verbs']"},
      {"devices", {"mlx5_0:1:3,mlx5_1"}, "mlx5_0:1:3,mlx5_1", "['mlx5_0:1:3', 'mlx5_1']"},
      {"data_port", {"7718"}, "7718", "7718"},
      {"parent", {"10.0.0.9:7717"}, "10.0.0.9:7717", "'10.0.0.9:7717'"},
      {"parent_transport", {"verbs"}, "verbs", "'verbs'"},
      {"parent_budget", {"800kbit"}, "100000", "'0.8mbit'"},
      {"tokens", {"/t"}, "/t", "\"/t\""},
      {"tls_cert", {"/c"}, "/c", "'/c'"},
      {"tls_key", {"/k"}, "/k", "'/k'"},
      {"tls_client_ca", {"/a"}, "/a", "'/a'"},
      {"tls_data", {""}, "1", "true"},
      {"nic_budget", {"250mbit"}, "250mbit", "'250mbit'"},
      {"switch", {"10.0.0.1:7718"}, "10.0.0.1:7718", "'10.0.0.1:7718'"},
      {"switch_slots", {"64"}, "64", "64"},
      {"shard_lease_ms", {"500"}, "500", "500"},
      {"save_limit_ms", {"60000"}, "60000", "60000"},
      {"end_with_input", {""}, "1", "true"},
      {"insecure", {""}, "1", "true"},
  };
  std::vector<std::string> flags;
  std::map<std::string, std::string> environment;
  std::string in_file;
  for (const auto& [name, given, variable, value] : kOptions) {
    std::string flag = "--" + name, upper = "PHUB_" + name;
    std::ranges::replace(flag, '_', '-');
    std::ranges::transform(upper, upper.begin(), [](char c) { return std::toupper(c); });
    for (const std::string& text : given) {
      flags.push_back(flag);
      if (!text.empty()) flags.push_back(text);
    }
    environment[upper] = variable;
    in_file += name + " = " + value + "\n";
  }
  check(load(flags));
  check(load({}, environment));
  const std::string path = file(in_file);
  check(load({"--config", path}));
  check(load({}, {{"PHUB_CONFIG", path}}));
}

TEST_F(Config, FlagsBeforeEnvironmentBeforeFile) {
  const std::string path = file("cores = 1\nspin_us = 1\nlog_level = \"warn\"");
  const ServeConfig config =
      load({"--config", path, "--cores", "3"}, {{"PHUB_CORES", "2"}, {"PHUB_SPIN_US", "2"}});
  EXPECT_EQ(config.cores, 3u);
  EXPECT_EQ(config.spin_us, 2);
  EXPECT_EQ(config.log_level, "warn");
}

TEST_F(Config, BadValuesNameTheirSource) {
  EXPECT_THAT(error_of({"--cores", "many"}),
              HasSubstr("--cores: must be an integer from 0 to 65536, got 'many'"));
  EXPECT_THAT(error_of({"--cores", "-1"}), HasSubstr("--cores: must be"));
  EXPECT_EQ(load({"--slot-window", "0"}).slot_window, 0u);
  EXPECT_THAT(error_of({"--slot-window", "0.5"}), HasSubstr("--slot-window: must be a number"));
  EXPECT_THAT(error_of({"--listen", "nowhere"}),
              HasSubstr("--listen: 'nowhere' is not an address"));
  EXPECT_THAT(error_of({"--log-level", "loud"}), HasSubstr("must be one of trace, debug"));
  EXPECT_THAT(error_of({"--spin-us", "-2"}), HasSubstr("from -1 to 1000000"));
  EXPECT_THAT(error_of({"--cores", "1", "--cores", "2"}), HasSubstr("--cores"));
  EXPECT_THAT(load({"--transports", "shm,tcp", "--transports", "ofi"}).transports,
              ElementsAre("shm", "tcp", "ofi"));
  EXPECT_THAT(error_of({"--transports", "tcp,pigeon"}),
              HasSubstr("--transports: must be one of shm, tcp, verbs, ofi, got 'pigeon'"));
  EXPECT_THAT(error_of({"--parent-transport", "shm"}),
              HasSubstr("--parent-transport: must be one of auto, tcp, verbs, ofi, got 'shm'"));
  EXPECT_THAT(error_of({"--parent-budget", "much"}),
              HasSubstr("--parent-budget: 'much' is not a rate"));
  EXPECT_THAT(error_of({"--devices", "mlx5_0:x"}),
              HasSubstr("--devices: must be DEVICE, DEVICE:PORT or DEVICE:PORT:GID"));
  EXPECT_THAT(error_of({"--devices", "mlx5_0,"}), HasSubstr("--devices: must be DEVICE"));
  EXPECT_THAT(error_of({"--data-port", "65536"}), HasSubstr("from 0 to 65535"));
  EXPECT_THAT(error_of({"--data-port", "7717"}), HasSubstr("the port of --listen 127.0.0.1:7717"));
  EXPECT_EQ(load({"--data-port", "7717", "--transports", "verbs"}).data_port, 7717u);
  EXPECT_EQ(load({"--data-port", "7717", "--join", "10.0.0.1:7717"}).data_port, 7717u);
  EXPECT_THAT(error_of({"--prot", "1"}), HasSubstr("--prot"));
  EXPECT_THAT(error_of({}, {{"PHUB_PIN", "perhaps"}}),
              HasSubstr("PHUB_PIN: must be true or false"));
  EXPECT_THAT(error_of({}, {{"PHUB_MEMORY_LIMIT", "lots"}}),
              HasSubstr("PHUB_MEMORY_LIMIT: must be"));
  EXPECT_THAT(error_of({"--config", dir_ + "/absent.toml"}),
              HasSubstr("absent.toml: No such file"));
  EXPECT_THAT(error_of({"--config", dir_}), HasSubstr(dir_));
}

TEST_F(Config, BadFilesAreRefusedWithLineAndColumn) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"cores = 1\nlissten = \"x\"",
       "phub.toml:2:1: unknown option 'lissten'; did you mean 'listen'?"},
      {"password = 1",
       "unknown option 'password'; there are listen, join, parent, parent_transport, "
       "parent_budget"},
      {"memory-limit = 1", "did you mean 'memory_limit'?"},
      {"cores = ", "phub.toml:1:"},
      {"cores = 1\n\ncores = 2", "phub.toml:3:"},
      {"[server]\ncores = 1", "phub.toml:1:2: unknown option 'server'"},
      {"cores = \"1\"", "phub.toml:1:9: cores must be an integer"},
      {"cores = 1.5", "cores must be an integer"},
      {"cores = -1", "phub.toml:1:9: cores: must be an integer from 0"},
      {"pin = 1", "pin must be true or false"},
      {"listen = 7717", "listen must be a string or a list of strings"},
      {"listen = []", "listen must be a string or a list of strings"},
      {"listen = [\"127.0.0.1:1\", 2]", "listen must be a string or a list of strings"},
      {"listen = \"x\"", "phub.toml:1:10: listen: 'x' is not an address"},
      {"memory_limit = \"64Q\"", "memory_limit: must be a number of bytes"},
      {"log_level = [\"info\"]", "log_level must be a string"},
      {"cores = 1\xff", "phub.toml:1:"},
      {std::string((1 << 20) + 1, '#'), "is larger than 1048576 bytes"},
  };
  for (const auto& [text, expected] : cases) {
    EXPECT_THAT(error_of({"--config", file(text)}), HasSubstr(expected)) << text.substr(0, 80);
  }
}

TEST_F(Config, HelpShowsEveryOptionWithItsVariable) {
  CLI::App app;
  GivenOptions given;
  add_serve_options(app, given);
  const std::string help = app.help();
  for (const char* text : {"--listen HOST:PORT", "PHUB_LISTEN", "--memory-limit BYTES",
                           "PHUB_MEMORY_LIMIT", "--config FILE", "Examples:"}) {
    EXPECT_THAT(help, HasSubstr(text));
  }
}

TEST(ParseBytes, Forms) {
  EXPECT_EQ(parse_bytes("1048576"), 1048576u);
  EXPECT_EQ(parse_bytes("512K"), 512u << 10);
  EXPECT_EQ(parse_bytes("1.5G"), uint64_t{3} << 29);
  EXPECT_EQ(parse_bytes("2T"), uint64_t{2} << 40);
  for (const char* text : {"", "G", "0", "-1", "1g", "1GB", "1 G", "1e3", "nan", "inf", "0.1",
                           "99999999999T", "1K1"}) {
    EXPECT_THROW(parse_bytes(text), Error) << text;
  }
}

}  // namespace config_test
}  // namespace phub

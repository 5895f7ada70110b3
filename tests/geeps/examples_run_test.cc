// The GeePS applications as processes: that they learn, and that nothing but what is computed
// decides the bits of the parameters: not the memory, not how it is used, not where the workers
// are.

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "tests/geeps/examples_reference.h"
#include "tests/worker/process.h"
#include "worker/device/cuda_device.h"

namespace phub::examples {
namespace examples_run_test {

using phub::testing::Process;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr auto kLimit = 400s;
using Words = std::vector<std::string>;

Words operator+(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}
// The words of a command, as a shell would take them.
Words operator+(Words words, const std::string& line) {
  std::istringstream stream(line);
  for (std::string word; stream >> word;) words.push_back(word);
  return words;
}

std::vector<std::string> lines_with(const std::string& text, const std::string& part) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.find(part) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

std::string read(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}

// The last number after `words`.
double last_number(const std::string& text, const std::string& words) {
  const size_t at = text.rfind(words);
  EXPECT_NE(at, std::string::npos) << text;
  return at == std::string::npos ? NAN : std::stod(text.substr(at + words.size()));
}

class ExamplesRun : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "geeps_examples_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr) << std::strerror(errno);
  }
  void TearDown() override {
    if (server_) {
      server_->send(SIGTERM);
      EXPECT_EQ(server_->wait(kLimit), 0) << server_->output();
    }
    std::filesystem::remove_all(folder_);
  }

  std::unique_ptr<Process> start(const Words& command) {
    Words words = command;
    words[0] = PHUB_BIN "/" + words[0];
    return std::make_unique<Process>(words, file(fmt::format("output{}", ++processes_)));
  }
  std::string finish(Process& process) {
    EXPECT_EQ(process.wait(kLimit), 0) << process.output();
    return process.output();
  }
  std::string run(const Words& command) { return finish(*start(command + "--standalone")); }
  // The digest of every rank of the output, which are all the same.
  std::string digest(const std::string& output, size_t ranks = 1) {
    const auto lines = lines_with(output, "digest ");
    EXPECT_EQ(lines.size(), ranks) << output;
    std::string digest;
    for (const std::string& line : lines) {
      const std::string of_rank = line.substr(line.find("digest "));
      EXPECT_TRUE(digest.empty() || of_rank == digest) << output;
      digest = of_rank;
    }
    return digest;
  }

  // Processes of one job, with a box that is started for the first.
  std::vector<std::unique_ptr<Process>> start_with_box(const Words& command, uint32_t world) {
    if (!server_) server_ = start({"phub", "serve", "--listen", "127.0.0.1:0"});
    const Words job = {"--job",    fmt::format("job{}", ++jobs_), "--world", std::to_string(world),
                       "--server", server_->listening_address()};
    std::vector<std::unique_ptr<Process>> ranks;
    for (uint32_t rank = 0; rank < world; ++rank) {
      ranks.push_back(start(command + job + ("--rank " + std::to_string(rank))));
    }
    return ranks;
  }
  // All output together.
  std::string run_with_box(const Words& command, uint32_t world) {
    std::string output;
    for (const auto& rank : start_with_box(command, world)) output += finish(*rank);
    return output;
  }
  // What all ranks say that end with an error.
  std::string errors_with_box(const Words& command, uint32_t world) {
    std::string output;
    for (const auto& rank : start_with_box(command, world)) {
      EXPECT_EQ(rank->wait(kLimit), 1) << rank->output();
      output += rank->output();
    }
    return output;
  }

  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  std::vector<float> floats(const std::string& name) const {
    const std::string bytes = read(file(name));
    std::vector<float> values(bytes.size() / sizeof(float));
    std::memcpy(values.data(), bytes.data(), values.size() * sizeof(float));
    return values;
  }

  std::string run(const Words& command, uint32_t world) {
    return world == 0 ? run(command) : run_with_box(command, world);
  }
  // A training that ends in the middle and is resumed ends with the bits of one that goes through,
  // which are returned. `world`: 0 means without a box.
  std::string expect_resumed(const Words& command, size_t ranks, uint32_t world = 0,
                             const std::string& first = "", const std::string& rest = "") {
    const std::string whole = digest(run(command + "--iterations 20", world), ranks);
    const Words saved =
        command + ("--checkpoint " + file(fmt::format("checkpoint{}of%r", ++processes_)));
    run(saved + ("--iterations 9 " + first), world);
    EXPECT_EQ(digest(run(saved + ("--resume --iterations 20 " + rest), world), ranks), whole)
        << fmt::format("{}", fmt::join(command, " "));
    return whole;
  }

  const Words digits_ = {"geeps_digits", "--data", PHUB_DIGITS_CSV};
  const Words deep_ = {"geeps_deep", "--data", PHUB_DIGITS_CSV};
  const Words text_ = {"geeps_text", "--text", PHUB_TEXT, "--batch", "8"};
  const Words video_ = {"geeps_video", "--batch", "16"};
  const Words small_video_ = {"geeps_video", "--batch", "4",        "--frames", "5",
                              "--filters",   "4",       "--hidden", "12"};
  const Words small_text_ = text_ + "--hidden 16 --steps 24";

 private:
  std::string folder_;
  std::unique_ptr<Process> server_;
  int processes_ = 0, jobs_ = 0;
};

TEST_F(ExamplesRun, WorkersLearnOutOfLockStep) {
  for (const std::string consistency : {"ssp --slack 2", "async"}) {
    const std::string output = run_with_box(
        digits_ +
            ("--model mlp --lr 0.3 --iterations 400 --budget 50% --consistency " + consistency),
        3);
    EXPECT_GE(last_number(output, "held-out accuracy "), 90) << consistency << "\n" << output;
  }
}
TEST_F(ExamplesRun, FormatsOnTheWireAreTheJobs) {
  const Words mlp = digits_ + "--model mlp --lr 0.3 ";
  const std::string whole = digest(run_with_box(mlp + "--iterations 30", 2), 2);
  for (const std::string formats : {"--gradients bf16 --results bf16", "--gradients int8"}) {
    const Words coded = mlp + ("--iterations 30 --piece 3K " + formats);
    const std::string bits = digest(run_with_box(coded, 2), 2);
    EXPECT_EQ(digest(run_with_box(coded + "--budget least", 2), 2), bits);
    EXPECT_NE(bits, whole);
  }
  const std::string output =
      run_with_box(mlp + "--iterations 400 --budget 50% --gradients int8 --results int8", 3);
  EXPECT_GE(last_number(output, "held-out accuracy "), 90) << output;
  EXPECT_THAT(errors_with_box(mlp + "--gradients float", 1), HasSubstr("float"));
  EXPECT_THAT(errors_with_box(mlp + "--results bf16 --checkpoint " + file("saved"), 1),
              HasSubstr("leave out --gradients and --results"));
}
TEST_F(ExamplesRun, LanguageModelLearnsMoreThanFrequencies) {
  const std::string output =
      run(text_ + "--hidden 48 --steps 24 --lr 4 --iterations 400 --budget 30%");
  EXPECT_LT(last_number(output, "held-out loss "), last_number(output, "frequencies alone: ") - 0.5)
      << output;
}
// Of one frame nobody can tell more than chance, which is 25%.
TEST_F(ExamplesRun, VideoNetworkLearnsTheOrderOfFrames) {
  const std::string output = run(video_ + "--iterations 400 --budget 30%");
  EXPECT_GE(last_number(output, "held-out accuracy "), 90) << output;
  const std::string of_one = run(video_ + "--iterations 400 --frames 1");
  EXPECT_LT(last_number(of_one, "held-out accuracy "), 35) << of_one;
}

// What is said is exact.
TEST_F(ExamplesRun, TooSmallABudgetIsToldTheLeastOne) {
  for (const std::string gather : {"first", "none"}) {
    const auto with = [&](const std::string& budget) {
      return start(digits_ +
                   ("--standalone --iterations 2 --gather " + gather + " --budget " + budget));
    };
    const auto small = with("35%");
    EXPECT_EQ(small->wait(kLimit), 1) << small->output();
    const std::string before = fmt::format(
        "With --gather {} this training needs a --budget of at "
        "least ",
        gather);
    const auto least = static_cast<uint64_t>(last_number(small->output(), before));
    finish(*with(fmt::format("{}", least)));
    const auto less = with(fmt::format("{}", least - 4096));
    EXPECT_EQ(less->wait(kLimit), 1) << less->output();
  }
}

TEST_F(ExamplesRun, VideoNetworkIsThatOfTheReference) {
  constexpr size_t kClips = 40;
  for (const uint32_t world : {1, 2}) {
    const Words command =
        small_video_ + ("--clips " + std::to_string(kClips) +
                        " --iterations 12 --lr 1 --budget 50% --out " + file("parameters%r"));
    world == 1 ? run(command) : run_with_box(command, world);
    ReferenceVideo reference(4, 12);
    reference.train(Videos(1, kClips, 1, 5), {.samples = 4, .world = world, .clocks = 12, .lr = 1});
    for (uint32_t rank = 0; rank < world; ++rank) {
      EXPECT_EQ(floats(fmt::format("parameters{}", rank)), reference.padded())
          << rank << " of " << world;
    }
  }
}

TEST_F(ExamplesRun, DevicesOfAProcessAreLikeWorkers) {
  const Words command = digits_ + "--iterations 40 --budget 50% --lr-decay 0.5 --lr-every 15";
  const std::string workers = digest(run_with_box(command, 2), 2);
  EXPECT_EQ(digest(run(command + "--devices 2"), 2), workers);
  EXPECT_EQ(digest(run_with_box(command + "--devices 2", 1), 2), workers);
  EXPECT_NE(digest(run(command)), workers);
  digest(run_with_box(command + "--devices 2", 2), 4);
}

TEST_F(ExamplesRun, MiniBatchesOfAClockAreOneLargeOne) {
  for (const Words& model : {digits_ + "--iterations 5", digits_ + "--iterations 5 --model cnn"}) {
    run(model + ("--batch 24 --out " + file("large")));
    run(model + ("--batch 8 --mini-batches 3 --budget 80% --out " + file("small")));
    const auto large = floats("large"), small = floats("small");
    ASSERT_EQ(large.size(), small.size());
    EXPECT_NE(large, small);  // sums are rounded differently
    for (size_t i = 0; i < large.size(); ++i) ASSERT_NEAR(large[i], small[i], 1e-5) << i;
  }
}

TEST_F(ExamplesRun, AResumedTrainingEndsWithTheSameBits) {
  const Words rate = {"--lr-decay", "0.9", "--lr-every", "4"};
  const std::string first = "--budget 60%", rest = "--gather first";
  for (const Words& command : {digits_ + rate, small_video_ + rate + "--mini-batches 2"}) {
    expect_resumed(command, 1, 0, first, rest);
  }
  expect_resumed(small_text_ + rate, 1, 0, first, rest);
  expect_resumed(small_text_ + rate + "--devices 2", 2, 0, first, rest);
  expect_resumed(small_text_ + rate, 2, 2, "--piece 2K", "--budget 40%");
}
// With the optimizer's state and its count of steps, and the rate where its schedule was.
TEST_F(ExamplesRun, AResumedOptimizerEndsWithTheSameBits) {
  for (const char* optimizer :
       {"momentum --hyper momentum=0.8 --lr 0.05", "adam --lr 0.01 --hyper beta2=0.9 lr_warmup=12",
        "adadelta --lr 2 --hyper lr_cosine=25",
        "adagrad --lr 0.1 --hyper lr_inverse=0.5 lr_exponential=0.9"}) {
    for (const size_t devices : {1, 2}) {
      const Words command =
          digits_ + fmt::format("--devices {} --optimizer {}", devices, optimizer);
      const std::string whole = expect_resumed(command, devices);
      EXPECT_NE(digest(run(command + "--iterations 19"), devices), whole);
    }
  }
}
TEST_F(ExamplesRun, WorkersResumeTheirOptimizerInANewJob) {
  for (const char* optimizer : {"adam", "momentum"}) {
    for (const size_t devices : {1, 2}) {
      expect_resumed(
          digits_ + fmt::format("--optimizer {} --lr 0.01 --hyper lr_cosine=25 --devices {}",
                                optimizer, devices),
          2 * devices, 2, "", "--budget 60%");
    }
  }
}
TEST_F(ExamplesRun, AKilledTrainingResumesFromItsLastCheckpoint) {
  const Words command = small_text_ + ("--iterations 40 --checkpoint " + file("checkpoint"));
  const std::string whole = digest(run(small_text_ + "--iterations 40"));
  const auto slow = start(
      command + "--standalone --checkpoint-every 3 --budget 30% --latency 500 --report-every 1");
  ASSERT_TRUE(slow->printed("iteration      7 ", kLimit)) << slow->output();
  slow->send(SIGKILL);
  const auto status = slow->wait(kLimit);
  EXPECT_TRUE(status == -SIGKILL || status == 0) << slow->output();  // 0: it was faster
  EXPECT_EQ(digest(run(command + "--resume")), whole);
}
TEST_F(ExamplesRun, WorkersThatGoOnFromDifferentIterationsAreRefused) {
  const Words command = digits_ + ("--checkpoint " + file("checkpoint%r"));
  run_with_box(command + "--iterations 4", 2);
  std::filesystem::rename(file("checkpoint0"), file("earlier"));
  run_with_box(command + "--iterations 7", 2);
  std::filesystem::rename(file("earlier"), file("checkpoint0"));
  const Words resumed = command + "--iterations 9 --resume";
  const std::string said = errors_with_box(resumed, 2);
  EXPECT_THAT(said, HasSubstr("the ranks go on from different iterations"));
  EXPECT_THAT(said, HasSubstr("to 4"));
  EXPECT_THAT(said, HasSubstr("to 7"));
}
// One that could not write its checkpoint does not leave the others to train without it.
TEST_F(ExamplesRun, ARankThatFailsEndsTheJob) {
  std::filesystem::create_symlink("/dev/full", file("checkpoint1.new"));
  const std::string said = errors_with_box(digits_ + ("--checkpoint " + file("checkpoint%r") +
                                                      " --iterations 3000 --checkpoint-every 3"),
                                           2);
  EXPECT_THAT(said, HasSubstr("No space left on device"));
  EXPECT_THAT(said, HasSubstr("rank 1"));
}

// --- on the host, and on a GPU -------------------------------------------------------------------

class ExamplesOn : public ExamplesRun, public ::testing::WithParamInterface<const char*> {
 protected:
  void SetUp() override {
    ExamplesRun::SetUp();
    if (!is_cuda()) return;
    device_ = {"--device", "cuda"};
    const auto found = cuda_devices();
    if (found.devices.empty()) GTEST_SKIP() << found.none_because;
  }
  bool is_cuda() const { return GetParam() == std::string("cuda"); }
  // On a GPU sums over the depth of a product have another order.
  void compare(const std::vector<float>& got, const std::vector<float>& expected) const {
    if (!is_cuda()) {
      EXPECT_EQ(got, expected);
    }
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], expected[i], 1e-4) << i;
  }
  // With every budget, and every way to use it.
  void expect_same_bits(const Words& command, const std::vector<std::string>& budgets) {
    const std::string expected = digest(run(command + device_));
    for (const std::string& budget : budgets) {
      for (const char* way :
           {"", "--prefetch off --poison", "--gather first --partitions 3 --poison --piece 3K",
            "--partitions 3 --latency 100", "--peak-first --poison --piece 0"}) {
        EXPECT_EQ(digest(run(command + device_ + fmt::format("--budget {} {}", budget, way))),
                  expected)
            << budget << ' ' << way;
      }
    }
    EXPECT_EQ(digest(run(command + device_ + "--gather none")), expected);
  }

  Words device_;
};

TEST_P(ExamplesOn, NetworksLearn) {
  const Words every = digits_ + device_ + "--iterations 800";
  const std::pair<double, Words> networks[] = {
      {92, every + "--model logreg --lr 0.5 --budget 80%"},
      {95, every + "--model mlp --lr 0.3 --budget 50%"},
      {96, every + "--model cnn --batch 16 --lr 0.2 --lr-decay 0.5 --lr-every 200 --budget 80%"},
      {90, deep_ + device_ + "--layers 80 --width 64 --iterations 100 --budget 5%"}};
  for (const auto& [least, command] : networks) {
    const std::string output = run(command);
    EXPECT_GE(last_number(output, "held-out accuracy "), least) << output;
  }
}

TEST_P(ExamplesOn, SameBitsAtEveryBudget) {
  expect_same_bits(digits_ + "--iterations 20", {"80%", "50%", "least"});
  expect_same_bits(digits_ + "--model cnn --batch 8 --iterations 10", {"90%", "70%", "least"});
  expect_same_bits(deep_ + "--layers 20 --width 64 --iterations 8", {"60%", "20%", "least"});
  expect_same_bits(small_text_ + "--iterations 6", {"70%", "30%", "least"});
  expect_same_bits(small_video_ + "--iterations 6", {"70%", "40%", "least"});
}

// The whole chain against the same mathematics over plain arrays.
TEST_P(ExamplesOn, NetworksAreThoseOfTheReference) {
  const digits::Dataset data = digits::load(PHUB_DIGITS_CSV);
  Layers layers;  // those of geeps_digits --model cnn
  layers.push_back(convolution({8, 8, 1, 1}, 16));
  layers.push_back(convolution({8, 8, 16, 2}, 32));
  layers.push_back(dense(512, 10, false));
  for (const uint32_t world : {1, 3}) {
    run(digits_ + device_ +
            ("--model cnn --batch 8 --iterations 12 --lr 0.1 --budget 70% --out " +
             file("parameters%r")),
        world == 1 ? 0 : world);
    const auto expected = reference_network(
        layers, data.train, {.samples = 8, .world = world, .clocks = 12, .lr = 0.1f});
    for (uint32_t rank = 0; rank < world; ++rank) {
      SCOPED_TRACE(fmt::format("{} of {}", rank, world));
      compare(floats(fmt::format("parameters{}", rank)), expected);
    }
  }
  // With a text that ends before the training does.
  std::ofstream(file("text")) << read(PHUB_TEXT "/GPL-3").substr(0, 2000);
  run(Words{"geeps_text", "--text", file("text")} + device_ +
      ("--batch 8 --hidden 16 --steps 24 --iterations 12 --lr 1 --budget 30% --out " +
       file("parameters")));
  const Text text = Text::load(file("text"));
  ASSERT_LT(text.train().size(), 8u * 12 * 24);
  compare(floats("parameters"),
          reference_lstm(text, 16, 24, {.samples = 8, .clocks = 12, .lr = 1}));
}

TEST_P(ExamplesOn, AResumedTrainingEndsWithTheSameBits) {
  expect_resumed(small_text_ + device_ + "--optimizer adam --lr 0.01", 1, 0,
                 "--budget 60% --piece 2K");
}

INSTANTIATE_TEST_SUITE_P(Every, ExamplesOn, ::testing::Values("host", "cuda"),
                         [](const auto& instance) { return std::string(instance.param); });

TEST_F(ExamplesRun, SaysWhatIsWrong) {
  run(digits_ + ("--iterations 1 --checkpoint " + file("of_mlp")));
  std::filesystem::create_symlink("/dev/full", file("of1.new"));
  std::ofstream(file("empty")).flush();
  const Words of_mlp = {"--resume", "--checkpoint", file("of_mlp")};
  const std::pair<Words, std::string> mistakes[] = {
      {digits_ + "--budget 10K", "too small"},
      {digits_ + "--budget some%", "not a whole number of percent"},
      {digits_ + "--device abacus", "not host, cuda or cuda:N"},
      {digits_ + "--resume", "--checkpoint"},
      {digits_ + ("--model cnn --resume --checkpoint " + file("of_mlp")), "is a checkpoint of"},
      {digits_ + ("--resume --checkpoint " + file("none")), "No such file"},
      {digits_ + ("--optimizer adam --resume --checkpoint " + file("of_mlp")),
       "is a checkpoint of"},
      {digits_ + ("--optimizer adam --consistency ssp --checkpoint " + file("c")),
       "in lock-step only"},
      {digits_ + "--lr 0.25" + of_mlp, "is a checkpoint of"},
      {digits_ + "--hyper weight_decay=0.1" + of_mlp, "is a checkpoint of"},
      {digits_ + "--lr-decay 0.5 --lr-every 3" + of_mlp, "is a checkpoint of"},
      {digits_ + "--optimizer adamax", "{sgd,momentum,nesterov"},
      {digits_ + "--optimizer none", "{sgd,momentum,nesterov"},
      {digits_ + "--optimizer fold", "{sgd,momentum,nesterov"},
      {digits_ + "--lr inf", "'inf' is not a finite number above 0"},
      {digits_ + "--lr-decay nan", "'nan' is not a finite number above 0"},
      {digits_ + "--lr-every -1", "'-1' is not a finite number of at least 0"},
      {digits_ + "--iterations -1", "'-1' is not a finite number of at least 0"},
      {digits_ + "--budget -1", "it is below 0"},
      {digits_ + "--budget 99999999999999999999", "it is too large"},
      {digits_ + ("--devices 2 --out " + file("both")), "each of the 2 ranks writes"},
      {digits_ + ("--devices 2 --checkpoint " + file("both")), "put %r in its name"},
      {digits_ + ("--iterations 100000000 --out " + file("none/of")), "No such file"},
      {digits_ + ("--iterations 100000000 --out " + file("")), "Is a directory"},
      {digits_ + ("--iterations 100000000 --checkpoint " + file("none/of")), "No such file"},
      {Words{"geeps_text", "--text", file("empty")}, "a text of 0 bytes is too short"},
      {digits_ + "--hyper momentum", "not NAME=VALUE"},
      {digits_ + "--hyper lr=2", "use --lr"},
      {digits_ + "--hyper weight_decay=1 weight_decay=0", "is given twice"},
      {digits_ + "--hyper momentum=0.9", "optimizer 'sgd' does not use it"},
      {digits_ + "--checkpoint-every 3", "--checkpoint-every requires --checkpoint"},
      {digits_ + "--lr-decay 0.5", "--lr-decay requires --lr-every"},
      {digits_ + "--hyper lr_cosin=2", "known are lr, momentum"},
      {digits_ + "--devices 2 --lr 1e30 --iterations 100", "infinity"},
      {digits_ +
           ("--devices 2 --iterations 100 --checkpoint " + file("of%r") + " --checkpoint-every 3"),
       "No space left on device"},  // one device fails, the other would wait for it
      {video_ + "--clips 1 --devices 2", "2 workers need at least one each"},
      {Words{"geeps_text", "--text", PHUB_TEXT, "--steps", "1000000"}, "streams of 1000000"},
  };
  for (const auto& [command, message] : mistakes) {
    const auto process = start(command + "--standalone");
    const auto status = process->wait(kLimit);
    ASSERT_TRUE(status) << message;
    EXPECT_GT(*status, 0) << message;
    EXPECT_THAT(process->output(), HasSubstr(message));
  }
}

}  // namespace examples_run_test
}  // namespace phub::examples

// layers_ps_lite: one rank of `layers` whose gradients ps-lite exchanges over TCP, with a server
// beside every worker: for bench/sharded. Prints one line of JSON, as `layers` does.
//
//   DMLC_ROLE=worker … layers_ps_lite MODEL COMPUTE_S WARMUP ITERATIONS PIECES
//
// one process per role: a scheduler, servers and workers, as ps-lite's own variables say. PIECES:
// "tensors": a key of kBigElements or more is cut evenly over all servers, another one is whole at
// one of them, as MXNet does; "mib": all are cut into pieces of 1 MiB, dealt out to the servers.
// A piece is pushed and pulled in one request, which its server answers with the sum of all
// workers, without an optimizer.
#include <ps/ps.h>

#include <atomic>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bench/layers/report.h"
#include "bench/layers/walk.h"
#include "bench/peers.h"
#include "bench/peers_ps_lite.h"

namespace phub::layers {
namespace {

// Assumed: MXNet's default of MXNET_KVSTORE_BIGARRAY_BOUND, and the number by which it deals out
// whole keys.
constexpr uint64_t kBigElements = 1'000'000, kHash = 9973;
constexpr uint64_t kPieceElements = 1 << 18;  // 1 MiB

struct Piece {
  ps::SArray<ps::Key> key;
  ps::SArray<float> gradient, sum;  // parts of the layer's arrays
};

struct Layer {
  std::vector<float> gradient, sum;
  std::vector<Piece> pieces;
  std::vector<int> requests;  // that nobody waited for
  uint64_t rounds = 0;
  std::atomic<size_t> under_way = 0;  // counted down by ps-lite's thread
};

// Which server has how much of a key, in the order of its elements.
struct Share {
  size_t server = 0;
  uint64_t elements = 0;
};

std::vector<Share> shares(uint64_t elements, size_t key, size_t servers, bool tensors,
                          size_t* dealt) {
  if (tensors && elements < kBigElements) return {{key * kHash % servers, elements}};
  const uint64_t most = tensors ? (elements + servers - 1) / servers : kPieceElements;
  std::vector<Share> found;
  for (uint64_t first = 0; first < elements; first += most) {
    const size_t server = tensors ? found.size() : (*dealt)++ % servers;
    found.push_back({server, std::min(most, elements - first)});
  }
  return found;
}

class PsLite : public Exchange {
 public:
  PsLite(const Net& net, bool tensors) : worker_(0, 0) {
    const std::vector<ps::Range>& ranges = ps::Postoffice::Get()->GetServerKeyRanges();
    std::vector<uint64_t> keys(ranges.size());  // of each server
    size_t dealt = 0;
    const auto own = static_cast<float>(ps::MyRank() + 1);
    for (const layers::Layer& of : net.layers) {
      layers_.push_back(std::make_unique<Layer>());
      Layer& layer = *layers_.back();
      uint64_t elements = 0, at = 0;
      for (const size_t key : of.keys) elements += net.table.keys[key].elements;
      layer.gradient.resize(elements, own);
      layer.sum.resize(elements);
      for (const size_t key : of.keys) {
        for (const Share& share :
             shares(net.table.keys[key].elements, key, ranges.size(), tensors, &dealt)) {
          Piece& piece = layer.pieces.emplace_back();
          piece.key.push_back(ranges[share.server].begin() + keys[share.server]++);
          piece.gradient.reset(layer.gradient.data() + at, share.elements, [](float*) {});
          piece.sum.reset(layer.sum.data() + at, share.elements, [](float*) {});
          at += share.elements;
        }
      }
    }
  }

  void push(size_t l) override {
    Layer& layer = *layers_[l];
    layer.under_way = layer.pieces.size();
    const float own = static_cast<float>(ps::MyRank() + 1) * scale_of(++layer.rounds);
    for (Piece& piece : layer.pieces) {
      const size_t last = piece.sum.size() - 1;
      piece.gradient[0] = piece.gradient[last] = own;
      piece.sum[0] = piece.sum[last] = std::numeric_limits<float>::quiet_NaN();
    }
    spoil_if_asked(static_cast<uint32_t>(ps::MyRank()), layer.gradient.data());
    for (Piece& piece : layer.pieces) {
      layer.requests.push_back(worker_.ZPushPull(piece.key, piece.gradient, &piece.sum, {}, 0,
                                                 [&layer] { --layer.under_way; }));
    }
  }

  double wait(size_t l) override {
    Layer& layer = *layers_[l];
    if (layer.requests.empty()) return 0;
    for (const int request : layer.requests) worker_.Wait(request);
    layer.requests.clear();
    const auto ranks = static_cast<float>(ps::NumWorkers());
    const float all = ranks * (ranks + 1) / 2 * scale_of(layer.rounds);
    for (const Piece& piece : layer.pieces) {
      const bool right = piece.sum[0] == all && piece.sum[piece.sum.size() - 1] == all;
      wrong_ += right ? 0 : 1;
    }
    return 0;
  }

  bool is_back(size_t l) override {
    return !layers_[l]->requests.empty() && layers_[l]->under_way == 0;
  }

  uint64_t wrong() const override { return wrong_; }

 private:
  ps::KVWorker<float> worker_;
  std::vector<std::unique_ptr<Layer>> layers_;
  uint64_t wrong_ = 0;
};

struct Options {
  Net net;
  WalkOptions walk;
  bool tensors = false;
};

bool parse_seconds(std::string_view text, double& seconds) {
  const auto parsed = std::from_chars(text.data(), text.data() + text.size(), seconds);
  return parsed.ec == std::errc() && parsed.ptr == text.data() + text.size() && seconds > 0 &&
         seconds < 1e6;
}

bool parse_options(int argc, char** argv, Options& o) {
  if (argc != 6 || std::getenv("DMLC_ROLE") == nullptr) return false;
  const std::string_view pieces = argv[5];
  o.tensors = pieces == "tensors";
  return parse_seconds(argv[2], o.walk.compute_s) && parse(argv[3], 0, 1000, o.walk.warmup) &&
         parse(argv[4], 1, 1000, o.walk.iterations) && (o.tensors || pieces == "mib");
}

void work(const Options& o) {
  PsLite exchange(o.net, o.tensors);
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup);
  nlohmann::json row = json_of(walk(o.net, o.walk, exchange));
  uint64_t elements = 0;
  for (const KeySpec& key : o.net.table.keys) elements += key.elements;
  row["rank"] = ps::MyRank();
  row["job_bytes"] = elements * sizeof(float);
  std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup);
}

}  // namespace
}  // namespace phub::layers

int main(int argc, char** argv) {
  phub::layers::Options o;
  if (!phub::layers::parse_options(argc, argv, o)) {
    std::fprintf(stderr,
                 "usage: DMLC_ROLE=worker … layers_ps_lite MODEL COMPUTE_S WARMUP ITERATIONS "
                 "tensors|mib\n");
    return 2;
  }
  try {
    o.net = phub::layers::net(argv[1]);
    ps::Start(0, "layers_ps_lite");
    if (ps::IsServer()) phub::serve_sums();
    if (ps::IsWorker()) phub::layers::work(o);
    ps::Finalize(0, true);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "layers_ps_lite: %s\n", error.what());
    return 1;
  }
}

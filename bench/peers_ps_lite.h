// A server of ps-lite that sums, for peers_ps_lite and layers_ps_lite.
#pragma once

#include <ps/ps.h>

#include <unordered_map>
#include <vector>

namespace phub {

// Of one piece and round. The first gradient's own memory takes the sum, and goes when the last
// answer has been sent.
struct Sum {
  ps::SArray<float> values;
  std::vector<ps::KVMeta> requests;
};

// Called by ps-lite, one request after the other.
class Sums {
 public:
  void operator()(const ps::KVMeta& request, const ps::KVPairs<float>& pushed,
                  ps::KVServer<float>* server) {
    const ps::Key key = pushed.keys[0];
    Sum& sum = sums_[key];
    if (sum.requests.empty()) {
      sum.values = pushed.vals;
    } else {
      float* to = sum.values.data();
      const float* from = pushed.vals.data();
      for (size_t i = 0; i < pushed.vals.size(); ++i) to[i] += from[i];
    }
    sum.requests.push_back(request);
    if (sum.requests.size() < static_cast<size_t>(ps::NumWorkers())) return;
    ps::KVPairs<float> answer;
    answer.keys = pushed.keys;
    answer.vals = sum.values;
    for (const ps::KVMeta& each : sum.requests) server->Response(each, answer);
    sums_.erase(key);
  }

 private:
  std::unordered_map<ps::Key, Sum> sums_;
};

// Makes this process's server, which lives until ps::Finalize(). REQUIRES: ps::Start() was called,
// and this is a server.
inline void serve_sums() {
  auto* const server = new ps::KVServer<float>(0);
  server->set_request_handle(Sums());
  ps::RegisterExitCallback([server] { delete server; });
}

}  // namespace phub

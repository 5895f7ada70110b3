// An exchange without a box: a thread of this process applies the optimizer. The results are
// bit-identical to those of a job with one worker.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "transport/control/job_spec.h"
#include "worker/geeps/exchange.h"

namespace phub::geeps {

class StandaloneExchange final : public Exchange {
 public:
  // `initial` has the parameters of all keys one after another; empty: zeros. Only those fields of
  // `spec` count on which the arithmetic depends: keys, optimizer, hyper, schedule, consistency,
  // on_nonfinite, and chunk_elements, the unit that on_nonfinite excludes. Throws Error(kInvalid)
  // if the job is for several workers, or not f32, or the server would refuse it; or if it excludes
  // values that are not finite and has factors, whose chunks the server cuts.
  explicit StandaloneExchange(const JobSpec& spec, std::span<const float> initial = {});
  ~StandaloneExchange() override;  // drops pushes in progress

  size_t keys() const override;
  const std::string& name(size_t key) const override;
  size_t elements(size_t key) const override;
  uint32_t samples(size_t key) const override;
  std::span<float> gradient(size_t key) override;
  std::span<const float> parameters(size_t key) const override;

  void push(size_t key, int32_t priority) override;
  void push_factors(size_t key, std::span<const FactorPairs> factors, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override;
  void stop() override;

  void get_state(std::span<KeyState> states) override;
  void set_state(std::span<const KeyState> states) override;
  std::optional<uint32_t> slack() const override;
  uint32_t rank() const override { return 0; }
  uint32_t world_size() const override { return 1; }

  // Changes hyperparameters from the first round that no key has begun. See Worker::set_hyper().
  void set_hyper(const std::map<std::string, double>& values);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub::geeps

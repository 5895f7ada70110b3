// An exchange without a box: a thread of this process applies the optimizer. The bits are those of
// a job with one worker.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>

#include "transport/job_spec.h"
#include "worker/geeps/exchange.h"

namespace phub::geeps {

class StandaloneExchange final : public Exchange {
 public:
  // The initial parameters of all keys one after another; none: zeros. Of the job counts what its
  // arithmetic depends on: keys, optimizer, hyper, schedule, consistency, on_nonfinite (and
  // chunk_elements: what is left out). Throws Error(kInvalid): the job is for several workers, or
  // not f32, or the server would refuse it.
  explicit StandaloneExchange(const JobSpec& spec, std::span<const float> initial = {});
  ~StandaloneExchange() override;  // drops what was pushed and is not yet here

  size_t keys() const override;
  const std::string& name(size_t key) const override;
  size_t elements(size_t key) const override;
  std::span<float> gradient(size_t key) override;
  std::span<const float> parameters(size_t key) const override;

  void push(size_t key, int32_t priority) override;
  void push_null(size_t key) override;
  std::optional<size_t> next() override;
  void stop() override;

  std::optional<uint32_t> slack() const override;
  uint32_t rank() const override { return 0; }
  uint32_t world_size() const override { return 1; }

  // Hyperparameters for the next round that no key has begun. See Worker::set_hyper().
  void set_hyper(const std::map<std::string, double>& values);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace phub::geeps

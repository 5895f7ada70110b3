#include <CLI/CLI.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "kernels/trust.h"
#include "kernels/whole_key.h"
#include "worker/examples/geeps/training.h"
#include "worker/examples/numbers.h"
#include "worker/examples/program.h"

namespace phub::examples {
namespace {

std::vector<std::string> optimizers() {
  std::vector<std::string> names;
  for (const std::string_view name : kernels::optimizer_names()) {
    const kernels::Optimizer optimizer = *kernels::parse_optimizer(name);
    // Without a server there are no steps by whole keys; "none" makes no steps.
    if (optimizer != kernels::Optimizer::kNone && !kernels::adapts(optimizer) &&
        !kernels::takes_whole_keys(optimizer)) {
      names.emplace_back(name);
    }
  }
  return names;
}

void add_device_options(CLI::App& app, TrainingOptions& o) {
  const std::string group = "Devices";
  app.add_option("--device", o.device, "host, cuda or cuda:N")->group(group)->capture_default_str();
  app.add_option("--devices", o.devices, "Devices of this process (cuda: from N on)")
      ->group(group)
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  app.add_option("--budget", o.budget,
                 "Memory of each device: 64M, 35% of what everything takes, or least")
      ->group(group)
      ->capture_default_str();
  app.add_option("--bandwidth", o.bandwidth, "Of the host device's copies: 2G; 0: as it is")
      ->group(group)
      ->transform(CLI::AsSizeValue(false));
  app.add_option("--latency", o.latency_us, "Of each of its copies, microseconds")->group(group);
  app.add_option("--gather", o.gather, "The sequence of calls: in a virtual or the first iteration")
      ->group(group)
      ->check(CLI::IsMember({"virtual", "first", "none"}))
      ->capture_default_str();
  app.add_option_function<std::string>(
         "--prefetch", [&o](const std::string& word) { o.prefetch = word == "on"; },
         "Buffers are filled ahead of time")
      ->group(group)
      ->check(CLI::IsMember({"on", "off"}))
      ->default_str("on");
  app.add_flag("--peak-first", o.peak_first, "Rows are pinned in the order of Algorithm 2")
      ->group(group);
  app.add_option("--partitions", o.partitions,
                 "Sets of copying threads, which share the pieces of tables")
      ->group(group)
      ->check(positive())
      ->capture_default_str();
  app.add_option("--piece", o.share.piece_bytes,
                 "Of tables, what is exchanged and copied by itself: 64K; 0: they are whole")
      ->group(group)
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_flag("--poison", o.poison, "Memory that holds nothing is NaN")->group(group);
  app.add_option("--trace", o.trace, "Write a trace for ui.perfetto.dev; %r is the rank")
      ->group(group);
}

void add_job_options(CLI::App& app, TrainingOptions& o) {
  const std::string group = "Job";
  CLI::Option* alone = app.add_flag("--standalone", o.standalone, "Without a box")->group(group);
  CLI::Option* store =
      app.add_flag("--store", o.store, "Parameters are rows of an IterStore, of plain SGD")
          ->group(group);
  app.add_option("--gradients", o.worker.spec.gradient_dtype,
                 "Their format on the wire: f32, bf16, f16, int8, fp8-e4m3 …")
      ->group(group)
      ->excludes(alone, store)
      ->capture_default_str();
  app.add_option("--results", o.worker.spec.parameter_dtype, "That of parameters that come back")
      ->group(group)
      ->excludes(alone, store)
      ->capture_default_str();
  app.add_option("--server", o.worker.server, "HOST:PORT of phub serve")
      ->group(group)
      ->capture_default_str();
  app.add_option("--job", o.worker.spec.name, "Its name")->group(group)->capture_default_str();
  app.add_option("--world", o.worker.spec.world_size, "Processes")
      ->group(group)
      ->check(CLI::Range(1u, 64u))
      ->capture_default_str();
  app.add_option("--rank", o.worker.rank, "This process's; -1: the server chooses")
      ->group(group)
      ->capture_default_str();
  app.add_option("--consistency", o.consistency)
      ->group(group)
      ->check(CLI::IsMember({"bsp", "ssp", "async"}))
      ->capture_default_str();
  app.add_option("--slack", o.slack, "Clocks ahead of the slowest, with ssp")->group(group);
}

}  // namespace

void parse(CLI::App& app, TrainingOptions& o, int argc, char** argv) {
  add_device_options(app, o);
  add_job_options(app, o);
  app.add_option("--iterations", o.clocks, "Clocks in all")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--batch", o.share.samples, "Samples of a device's mini-batch")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--mini-batches", o.share.mini_batches, "Per iteration")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--seed", o.share.seed, "Of the initial parameters and the mini-batches")
      ->check(not_negative())
      ->capture_default_str();
  app.add_option("--optimizer", o.optimizer)
      ->check(CLI::IsMember(optimizers()))
      ->capture_default_str();
  app.add_option("--hyper", o.hyper, "NAME=VALUE: its other hyperparameters, and lr's schedules");
  app.add_option("--lr", o.lr, "Learning rate")->check(positive())->capture_default_str();
  CLI::Option* decay =
      app.add_option("--lr-decay", o.lr_decay, "Its factor after every --lr-every iterations")
          ->check(positive())
          ->capture_default_str();
  CLI::Option* every =
      app.add_option("--lr-every", o.lr_every)->check(not_negative())->capture_default_str();
  decay->needs(every);
  every->needs(decay);
  app.add_option("--report-every", o.report_every, "Iterations between reports")
      ->check(positive())
      ->capture_default_str();
  app.add_option("--out", o.out, "Write the final parameters to this file; %r is the rank");
  CLI::Option* checkpoint =
      app.add_option("--checkpoint", o.checkpoint, "This file keeps the state; %r is the rank");
  app.add_option("--checkpoint-every", o.checkpoint_every, "Iterations; 0: only at the end")
      ->needs(checkpoint)
      ->check(not_negative())
      ->capture_default_str();
  app.add_flag("--resume", o.resume, "Go on from the checkpoint")->needs(checkpoint);
  parse_or_exit(app, argc, argv);
}

}  // namespace phub::examples

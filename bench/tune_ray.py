"""Ray Tune's population based training of what bench/tune trains: the clocks of all its members until one is there.

  tune_ray.py SEED ARGUMENTS       ARGUMENTS: those of bench/tune, as JSON. Prints a line of JSON

A process of its own: Ray keeps threads and processes. Members train in turns of --turn clocks, all at the same time, and
the population is of --members; what is drawn depends on the seed and the losses alone (synch)."""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "ray[tune]==2.60.0"
SILENT = {"RAY_AIR_NEW_OUTPUT": "0", "RAY_DEDUP_LOGS": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_CHDIR_TO_TRIAL_DIR": "0",
          "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "RAY_TRAIN_ENABLE_V2_MIGRATION_WARNINGS": "0"}


def install(python, folder):
    """Ray of PyPI, unless it is there. Returns why it cannot be had, or nothing. What is half installed has another name."""
    installed = folder / "installed"
    if installed.exists() and installed.read_text() == PACKAGE:
        return None
    print(f"installing {PACKAGE} in {folder}", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as fresh:
        target = Path(fresh) / folder.name
        done = subprocess.run([python, "-m", "pip", "install", "-q", "--target", str(target), PACKAGE], capture_output=True,
                              text=True, check=False)
        if done.returncode != 0:
            return done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "pip failed"
        (target / "installed").write_text(PACKAGE)
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    return None


class Failure(Exception):
    pass


def clocks_of(python, folder, seed, arguments):
    """Until a member is there; None: none was within most_clocks. Throws Failure."""
    environment = os.environ | SILENT | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([python, __file__, str(seed), json.dumps(vars(arguments))], env=environment, capture_output=True,
                          text=True, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith('{"clocks"')]
    if done.returncode != 0 or not found:
        raise Failure(f"Ray failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(found[-1])["clocks"]


def member_of(seed, arguments):
    import torch
    from ray import tune
    from tune_tasks import MOMENTUM, TASKS, fresh, judged

    class Member(tune.Trainable):
        def setup(self, config):
            self.task = TASKS[arguments.model](arguments)
            self.model = fresh(self.task, seed)
            self.optimizer = torch.optim.SGD(self.model.parameters(), config["lr"], MOMENTUM)
            self.clock = 0

        def reset_config(self, new_config):
            self.setup(new_config)
            return True

        def step(self):
            """A turn. `there`: at which clock the loss was reached, or -1."""
            total, ranks = 0.0, arguments.ranks
            for _ in range(arguments.turn):
                if self.clock % arguments.every == 0 and judged(self.task, self.model) <= arguments.loss:
                    return {"loss": total, "there": self.clock}
                self.optimizer.zero_grad()
                batches = [self.task.batch(rank, ranks, seed * 100_003 + self.clock) for rank in range(ranks)]
                loss = sum(self.task.loss(self.model, batch) for batch in batches) / ranks
                loss.backward()
                self.optimizer.step()
                self.clock += 1
                total += loss.item()
            mean = total / arguments.turn
            return {"loss": mean if mean < 1e6 else 1e6, "there": -1}

        def save_checkpoint(self, checkpoint_dir):
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "clock": self.clock},
                       os.path.join(checkpoint_dir, "member"))

        def load_checkpoint(self, checkpoint_dir):
            kept = torch.load(os.path.join(checkpoint_dir, "member"), weights_only=True)
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            self.optimizer.param_groups[0]["lr"] = self.config["lr"]
            self.clock = kept["clock"]

    return Member


class Turns:
    """When the members' search ends. A turn counts when all of them have reported it, so that the earliest of a turn is
    found in whatever order they report."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.there = {}  # of each member, a value for each of its turns: the clock at which it was there, or -1

    def report(self, member, there):
        self.there.setdefault(member, []).append(there)

    def whole(self):
        """The turns that all members have reported."""
        if len(self.there) < self.arguments.members:
            return 0
        return min(map(len, self.there.values()))

    def first(self):
        """The earliest clock of a member in those turns; None: none was there."""
        found = [there for each in self.there.values() for there in each[:self.whole()] if there >= 0]
        return min(found, default=None)

    def over(self):
        clocks = self.whole() * self.arguments.members * self.arguments.turn
        return self.first() is not None or clocks >= self.arguments.most_clocks

    def clocks(self):
        """Of all members."""
        first = self.first()
        return None if first is None else self.arguments.members * first


def search(seed, arguments):
    import numpy
    import ray
    from ray import tune

    turns = Turns(arguments)

    class UntilOneIsThere(tune.Stopper):
        def __call__(self, trial_id, result):
            turns.report(trial_id, result["there"])
            return False

        def stop_all(self):
            return turns.over()

    random.seed(seed)
    numpy.random.seed(seed)
    rates = tune.loguniform(arguments.low, arguments.high)
    with tempfile.TemporaryDirectory(prefix="phub-ray-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False,
                     _temp_dir=os.path.join(folder, "ray"))
            scheduler = tune.schedulers.PopulationBasedTraining(
                time_attr="training_iteration", metric="loss", mode="min", perturbation_interval=1,
                hyperparam_mutations={"lr": rates}, synch=True)
            tuner = tune.Tuner(
                tune.with_resources(member_of(seed, arguments), {"cpu": 2 / arguments.members}),
                param_space={"lr": rates},
                tune_config=tune.TuneConfig(scheduler=scheduler, num_samples=arguments.members, reuse_actors=True),
                run_config=tune.RunConfig(stop=UntilOneIsThere(), storage_path=folder, name="population", verbose=0,
                                          checkpoint_config=tune.CheckpointConfig(num_to_keep=2)))
            tuner.fit()
        finally:
            ray.shutdown()
    return turns.clocks()


def main():
    seed, arguments = int(sys.argv[1]), argparse.Namespace(**json.loads(sys.argv[2]))
    print(json.dumps({"clocks": search(seed, arguments)}), flush=True)


if __name__ == "__main__":
    main()

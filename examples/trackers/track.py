#!/usr/bin/env python3
"""Logs a run to a tracker from its files alone: while it trains (--follow), or afterwards.

    pip install trackio pandas && examples/trackers/track.py runs/quickstart --follow
    pip install wandb          && examples/trackers/track.py runs/quickstart --to wandb     # offline, in ./wandb
    pip install mlflow         && examples/trackers/track.py runs/quickstart --to mlflow    # in ./mlruns.db

Metrics are logged with the run's steps, trajectories as one table a file.
"""
import argparse
import json
import os
import time
import tomllib
from pathlib import Path


def settings(table, prefix=""):
    """The recipe's values by dotted key."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from settings(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


class Trackio:
    def __init__(self, project, name, config):
        import pandas
        import trackio

        self.trackio, self.frame = trackio, pandas.DataFrame
        trackio.init(project=project, name=name, config=config)

    def metrics(self, step, values):
        self.trackio.log(values, step=step)

    def table(self, name, step, rows):
        self.trackio.log({name: self.trackio.Table(dataframe=self.frame(rows))}, step=step)

    def finish(self):
        self.trackio.finish()


class Wandb:
    def __init__(self, project, name, config):
        import wandb

        os.environ.setdefault("WANDB_MODE", "offline")
        self.wandb, self.run = wandb, wandb.init(project=project, name=name, config=config)
        # Rows of several phases may have one step, so the step is a value of its own.
        self.run.define_metric("*", step_metric="step")

    def metrics(self, step, values):
        self.run.log({**values, "step": step})

    def table(self, name, step, rows):
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({name: table, "step": step})

    def finish(self):
        self.run.finish()


class Mlflow:
    def __init__(self, project, name, config):
        import mlflow

        self.mlflow = mlflow
        mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlruns.db"))
        mlflow.set_experiment(project)
        mlflow.start_run(run_name=name)
        mlflow.log_params({key: str(value)[:500] for key, value in config.items()})

    def metrics(self, step, values):
        # The names of MLflow have no @.
        self.mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in values.items()}, step=step)

    def table(self, name, step, rows):
        columns = {key: [row[key] for row in rows] for key in rows[0]}
        self.mlflow.log_table(columns, artifact_file=f"{name.replace('/', '-')}-{step:06}.json")

    def finish(self):
        self.mlflow.end_run()


TRACKERS = {"trackio": Trackio, "wandb": Wandb, "mlflow": Mlflow}


def new_lines(path, place):
    """The whole lines after byte `place`, and the byte after the last of them. A run adds whole lines."""
    with open(path, "rb") as file:
        file.seek(place)
        text = file.read()
    end = text.rfind(b"\n") + 1
    return text[:end].splitlines(), place + end


def trajectory(line):
    row = json.loads(line)
    text = "\n\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
    keys = ("problem_id", "prompt", "sample", "reward", "success", "outcome")
    rewards = json.dumps(row.get("rewards", {}))
    return {**{key: row[key] for key in keys}, "rewards": rewards, "tokens": sum(row["mask"]), "text": text}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--to", choices=TRACKERS, default="trackio", help="the tracker (trackio)")
    parser.add_argument("--project", default="rloss", help="the tracker's project (rloss)")
    parser.add_argument("--follow", action="store_true", help="log on until the run is done; it may begin later")
    arguments = parser.parse_args()
    run, metrics = arguments.run, arguments.run / "metrics.jsonl"
    while arguments.follow and not metrics.is_file():
        time.sleep(1)
    if not metrics.is_file():
        parser.error(f"{metrics}: no such file; name the folder of a run")
    recipe = tomllib.loads((run / "recipe.toml").read_text())
    folder = run.resolve()
    # The folder of an evaluation is RUN/eval/step-N.
    names = folder.parts[-3:] if folder.parent.name in ("eval", "rollout") else folder.parts[-1:]
    try:
        tracker = TRACKERS[arguments.to](arguments.project, "-".join(names), dict(settings(recipe)))
    except ModuleNotFoundError as error:
        parser.error(f"{error}; pip install {arguments.to}{' pandas' if arguments.to == 'trackio' else ''}, or name another with --to")
    steps, place, last, tables = recipe["train"]["steps"], 0, 0, set()
    while True:
        # A stopped run that is resumed may have fewer rows; those that were logged stay.
        lines, place = new_lines(metrics, min(place, metrics.stat().st_size))
        for line in lines:
            row = json.loads(line)
            step, phase = row.pop("step"), row.pop("phase")
            # "NaN" and "Infinity" are texts in JSON.
            tracker.metrics(step, {f"{phase}/{name}": float(value) for name, value in row.items()})
            last = max(last, step if phase == "rl" else 0)
        # A file of trajectories is written whole, before the step's row or with the evaluation's.
        for file in sorted((run / "trajectories").glob("*.jsonl")):
            if file.name not in tables and not file.name.startswith("."):
                tables.add(file.name)
                rows = [trajectory(line) for line in file.read_text().splitlines()]
                kind, step = file.stem.rsplit("-", 1)
                if rows:
                    tracker.table(f"trajectories/{kind}", int(step), rows)
        if not arguments.follow or last >= steps:
            break
        time.sleep(2)
    tracker.finish()
    done = f"{last} of {steps} steps" if last else "no step of training"
    print(f"{run}: {done}, {len(tables)} tables of trajectories")


if __name__ == "__main__":
    main()

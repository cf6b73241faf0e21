"""The numbers of a run: metrics.jsonl, TensorBoard under Ai2's names, FLOPs and MFU, the progress bar, curves.png.

A line of metrics.jsonl is one JSON object: the step and the numbers of its update, or of the held-out evaluation after
it. TensorBoard holds the same. Names that are not ours are those of OLMo-core's dashboard. No jax: compare.py reads and
writes here, too.
"""

import json
import math
import os
import shlex
import shutil
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

import data
from processes import RunFailed, clock, replace_file, say, speaks

# bf16 FLOP/s of one JAX device: a v5p chip; half an Ironwood chip (2,307 TFLOP/s); an H100 as OLMo-core counts it, and
# an H200, which has the same cores; an RTX 4090 that adds up in fp32 (NVIDIA's "Ada GPU Architecture").
PEAK_FLOPS = {"TPU v5": 459e12, "TPU v5p": 459e12, "TPU v7x": 1153.5e12, "TPU7x": 1153.5e12,
              "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H200": 989.5e12, "NVIDIA GeForce RTX 4090": 165.2e12}  # fmt: skip


# --------------------------------------------------------------------------------------------------- files of a run


class Board:
    """A TensorBoard event file of scalars. What is flushed is on disk: the writer is synchronous."""

    def __init__(self, folder: Path, purge_from: int | None = None, name: str = "events"):
        """`purge_from`: TensorBoard is told to forget what earlier files hold from this step on."""
        # Here: tensorboardX imports torch and the clients of two clouds where they are installed, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self.Event, self.SessionLog, self.Summary = Event, SessionLog, Summary
        folder.mkdir(parents=True, exist_ok=True)
        self.events = EventsWriter(str((folder / name).absolute()))  # absolute: "s3:x" would be an address
        self.events.write_event(self.Event(wall_time=time.time(), step=purge_from or 0, file_version="brain.Event:2"))
        if purge_from is not None:
            start = self.SessionLog(status=self.SessionLog.START)
            self.events.write_event(self.Event(wall_time=time.time(), step=purge_from, session_log=start))

    def write(self, step: int, values: dict[str, float | int], wall_time: float | None = None) -> None:
        scalars = [self.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        wall_time = time.time() if wall_time is None else wall_time
        self.events.write_event(self.Event(wall_time=wall_time, step=step, summary=self.Summary(value=scalars)))

    def write_picture(self, step: int, tag: str, path: Path) -> None:
        """A PNG, whose header says its size."""
        content = path.read_bytes()
        width, height = struct.unpack(">II", content[16:24])
        image = self.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=content)
        summary = self.Summary(value=[self.Summary.Value(tag=tag, image=image)])
        self.events.write_event(self.Event(wall_time=time.time(), step=step, summary=summary))

    def flush(self) -> None:
        self.events.flush()

    def close(self) -> None:
        self.events.close()


class MetricsLog:
    """metrics.jsonl and TensorBoard of a run, every step. Only process 0 writes.

    Starting after step N forgets what a dead run had logged past N: the file is cut off there, TensorBoard is told to
    purge. Both are written in `folder`: the run directory, or a local one from which `sync` copies them there.
    """

    def __init__(self, run_dir: Path, after_step: int, folder: Path):
        self.enabled = speaks()
        self.evaluated = 0  # newest step whose held-out evaluation is in the file
        if not self.enabled:
            return
        self.run_dir, self.folder, self.path = run_dir, folder, folder / "metrics.jsonl"
        if folder != run_dir:  # what an earlier start left there has been copied, or lies behind the checkpoint
            shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        with data.replacing(self.path) as kept:
            for line, row in self.lines_up_to(after_step):
                kept.write(line.encode())
                self.evaluated = row["step"] if is_evaluation(row) else self.evaluated
        self.file = open(self.path, "a", buffering=1)  # a line is there to be read as soon as it is written
        self.board = Board(folder / "tensorboard", purge_from=after_step + 1)

    def lines_up_to(self, step: int) -> Iterator[tuple[str, dict]]:
        last, path = 0, self.run_dir / "metrics.jsonl"
        try:
            for line, row in read_metrics(path):
                if row["step"] <= step:
                    last = max(last, row["step"])
                    yield line, row
        except ValueError as e:
            if last < step:
                raise
            say(f"{e}; it lies behind the checkpoint and is left out")  # a machine that lost power wrote it in part
        if last < step:
            say(f"{path}: holds steps up to {last}, the checkpoint those up to {step}: a gap remains")

    def write(self, step: int, values: dict[str, float | int]) -> None:
        if not self.enabled:
            return
        finite = {tag: value if np.isfinite(value) else None for tag, value in values.items()}  # JSON has no NaN
        self.file.write(json.dumps({"step": step} | finite) + "\n")
        self.board.write(step, values)
        self.board.flush()

    def sync(self) -> None:
        """What has been written so far is on disk, in the run directory, when this returns."""
        if not self.enabled:
            return
        self.file.flush()
        os.fsync(self.file.fileno())
        self.board.flush()
        if self.folder != self.run_dir:
            for path in (self.path, *(self.folder / "tensorboard").iterdir()):
                with data.replacing(self.run_dir / path.relative_to(self.folder)) as target, open(path, "rb") as ours:
                    shutil.copyfileobj(ours, target)

    def close(self) -> None:
        if self.enabled:
            self.sync()
            self.file.close()
            self.board.close()


def read_metrics(path: Path) -> Iterator[tuple[str, dict]]:
    """(line, its content) of every whole line. A last line without its end was left by a killed writer."""
    if path.exists():
        with open(path, errors="backslashreplace") as lines:  # a byte that is not UTF-8 makes a line that is no JSON
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    return
                try:
                    row = json.loads(line)
                    if type(row["step"]) is not int:
                        raise TypeError("step")
                except (ValueError, TypeError, KeyError) as e:
                    raise ValueError(
                        f"{path}, line {number}: got {line[:40]!r}, expected a JSON object with a step"
                    ) from e
                yield line, row


def is_evaluation(row: dict) -> bool:
    return any(tag.startswith("eval/") for tag in row)


# ------------------------------------------------------------------------------------------------------ FLOPs and MFU


def flops_per_token(config, convention: str = "OLMo-core") -> float:
    """FLOPs of one token in one update, without recomputation:

        6 x weights of matmuls + sum over layers of 12 x heads x head_dim x keys that a query sees

    "OLMo-core" (nn/transformer/model.py:num_flops_per_token) counts every parameter but embeddings and block norms. Its
    keys are the window, or S. The other two count no padding rows and no norms. "full causal" (the case study) takes S/2
    keys in every layer, "window-correct" those that an average query sees. The 6 are forward and backward (2 + 4)."""
    model, S = config.model, config.data.sequence_length
    sizes = {name: n * config.parameter_uses[name] for name, n in config.parameter_sizes.items()}

    def keys(kind: str) -> float:  # of one layer
        window = min(model.window, S) if kind == "s" else S
        if convention == "OLMo-core":
            return window
        if convention == "full causal":
            return S / 2
        return (window * (window + 1) / 2 + (S - window) * window) / S  # an average query, its own key included

    if convention == "OLMo-core":
        weights = sum(n for name, n in sizes.items() if name not in ("embed", "attn_norm", "ffn_norm"))
    else:
        weights = sum(n for name, n in sizes.items() if name not in ("embed", "lm_head") and not name.endswith("norm"))
        weights += config.parameter_uses["lm_head"] * model.vocab_size * model.d_model
    return 6 * weights + 12 * model.n_heads * model.head_dim * sum(map(keys, model.kinds))


def utilisation(config, tokens_per_second: float, device_kind: str) -> dict[str, float]:
    """TFLOP/s of a device at this speed and, where its peak is known, MFU in percent."""
    values, peak = {}, PEAK_FLOPS.get(device_kind)
    for convention in ("full causal", "window-correct"):
        flops = flops_per_token(config, convention) * tokens_per_second
        values[f"throughput/device/TFLOPs ({convention})"] = flops / 1e12
        if peak:
            values[f"throughput/device/MFU ({convention})"] = 100 * flops / peak
    if peak:
        values["throughput/device/MFU"] = 100 * flops_per_token(config) * tokens_per_second / peak
    return values


# ------------------------------------------------------------------------------------------------- numbers of one step


def step_metrics(metrics: dict, step: int, instances_seen: int, config) -> dict[str, float | int]:
    """What the step computed, under Ai2's names. StepLog adds the timings."""
    S, B, sizes = config.data.sequence_length, config.data.global_batch, config.parameter_sizes
    total_tokens = instances_seen * S
    filtered, labels, ce = int(metrics["filtered"]), int(metrics["labels"]), float(metrics["ce"])
    unfiltered = (B - filtered) * (S - 1)  # labels
    padding = 1 - labels / unfiltered if config.data.mask_token is not None and unfiltered else None
    values = {
        "train/CE loss": ce,
        "train/PPL": float(np.exp(ce)) if ce < 10 else None,  # as OLMo-core: only where it means something
        "train/Z loss": config.loss.z_loss * float(metrics["z_unscaled"]),
        "train/Z loss unscaled": float(metrics["z_unscaled"]),
        "train/masked labels (%)": 1 - labels / (B * S),
        "train/masked instances (%)": filtered / B if config.data.repetition_filter else None,
        "train/padding labels (%)": padding,  # ours: the share of data.mask_token in instances that were not filtered
        "optim/total grad norm": float(metrics["grad_norm"]),
        "optim/LR (group 0)": float(metrics["lr"]),
        "optim/LR (group 1)": float(metrics["lr"]),
        "optim/step skipped": int(metrics["skipped"]),
        "optim/step_skipped": int(metrics["skipped"]),  # the case study's name
        "throughput/total tokens": total_tokens,
        "throughput/total petaflops": total_tokens * flops_per_token(config) / 1e15,
        "throughput/chinchilla multiple": total_tokens / (20 * (sum(sizes.values()) - sizes["embed"])),
        "perf/total_tokens": total_tokens,  # the case study's name
    }
    values |= {tag: float(x) for tag, x in metrics.items() if tag.startswith("train/")}  # of an experiment
    return {tag: value for tag, value in values.items() if value is not None}


def evaluation_metrics(results: dict[str, dict]) -> dict[str, float]:
    values = {}
    for label, r in results.items():
        values |= {f"eval/lm/{label}/CE loss": r["ce"], f"eval/lm/{label}/PPL": r["perplexity"]}
    return values


class StepLog:
    """Logs each step while the device computes the next one, and ends a run whose steps are not finite.

    `put` takes the numbers of the step in flight, which may not be computed yet, and logs the step before it; `flush`
    waits for the one in flight.
    """

    def __init__(self, config, log: MetricsLog, progress, alive, checkpoints, devices: int, device_kind: str):
        self.config, self.log, self.progress, self.alive, self.checkpoints = config, log, progress, alive, checkpoints
        self.devices, self.device_kind, self.skips = devices, device_kind, Skips(config.optim.skip_sigma)
        self.pending = None  # (step, instances seen, metrics on the device, seconds of loading) of the step in flight
        self.finished_at: float | None = None
        self.seconds_a_step: list[float] = []

    def put(self, step: int, instances_seen: int, metrics: dict, loading: float) -> None:
        self.flush()
        self.pending = (step, instances_seen, metrics, loading)

    def flush(self) -> None:
        if self.pending is None:
            return
        (step, instances_seen, metrics, loading), self.pending = self.pending, None
        metrics = {name: np.asarray(value) for name, value in metrics.items()}  # waits for the device
        now, before = time.perf_counter(), self.finished_at
        self.finished_at = now
        values = step_metrics(metrics, step, instances_seen, self.config) | self.checkpoints.durations()
        if before is None:  # the first step compiles and is not timed
            self.timed_from, self.timed_after = now, step
        else:
            self.seconds_a_step.append(now - before)
            average = (now - self.timed_from) / (step - self.timed_after)  # with evaluations and saves
            values |= self.speed(now - before, average, loading)
        self.log.write(step, values)
        self.progress.update(step, values, self.config.tokens_a_step, self.seconds_a_step[-20:])
        self.alive.tick()
        self.judge(step, metrics)

    def skip_time(self) -> None:
        """The next step's time begins now: an evaluation does not count."""
        if self.finished_at is not None:
            self.finished_at = time.perf_counter()

    def speed(self, seconds: float, average: float, loading: float) -> dict[str, float]:
        tokens, flops = self.config.tokens_a_step / self.devices, flops_per_token(self.config)
        return {
            "throughput/device/TPS": tokens / seconds,
            "throughput/device/TPS (actual avg)": tokens / average,
            "throughput/device/BPS": 1 / seconds,
            "throughput/device/BPS (actual avg)": 1 / average,
            "throughput/device/flopsPS": tokens / seconds * flops,
            "throughput/device/flopsPS (actual avg)": tokens / average * flops,
            "throughput/device/data loading (s)": loading,
            "throughput/device/data loading (%)": 100 * loading / seconds,
            **utilisation(self.config, tokens / seconds, self.device_kind),
        }

    def judge(self, step: int, metrics: dict) -> None:
        """Says what was skipped and why; RunFailed after too many steps in a row that were not finite."""
        streak = int(metrics["nonfinite_in_a_row"])
        self.skips(step, bool(metrics["skipped"]) and not streak, float(metrics["ce"]), float(metrics["grad_norm"]))
        if not streak:
            return
        leaf = int(metrics["first_nonfinite_gradient"])
        source = f"the gradient of {list(self.config.parameter_sizes)[leaf]}" if leaf >= 0 else "the loss"
        say(f"step {step} skipped: {source} is not finite ({streak} in a row)")
        if streak >= self.config.optim.max_nonfinite_steps:
            saved = self.checkpoints.step
            raise RunFailed(
                f"step {step}: {streak} non-finite steps in a row (optim.max_nonfinite_steps); the parameters are those "
                f"of step {step - streak}; last checkpoint: {self.checkpoints.folder / str(saved) if saved else 'none'}"
            )

    def log_what_is_done(self, kind, *_) -> None:
        """When something else fails, the step in flight is logged if it is, or soon will be, done. A step that waits for
        a process that has ended never will be."""
        deadline = time.monotonic() + 10
        while kind is not None and issubclass(kind, Exception) and self.pending is not None:
            if all(x.is_ready() for x in self.pending[2].values()):
                self.flush()
            elif time.monotonic() > deadline:
                return
            time.sleep(0.01)


class Skips:
    """Says which finite steps the skip rule left out: each if they are rare, else a count a minute; a streak warns."""

    def __init__(self, sigma: float):
        self.sigma, self.streak, self.unsaid, self.said_at = sigma, 0, 0, -math.inf

    def __call__(self, step: int, skipped: bool, loss: float, grad_norm: float) -> None:
        self.streak = self.streak + 1 if skipped else 0
        self.unsaid += skipped
        long_streak = self.streak >= 4 and self.streak & (self.streak - 1) == 0  # the 4th, 8th, 16th, ... in a row
        if not skipped or not (long_streak or time.monotonic() - self.said_at > 60):
            return
        more = f" ({self.unsaid} since the last such line)" if self.unsaid > 1 else ""
        warning = f"WARNING: {self.streak} steps in a row skipped: nothing is learnt; " if long_streak else ""
        say(f"{warning}step {step} skipped: CE {loss:.3f} or gradient norm {grad_norm:.2f} is more than {self.sigma:g} "
            f"standard deviations above its last values{more}")  # fmt: skip
        self.unsaid, self.said_at = 0, time.monotonic()


# ------------------------------------------------------------------------------------------------- what a person sees


class Progress:
    """A bar on a terminal, a line every run.log_every steps elsewhere; on standard error. The bar begins with the first
    step that is done, so that its time left does not count the compilation."""

    def __init__(self, total: int, every: int):
        self.every, self.total, self.bar = every, total, None
        self.on_terminal = sys.stderr.isatty() and speaks()

    def update(self, step: int, values: dict, tokens_a_step: int, recent_seconds: list[float]) -> None:
        seconds = float(np.mean(recent_seconds)) if recent_seconds else None
        speed = f"{tokens_a_step / seconds:,.0f} tok/s" if seconds else "compiled"
        text = f"CE {values['train/CE loss']:.3f}  {speed}"
        if self.on_terminal:
            if self.bar is None:
                self.bar = tqdm(total=self.total, initial=step, unit="step", dynamic_ncols=True, smoothing=0.05)
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(step - self.bar.n)
        elif step % self.every == 0 or step == self.total:
            left = f"{clock((self.total - step) * seconds)} left" if seconds else ""
            norm, lr = values["optim/total grad norm"], values["optim/LR (group 0)"]
            say(f"step {step}/{self.total}  {text}  grad norm {norm:.2f}  LR {lr:.3g}  {left}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def read_summary(run_dir: Path) -> dict:
    """summary.json: of a run that was extended since, with an earlier step. Empty if there is none."""
    path = run_dir / "summary.json"
    try:
        return json.loads(path.read_text()) if path.is_file() else {}
    except ValueError:  # left empty by a machine that lost power: it is written again
        return {}


def summarise(
    run_dir: Path, state, config, held_out: dict | None, seconds_a_step: list[float], sample: str | None
) -> dict:
    """Write summary.json and curves.png. What metrics.jsonl does not tell is null, as when only the checkpoints were
    copied."""
    last, skipped = {}, []
    for _, row in read_metrics(run_dir / "metrics.jsonl"):
        last |= row
        skipped += [row["optim/step_skipped"]] if "optim/step_skipped" in row else []
    summary = {
        "step": state.step,
        "parameters": sum(config.parameter_sizes.values()),
        "ce": last.get("train/CE loss"),
        "heldout_ce": last.get("eval/lm/all/CE loss"),
        "heldout": {
            tag.split("/")[2]: x for tag, x in last.items() if tag.startswith("eval/lm/") and tag.endswith("/CE loss")
        },
        "heldout_of": held_out,
        "tokens": state.instances_seen * config.data.sequence_length,
        "tokens_per_second": round(config.tokens_a_step / float(np.median(seconds_a_step)), 1)
        if seconds_a_step
        else None,
        "skipped_steps": sum(skipped) if skipped else None,
        **{tag: last[tag] for tag in last if tag.startswith(("throughput/device/TFLOPs", "throughput/device/MFU"))},
        "sample": sample,
        "sample_prompt": config.run.sample_prompt,
        "checkpoint": str(run_dir / "checkpoints" / str(state.step)),
    }
    summary["curves"] = str(draw_curves(run_dir, summary=summary)) if skipped else None
    replace_file(run_dir / "summary.json", json.dumps(summary, indent=1) + "\n")
    return summary


def summary_text(summary: dict) -> str:
    """How a run ended, for people."""

    def loss(x: float | None) -> str:
        return "unknown" if x is None else f"{x:.4f}"

    speed, skipped = summary["tokens_per_second"], summary["skipped_steps"]
    run_dir, prompt = Path(summary["checkpoint"]).parent.parent, summary["sample_prompt"]
    lines = [
        f"{summary['parameters']:,} parameters, {summary['step']:,} steps, {summary['tokens']:,} tokens"
        + (f", {speed:,.0f} tokens/s" if speed else "")
        + (f", {skipped} skipped" if skipped else ""),
        f"training cross-entropy {loss(summary['ce'])} nats a token at the last step",
    ]
    if summary["heldout_ce"] is not None:
        labels = ", ".join(f"{label} {loss(x)}" for label, x in summary["heldout"].items() if label != "all")
        lines.append(f"held-out cross-entropy {loss(summary['heldout_ce'])} ({labels})")
    if summary["sample"] is not None:
        lines += ["the model writes:", *(f"    {line}" for line in summary["sample"].splitlines())]
    lines.append(f"picture: {summary['curves']}" if summary["curves"] else "no picture: metrics.jsonl has no steps")
    words = ["python", "sample.py", str(run_dir), *(["--prompt", prompt] if prompt else [])]
    return "\n".join([*lines, f"next: {shlex.join(words)}"])


def size_of_run(summary: dict) -> str:
    """For a title."""
    if "parameters" not in summary:
        return ""
    return f": {summary['parameters']:,} parameters, {summary['tokens']:,} tokens"


def draw_curves(run_dir: Path, path: Path | None = None, summary: dict | None = None) -> Path:
    """RUN/curves.png, or `path`, from metrics.jsonl: training and held-out loss, learning rate, gradient norm."""
    import matplotlib  # a second that only the end of a run needs to spend

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    curves: dict[str, tuple[list, list]] = defaultdict(lambda: ([], []))  # tag -> (steps, values)
    for _, row in read_metrics(run_dir / "metrics.jsonl"):
        for tag in row:
            if tag != "step":
                curves[tag][0].append(row["step"])
                curves[tag][1].append(math.nan if row[tag] is None else row[tag])

    fig, (top, middle, bottom) = plt.subplots(
        3, 1, figsize=(9, 9), height_ratios=(3, 1, 1), sharex=True, layout="constrained"
    )
    steps, ce = map(np.asarray, curves["train/CE loss"])
    top.plot(steps, ce, color="tab:blue", lw=0.6, alpha=0.3)
    span = max(1, len(steps) // 40)
    parts = [slice(i, i + span) for i in range(0, len(ce), span) if np.isfinite(ce[i : i + span]).any()]
    middles, means = [steps[part].mean() for part in parts], [float(np.nanmean(ce[part])) for part in parts]
    top.plot(middles, means, color="tab:blue", label=f"training, means of {span} steps")
    labels = sorted(tag for tag in curves if tag.startswith("eval/lm/") and tag.endswith("/CE loss"))
    labels = labels if len(labels) > 2 else labels[:1]  # of one label "all", the first, says the same
    for tag, color in zip(labels, plt.cm.Dark2.colors * len(labels), strict=False):
        x, y = curves[tag]
        top.plot(x, y, marker="o", ms=4, color=color, label=f"held-out {tag.split('/')[2]}: {y[-1]:.3f} at {x[-1]}")
    top.set(ylabel="cross-entropy (nats/token)", title=f"{run_dir.name}{size_of_run(summary or read_summary(run_dir))}")
    top.legend()
    middle.plot(*curves["optim/LR (group 0)"], color="tab:green")
    middle.set(ylabel="learning rate")
    bottom.plot(*curves["optim/total grad norm"], color="tab:gray", lw=0.8)
    bottom.set(ylabel="gradient norm\n(before clipping)", xlabel="step", yscale="log")
    if skipped := [step for step, skip in zip(*curves["optim/step_skipped"], strict=True) if skip]:
        height = bottom.get_xaxis_transform()  # 0 to 1 from bottom to top
        bottom.vlines(skipped, 0, 1, color="tab:red", lw=0.8, transform=height, label=f"skipped steps: {len(skipped)}")
        bottom.legend()
    for axes in (top, middle, bottom):
        axes.grid(alpha=0.3)
    path = path or run_dir / "curves.png"
    temporary = path.with_suffix(".tmp.png")
    fig.savefig(temporary, dpi=110)
    os.replace(temporary, path)
    plt.close(fig)
    return path

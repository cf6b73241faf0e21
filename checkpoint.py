"""Orbax checkpoints: saved asynchronously, restored on any mesh, compared with the run that they belong to.

    RUN/checkpoints/N/params      fp32 parameters after N updates, a chunk a layer
    RUN/checkpoints/N/opt_state   both moments, Adam's count and the skip rule's window
    RUN/checkpoints/N/meta        JSON: step, instances and tokens seen, identity of the data, config, exact sums, versions

A step has its name only when every chunk of every leaf is on disk. A step that cannot be read is renamed to N.damaged and
the one before it is used; nothing is deleted. Restoring takes target shapes, dtypes and shardings, so a checkpoint of any
mesh fits any other. Here is also what belongs together: which science and which data may change under a run.
"""

import asyncio
import contextlib
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from etils import epath
from jax import lax

import data
import model
from config import (
    RECORDED,
    Config,
    architecture,
    assemble_config,
    cache_compilations,
    environment,
    make_mesh,
    param_shapes,
    param_specs,
    science_dict,
    versions,
)
from processes import RunFailed, first_line, first_of_any_process, flatten, say, speaks, wait_for_processes

FORMAT_VERSION = 1
UNREADABLE = (ValueError, OSError, KeyError, TypeError, AttributeError)  # what Orbax raises on files that are damaged


class DamagedCheckpoint(Exception):
    """A checkpoint that cannot be read."""


# ------------------------------------------------------------------------------------------------- the steps of a run


class Checkpoints:
    """RUN/checkpoints/N with the items params, opt_state and meta, through Orbax's CheckpointManager."""

    def __init__(self, folder: Path, keep: int | None):
        self.folder, written = folder.absolute(), orbax_path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.manager = ocp.CheckpointManager(
            written,
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=False, save_interval_steps=1),
            item_handlers={
                "params": self.checked("params"),
                "opt_state": self.checked("opt_state"),
                "meta": ocp.JsonCheckpointHandler(),
            },
        )
        self.step: int | None = None  # the newest, saved or restored
        # Of the newest save:
        self.saving = {}  # item -> shapes and dtypes
        self.failure: Exception | None = None  # after the processes have written
        self.began: float | None = None  # while it is in flight
        self.seconds: dict[str, float] = {}  # durations, not logged yet

    def checked(self, item: str) -> ocp.PyTreeCheckpointHandler:
        """Writes an item. Process 0 looks whether all that was saved can be found, before the step gets its name and so
        before an older one is deleted."""
        handler = ocp.PyTreeCheckpointHandler()
        finalize = handler.finalize

        def finalize_and_look(item_folder):
            try:
                with patient_loops():
                    finalize(item_folder)
                check_whole(Path(item_folder), self.saving[item])
            except Exception as e:
                self.failure = e
                raise

        handler.finalize = finalize_and_look
        return handler

    def save(self, step: int, params, opt_state, meta: dict) -> None:
        """Begin to write step `step`. A failure of the save before this one is raised here."""

        def by_layer(name, x):  # one chunk a layer, so that a layer can be read without the whole leaf
            if name not in model.LAYER_TENSORS:  # shard_axes would divide embed into single rows
                return ocp.SaveArgs(chunk_byte_size=2**26)
            if x.nbytes // x.shape[0] < 2**20:  # below 1 MiB chunks cost more than they save
                return ocp.SaveArgs()
            return ocp.SaveArgs(chunk_byte_size=x.nbytes // x.shape[0], shard_axes=(0,))

        args_of = {name: by_layer(name, x) for name, x in params.items()}
        opt_args = jax.tree.map(lambda _: ocp.SaveArgs(), opt_state)._replace(mu=args_of, nu=args_of)
        items = ocp.args.Composite(
            params=ocp.args.PyTreeSave(params, save_args=args_of),
            opt_state=ocp.args.PyTreeSave(opt_state, save_args=opt_args),
            meta=ocp.args.JsonSave(meta),
        )
        # One save at a time. Orbax copies the arrays to the host before `save` returns, so the next step may reuse their
        # buffers at once; writing goes on in threads while training does.
        self.wait()
        self.step, self.began = step, time.perf_counter()
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, opt_state))
        self.saving = dict(zip(("params", "opt_state"), shapes, strict=True))
        if not self.write(lambda: self.manager.save(step, args=items)):
            newest = self.manager.latest_step()
            raise RunFailed(f"{self.folder / str(step)}: Orbax refused to save, newest step there: {newest}")

    def restore_latest(self, targets: dict, check: Callable[[dict, Path], None]):
        """(params, opt_state, meta) of the newest usable step, in the shapes and shardings of `targets`; None if there has
        never been one. `check(meta, folder)` raises ValueError where a readable step belongs to another run."""
        # From the newest down. Starting over at step 0 in silence would be the worst outcome, so damaged steps are counted:
        # where only those are left, the run stops.
        damaged = sorted(self.folder.glob("*.damaged"))
        for step in sorted(self.manager.all_steps(), reverse=True):
            folder, damage, state = self.folder / str(step), None, {}
            try:
                meta = read_meta(folder)
                check(meta, folder)
                state = {item: read_item(folder, item, target) for item, target in targets.items()}
            except DamagedCheckpoint as e:
                damage = str(e)
            # Each process reads its own part. If one cannot, all treat the checkpoint as damaged.
            damage = first_of_any_process(damage) or wrong_sums(meta, **state)
            if damage is None:
                self.step = step
                return *state.values(), meta
            say(f"checkpoint {folder} is damaged: {damage}")
            damaged.append(self.set_aside(step))
        if damaged:
            raise RunFailed(
                f"{self.folder}: no usable checkpoint is left beside {', '.join(p.name for p in damaged)}; nothing was "
                "deleted; fix: restore one of them, or start again in another --run-dir"
            )
        return None

    def set_aside(self, step: int) -> Path:
        source = self.folder / str(step)
        target = next(t for i in range(1000) if not (t := source.with_name(f"{step}.damaged{i or ''}")).exists())
        if speaks():
            source.rename(target)
            say(f"renamed it to {target.name}; using the checkpoint before it")
        wait_for_processes(f"set aside {step}")
        self.manager.reload()
        return target

    def write(self, call: Callable):
        """call(), which meets what made the save in flight fail: a full disk, a folder that is gone."""
        try:
            return call()
        except Exception as e:
            raise RunFailed(
                f"{self.folder / str(self.step)}: a checkpoint could not be written: {first_line(e)}; fix: mend that and "
                "start again, it goes on from the newest complete checkpoint"
            ) from e

    def wait(self) -> None:
        """Until the save in flight is complete. Its failure is raised here."""

        def finish():
            while self.manager.is_saving_in_progress():
                if self.failure:  # Orbax would wait 20 minutes for the other processes, which wait for this one
                    raise self.failure
                time.sleep(0.01)
            self.manager.wait_until_finished()

        self.write(finish)
        if self.began is not None:
            self.seconds["checkpoint/save_async_duration_s"] = time.perf_counter() - self.began
            self.began = None

    def durations(self) -> dict[str, float]:
        """Seconds of what ended since the last call, under OLMo-core's names: training waited for `save`, the checkpoint
        was complete after `save_async`. A save that has failed is noticed here."""
        if self.failure or self.began is not None and not self.manager.is_saving_in_progress():
            self.wait()
        seconds, self.seconds = self.seconds, {}
        return seconds

    def close(self) -> None:
        self.wait()
        self.manager.close()


# ------------------------------------------------------------------------------------------------- reading checkpoints


def find_checkpoint(path: str) -> Path:
    """CKPT on a command line: RUN/checkpoints/N, or a run directory (its newest complete step)."""
    p = data.local_path(path)
    if (p / "params").is_dir():
        return p.absolute()
    folder = p / "checkpoints" if (p / "checkpoints").is_dir() else p
    if not (steps := complete_steps(folder)):
        if (p / "config.json").is_file():
            raise ValueError(f"{path}: got a Hugging Face folder, expected a checkpoint; fix: python convert.py from-hf "
                             f"{path} RUN, then RUN in its place")  # fmt: skip
        raise ValueError(f"{path}: no checkpoint found, expected a run directory or RUN/checkpoints/N")
    return steps[max(steps)].absolute()


def complete_steps(folder: Path) -> dict[int, Path]:
    return {int(p.name): p for p in folder.glob("*") if p.name.isdigit() and (p / "meta" / "metadata").is_file()}


def find_steps(path: str, steps: str | None) -> list[Path]:
    """The checkpoints that --steps names: 'all', or a list of steps and 'latest'. Without it the newest."""
    newest = find_checkpoint(path)
    if steps is None:
        return [newest]
    if newest == data.local_path(path).absolute():
        raise ValueError(f"--steps: got the checkpoint {path}, expected a run directory")
    complete = complete_steps(newest.parent)
    if steps == "all":
        return [complete[step] for step in sorted(complete)]
    wanted = [newest.name if word == "latest" else word for word in steps.split(",")]
    if absent := [word for word in wanted if not word.isdigit() or int(word) not in complete]:
        raise ValueError(f"--steps: got {', '.join(absent)}, expected latest, all or some of {sorted(complete)}")
    return [complete[step] for step in sorted(set(map(int, wanted)))]


def run_of(step_folder: Path) -> Path | None:
    """RUN of RUN/checkpoints/N."""
    return step_folder.parent.parent if step_folder.parent.name == "checkpoints" else None


def read_meta(step_folder: Path) -> dict:
    path = step_folder / "meta" / "metadata"
    try:
        meta = json.loads(path.read_text())
        missing = {"format_version", "step", "instances_seen", "data", "config"} - set(meta)
    except (OSError, ValueError, TypeError) as e:
        raise DamagedCheckpoint(f"item 'meta' cannot be read ({path}: {first_line(e)})") from e
    if missing:
        raise DamagedCheckpoint(f"item 'meta' ({path}) lacks {', '.join(sorted(missing))}")
    # A file of another format is whole, only not ours to read: it must not be set aside as damaged.
    if meta["format_version"] != FORMAT_VERSION:
        raise ValueError(f"{path}: got format version {meta['format_version']}, expected {FORMAT_VERSION}")
    return meta


@contextlib.contextmanager
def reading(step_folder: Path):
    """A checkpoint that was asked for by name and cannot be read ends the command."""
    try:
        yield
    except DamagedCheckpoint as e:
        raise RunFailed(f"{step_folder}: {e}") from e


def checked_meta(step_folder: Path) -> dict:
    with reading(step_folder):
        return read_meta(step_folder)


def restore_item(step_folder: Path, item: str, target):
    """One item (params or opt_state) of a checkpoint, in the shapes, dtypes and shardings of `target`."""
    with reading(step_folder):
        meta = read_meta(step_folder)
        tree = read_item(step_folder, item, target)
        if damage := wrong_sums(meta, **{item: tree}):
            raise DamagedCheckpoint(damage)
        return tree


def read_item(step_folder: Path, item: str, target):
    """One item as this process's devices need it. No process waits for another."""
    check_tree(step_folder / item, target)
    args = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    return read_arrays(lambda: ocp.PyTreeCheckpointHandler().restore(orbax_path(step_folder / item), args=args))


def read_arrays(restore: Callable):
    """restore(); DamagedCheckpoint if the files are damaged. A device out of memory stays what it is."""
    try:
        with patient_loops():
            return restore()
    except Exception as e:  # Orbax wraps what tensorstore says (a ValueError) into a bare Exception
        cause = e.__cause__ or e
        if isinstance(cause, UNREADABLE):
            raise DamagedCheckpoint(first_line(cause)) from e
        raise


def leaf_keys(path) -> tuple[str, ...]:
    """Of JAX's path to a leaf the names, as Orbax writes them: ("mu", "embed")."""
    return tuple(str(getattr(k, "key", getattr(k, "name", k))) for k in path)


def check_tree(item_folder: Path, target):
    """The item holds exactly the leaves of `target`, with their shapes and dtypes; Orbax itself would cast silently.
    Returns what Orbax tells of each leaf."""
    item = item_folder.name.partition(".")[0]  # in a step that is being written more follows
    if not item_folder.is_dir():
        raise DamagedCheckpoint(f"item {item!r} is missing ({item_folder})")
    try:
        with patient_loops():
            tree = ocp.PyTreeCheckpointHandler().metadata(orbax_path(item_folder)).tree
    except UNREADABLE as e:
        raise DamagedCheckpoint(f"item {item!r} cannot be read: {first_line(e)}") from e

    def leaves(tree):
        return {
            leaf_keys(path): (tuple(x.shape), np.dtype(x.dtype))
            for path, x in jax.tree_util.tree_leaves_with_path(tree)
        }

    stored, wanted = leaves(tree), leaves(target)
    for name in sorted(stored.keys() | wanted.keys()):
        if stored.get(name) != wanted.get(name):
            raise ValueError(
                f"{item_folder}: {'.'.join(name)}: got {stored.get(name, 'nothing')}, expected "
                f"{wanted.get(name, 'nothing')}; fix: use the model config that this checkpoint was made with"
            )
    return tree


def check_whole(item_folder: Path, target) -> None:
    """All chunks of all leaves are listed in the item. None of them is read."""
    # OCDBT is a B-tree of keys LEAF/CHUNK: listing it costs no reads of arrays. A chunk whose numbers are all zero is
    # stored like any other, since Orbax writes with store_data_equal_to_fill_value.
    leaves = jax.tree.leaves(check_tree(item_folder, target))
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{orbax_path(item_folder)}/"}}
    listed = Counter(key.decode().rpartition("/")[0] for key in ts.KvStore.open(store).result().list().result())
    for leaf in leaves:
        pieces = zip(leaf.shape, leaf.storage.chunk_shape, strict=True)
        expected = math.prod(-(-size // chunk) for size, chunk in pieces) + 1  # and one that describes them
        if listed[leaf.name] != expected:
            item = item_folder.name.partition(".")[0]
            raise DamagedCheckpoint(f"item {item!r}: {leaf.name}: got {listed[leaf.name] - 1} of {expected - 1} chunks")


@jax.jit
def bit_sums(tree):
    """For every leaf the sum of its 32-bit words modulo 2^32: exact, and therefore the same on every mesh."""

    # Integer addition is associative also where it wraps, so no order of devices or chunks can change the sum. A sum of
    # floats would depend on the mesh.
    def leaf(x):
        words = x.astype(jnp.uint32) if x.dtype == jnp.bool_ else lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.sum(words, dtype=jnp.uint32)

    return jax.tree.map(leaf, tree)


def checksums(tree) -> dict[str, int]:
    """Stored in meta. The array files have none of their own: a flipped bit in one is read as another number."""
    sums = jax.tree_util.tree_leaves_with_path(jax.device_get(bit_sums(tree)))
    return {jax.tree_util.keystr(path): int(x) for path, x in sums}


def wrong_sums(meta: dict, **items) -> str | None:
    """Which item differs from its sums in meta, the same in all processes; None if none does."""
    for item, tree in items.items():
        saved = meta.get("checksums", {}).get(item)  # a converted checkpoint may have none
        for name, now in checksums(tree).items() if saved is not None else ():
            if saved.get(name) != now:
                return f"item {item!r}: {name}: the numbers read are not those that were saved"
    return None


class Opened(NamedTuple):
    """A checkpoint's model on the devices of this process."""

    folder: Path  # RUN/checkpoints/N
    meta: dict
    config: Config
    mesh: jax.sharding.Mesh
    params: dict[str, jax.Array]

    @property
    def shards(self) -> int:
        """A number of rows computed at once is a multiple of this."""
        return self.mesh.shape["data"] * self.mesh.shape["fsdp"]

    def compiled(self, body: Callable, in_specs, out_specs, donated=()):
        """jit(shard_map(body(params, ...))). Outputs are equal along tensor, which check_vma cannot see."""
        # Whatever `body` is, it is built on model.layer.
        if getattr(architecture(self.config), "layer", None) is not model.layer:
            raise ValueError(f"model.module: got {self.config.model.module}, expected the layers of model.py: others are "
                             "trained and their loss evaluated, no more; fix: run.sample_prompt: null in training")  # fmt: skip
        specs = (param_specs(self.config), *in_specs)
        mapped = jax.shard_map(body, mesh=self.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
        return jax.jit(mapped, donate_argnums=donated, compiler_options=self.config.hardware.xla_flags)


def open_model(checkpoint: str, hardware: str | None, overrides: list[str]) -> Opened:
    """Parameters on a mesh of all devices. Matrices are held in the compute dtype, to which each use would cast them."""
    folder = find_checkpoint(checkpoint)
    meta = checked_meta(folder)
    config = assemble_config(meta["config"], str(folder), hardware, overrides)
    cache_compilations(config)
    mesh = make_mesh(config, len(jax.devices()))  # rows are filled up to what the mesh needs
    if mesh.shape["context"] != 1:
        raise ValueError(f"mesh: got context {mesh.shape['context']}, expected 1, since rows have different lengths; "
                         "fix: --set 'mesh={data: 1, fsdp: -1, context: 1, tensor: 1}'")  # fmt: skip
    params = restore_item(folder, "params", param_shapes(config, mesh))
    cast = {name: x.astype(config.model.compute_dtype) for name, x in params.items() if not name.endswith("norm")}
    return Opened(folder, meta, config, mesh, params | cast)


# --------------------------------------------------------------------------------------------- Orbax and the file system


class LiteralPath(type(epath.Path("/"))):
    """A folder whose own name is no pattern. Orbax finds the processes' files with `glob`, and epath's takes brackets in
    the name of a run for a pattern: nothing was found, and the checkpoint stayed empty."""

    def glob(self, pattern: str):
        return map(type(self), Path(self).glob(pattern))


def orbax_path(folder: Path) -> LiteralPath:
    """The folder for Orbax and tensorstore; ValueError for the few names under which they would write elsewhere."""
    # Both drop "x/.." without looking where x leads.
    path = os.path.realpath(folder) if ".." in folder.parts else str(folder.absolute())
    for wrong, fault in (
        ("\\" in path, "a backslash"),
        (re.search(r"gs:(/|$)", path), "a name that ends in gs:"),
        (re.search(r"\.__lock(/|$)", path), "a name that ends in .__lock"),
        (re.search(r"[\udc80-\udcff]", path), "a byte that is not UTF-8"),
        (re.match(r"/(gs|s3|az|hf)(/|$)", path), "a top folder that is called as a bucket: gs, s3, az, hf"),
    ):
        if wrong:
            raise ValueError(
                f"{path!r}: got {fault}, expected a path that Orbax can write to; fix: another name, or a symbolic link"
            )
    return LiteralPath(path)


class PatientLoop(asyncio.SelectorEventLoop):
    """Orbax closes its loop at the first leaf that cannot be read, while tensorstore still reads the others, which then
    call into a closed loop: screens of tracebacks, and now and then a crash. This loop lets them end first."""

    def close(self) -> None:
        if not self.is_closed() and (tasks := asyncio.all_tasks(self)):
            self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        super().close()


@contextlib.contextmanager
def patient_loops():
    """Orbax makes its loops with asyncio.new_event_loop."""
    new_event_loop, asyncio.new_event_loop = asyncio.new_event_loop, PatientLoop
    try:
        yield
    finally:
        asyncio.new_event_loop = new_event_loop


# ----------------------------------------------------------------------------------------------- what belongs together

# Keys of the model that a later stage may change: precision, padding rows in the softmax, YaRN for long context.
STAGE_MAY_CHANGE = ("compute_dtype", "grad_reduce_dtype", "mask_padded_vocab", "init_std", "yarn")
# Of the model of one run only these, and only with --allow.
RUN_MAY_CHANGE = ("model.compute_dtype", "model.grad_reduce_dtype")


def differences(then: dict, now: dict) -> list[tuple[str, object, object]]:
    """(key, then, now) of each value that differs, nested keys dotted."""
    then, now = flatten(then), flatten(now)
    return [
        (key, then.get(key), now.get(key)) for key in sorted(then.keys() | now.keys()) if then.get(key) != now.get(key)
    ]


def check_same_run(meta: dict, config: Config, data_identity: dict, where: Path, allow: Sequence[str]) -> None:
    """Refuse to resume another run. What changes the science of this one is refused unless --allow names it; what only
    steers it (run.*) may change. Both are said."""
    if "opt_state" not in meta.get("items", ["opt_state"]):
        raise ValueError(
            f"{where}: holds no optimizer state; fix: start from it with --init-from and --init-state params"
        )
    if meta.get("stage2_init") or meta.get("averaged"):  # as convert.py once prepared it; tools/average.py
        raise ValueError(f"{where}: is the start of a stage, not a run; fix: another --run-dir, with --init-from and "
                         "--init-state adam")  # fmt: skip
    tokens = meta["instances_seen"] * meta["data"]["sequence_length"]
    if (meta["step"], meta.get("tokens_seen")) != (int(where.name), tokens):
        raise DamagedCheckpoint(
            f"item 'meta' contradicts itself: step {meta['step']}, instances_seen {meta['instances_seen']}, tokens_seen "
            f"{meta.get('tokens_seen')}"
        )
    check_same_data(meta, data_identity, where)
    # Three kinds of keys: what the parameters are (never), what the updates do (only with --allow), how the run is
    # driven (always).
    refused = []
    for key, then, now in differences(meta["config"], science_dict(config)):
        if key == "data.index":  # where it lies; its fingerprint is compared above
            continue
        difference = f"{key}: got {now}, expected {then} as in the run"
        if key.startswith("model.") and key not in RUN_MAY_CHANGE:
            raise ValueError(f"{where}: {difference}; fix: another --run-dir")
        if key == "optim.skip_window":
            raise ValueError(
                f"{where}: {difference}; the window is a part of the state; fix: a new run with --init-from"
            )
        if key.startswith("run.") or any(f"{key}.".startswith(f"{allowed}.") for allowed in allow):
            say(f"{key} changes from {then} to {now}")
        else:
            refused.append(difference)
    if refused:
        keys = " ".join(f"--allow {difference.split(':')[0]}" for difference in refused)
        raise ValueError(f"{where}: {'; '.join(refused)}; fix: leave them as they were, or {keys} if it is meant")


def check_same_data(meta: dict, data_identity: dict, where: Path) -> None:
    """The batches of this run go on where those of the checkpoint ended."""
    recorded = meta["data"]
    for key, now in data_identity.items():
        then = recorded.get(key)
        if then == now or key == "usable":
            continue
        if key == "vocabulary":
            check_same_vocabulary(then, now, where)
        elif key == "held_out":
            if key in recorded:
                say(f"the held-out data changes from {then} to {now}")
        elif key != "global_batch":
            raise ValueError(f"{where}: data.{key}: got {now}, expected {then} as in the run; fix: use the run's own data "
                             "or another --run-dir")  # fmt: skip
        elif meta["instances_seen"] >= min(data_identity["usable"], recorded["usable"]):
            raise ValueError(
                f"{where}: data.global_batch: got {now}, expected {then}: it can change in the first epoch only"
            )


def check_same_vocabulary(then: dict | None, now: dict, where: Path) -> None:
    """The fingerprint covers the ids; EOS decides what a document is. A tokenizer.json may come and go beside them."""
    if then is None:
        say(f"{where}: does not say which tokenizer and EOS its data has; from now on: {now}")
        return
    for key in ("vocab_size", "eos_id"):
        if then[key] != now[key]:
            raise ValueError(f"{where}: data.{key}: got {now[key]}, expected {then[key]} as in the run; fix: use the run's "
                             "own index")  # fmt: skip
    say(f"the tokenizer beside the data changes from {then['tokenizer']} to {now['tokenizer']}")


def check_same_model(then: dict, config: Config, where: str) -> None:
    """Parameters of another model may have the same shapes: other heads, another window, another RoPE."""
    now = science_dict(config)["model"]
    for key in then:
        if then[key] == now.get(key):
            continue
        if key not in STAGE_MAY_CHANGE:
            raise ValueError(f"{where}: model.{key}: got {now.get(key)}, expected {then[key]} as there; fix: the config "
                             "of a later stage keeps the model of the first")  # fmt: skip
        say(f"model.{key} changes from {then[key]} to {now.get(key)}")


def say_changes_of_machine(meta: dict) -> None:
    """What may change the last bits of the run's numbers from here on: packages, and variables that compilers read."""
    for then, now in ((meta.get("versions"), versions()), (meta.get("environment"), environment())):
        for name in sorted(then.keys() | now.keys()) if then is not None else ():
            if then.get(name) != now.get(name) and (then.get(name) or name in RECORDED):
                say(f"{name} changes from {then.get(name)} to {now.get(name)}")

"""Held-out evaluation: the loss of every instance of an index that the model was not trained on.

Training loss proves nothing: a model that memorises has a low one. So the data is compared with the training data before
anything is computed, and the loss does not depend on mesh, batch or hosts: each row's sum is taken on its own, and rows are
added in float64 in the order of the index.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import data
import model
from config import (
    Config,
    architecture,
    batch_specs,
    largest_microbatch,
    local_rows,
    make_execution,
    param_specs,
    platform_of,
    to_device,
)
from processes import inputs_are_checked, say
from vocabulary import TrainingData, described


class EvaluationBatches:
    """Instances of a held-out index in order, each once: `len` batches of one shape, as data.finish_batch makes them.

    With a limit, only so many instances: ids floor(i n / limit), spread evenly, so that every file has its part.
    `instances` are the ids; `domain` is, for each, the place of its file's label in `domains`. The last batch is filled
    up with rows of instance -1 whose loss_mask is all False.

    DIVERGENCE 9: held-out text is divided as training text is, into full instances. OLMo-core's LM evaluator takes a
    document an instance, padded, and divides by its n tokens although only n-1 have a loss."""

    def __init__(
        self,
        index_path: str | os.PathLike,
        data_root: str | os.PathLike | None,
        batch: int,
        rows: Sequence[int] | None = None,
        mask_token: int | None = None,
        document_mask: bool = False,
        limit: int | None = None,
    ):
        length = data.load_index(data.find_index(index_path, data_root)).sequence_length
        config = data.DataConfig(str(index_path), "sequential", 0, length, batch, False, mask_token, document_mask)
        self.source = data.open_data(config, data_root, rows=rows, shuffle=False, held_out=True)
        n, files = self.source.instances, self.source.index.files
        limit = n if limit is None else min(limit, n)
        self.instances = np.arange(limit, dtype=np.int64) * n // limit
        self.domains = sorted({f.label for f in files})
        of_files = np.repeat([self.domains.index(f.label) for f in files], [f.instances for f in files])
        self.domain = of_files[self.instances]

    def __len__(self) -> int:
        return -(-len(self.instances) // self.source.config.global_batch)

    def __iter__(self) -> Iterator[dict]:
        source = self.source
        padded = np.full(len(self) * source.config.global_batch, -1, np.int64)
        padded[: len(self.instances)] = self.instances
        for whole_batch in padded.reshape(len(self), -1):
            instances = whole_batch[source.rows]
            tokens = np.zeros((len(instances), source.index.sequence_length), np.uint32)
            learnt = np.ones(tokens.shape, bool) if source.masked else None
            for row in np.flatnonzero(instances >= 0):
                tokens[row] = source.read(instances[row])
                if source.masked:
                    learnt[row] = source.read_mask(instances[row])
            batch = data.finish_batch(tokens, instances, source.index, source.config, learnt)
            batch["loss_mask"] &= (instances >= 0)[:, None]
            yield batch


class HeldOut:
    """Held-out evaluation of one index: every instance once, token-weighted, summed in float64 in a fixed order.

    `batch` rows are computed at once over all devices. `limit` is a number of instances, spread evenly; None for all.
    `trained` tells what the models were trained on. Another vocabulary is refused; so is the same data, but for
    `on_training_data` (None: where nobody can ask for it).
    """

    def __init__(self, config: Config, mesh, index: str, data_root: str | None, batch: int, limit: int | None,
                 trained: Sequence[TrainingData], on_training_data: bool | None = None):  # fmt: skip
        self.config = dataclasses.replace(config, data=dataclasses.replace(config.data, global_batch=batch))
        self.mesh, self.trained, self.on_training_data = mesh, trained, on_training_data
        self.of: list[dict] = []  # the identity of each index that was opened
        self.batches = self.open(index, data_root, limit)
        self.step = self.compile(row_losses, param_specs(config))

    def open(self, index: str, data_root: str | None, limit: int | None) -> EvaluationBatches:
        d = self.config.data
        rows = local_rows(self.mesh, d.global_batch)
        options = {"rows": rows, "mask_token": d.mask_token, "document_mask": d.document_mask, "limit": limit}
        batches = EvaluationBatches(index, data_root, d.global_batch, **options)
        check_index(batches.source.index, self.config, index)
        if "all" in batches.domains:
            raise ValueError(f"{index}: got the label 'all', which stands for all labels; fix: index with another one")
        self.of.append(self.check_held_out(batches))
        return batches

    def check_held_out(self, batches: EvaluationBatches) -> dict:
        """Identity of the index. It has the vocabulary of the training data and none of its files unless that is meant."""
        path, index = batches.source.path, batches.source.index
        of = described(path, index) | {"instances": len(batches.instances)}
        if unknown := {key for trained in self.trained for key in trained.check_vocabulary(of)}:
            keys = ", ".join(key for key in of if key in unknown)
            say(f"{path}: not compared with the training data, of which too little is known: {keys}")
        if shared := max((trained.trained_on(index) for trained in self.trained), default=0):
            of["trained_on_files"] = shared
            fault = f"{path}: {shared} of {len(index.files)} files are data that the model was trained on"
            if not self.on_training_data:
                flag = "" if self.on_training_data is None else ", or --on-training-data where that is meant"
                raise ValueError(f"{fault}, expected held-out data; fix: another index{flag}")
            say(fault)
        return of

    def compile(self, per_row: Callable, specs, microbatch: int | None = None):
        """jit of (params, sharded as `specs` say, batch) -> per_row(params, micro-batch, config, execution) of every row."""
        microbatch = microbatch or largest_microbatch(self.config, self.mesh)
        execution = make_execution(self.config, microbatch, platform_of(self.mesh))
        per_row = partial(per_row, config=self.config, execution=execution)
        step = jax.shard_map(
            partial(evaluation_step, per_row=per_row, microbatch=microbatch),
            mesh=self.mesh,
            in_specs=(specs, batch_specs(self.config)),
            out_specs=P(),
            check_vma=self.config.hardware.attention != "splash",
        )
        return jax.jit(step, compiler_options=self.config.hardware.xla_flags)

    def by_row(self, params, progress: bool = False, should_stop=lambda: False) -> list[np.ndarray] | None:
        """Columns of `step`'s results, float64 [rows of all batches] each; None if `should_stop` ended it early."""
        inputs_are_checked()
        batch_size, results = self.config.data.global_batch, []
        bar = {"total": len(self.batches), "desc": "evaluating", "unit": "batch", "leave": False}
        for batch in data.progress_bar(self.batches, **bar) if progress else self.batches:
            if should_stop():
                return None
            rows = self.step(params, to_device(batch, self.mesh, self.config, batch_size))
            results.append([np.asarray(x, np.float64) for x in rows])
        n = len(self.batches.domain)  # the rest is padding
        columns = [np.concatenate(x)[:n] for x in zip(*results, strict=True)]
        broken = np.flatnonzero(~np.isfinite(columns).all(axis=0))
        if len(broken):
            label = self.batches.domains[self.batches.domain[broken[0]]]
            say(f"WARNING: {len(broken)} of {n} rows are not finite, the first is row {broken[0]} ({label}): means over them "
                "are no numbers either")  # fmt: skip
        return columns

    def by_label(self, *columns: np.ndarray) -> dict[str, tuple]:
        """{label or "all": (rows, the sum of each column over them)}; a domain of -1 is padding."""
        domain = self.batches.domain
        groups = {label: domain == i for i, label in enumerate(self.batches.domains)} | {"all": domain >= 0}
        return {label: (int(rows.sum()), *(x[rows].sum() for x in columns)) for label, rows in groups.items()}

    def __call__(self, params, progress: bool = False, should_stop=lambda: False) -> dict[str, dict] | None:
        """{label or "all": {"ce", "perplexity", "tokens", "instances"}}; None if `should_stop` ended it early."""
        columns = self.by_row(params, progress, should_stop)
        return columns and {
            label: mean_loss(ce, tokens) | {"instances": n}
            for label, (n, ce, tokens) in self.by_label(*columns).items()
            if n > 0
        }


def row_losses(params, piece, config: Config, execution: model.Execution):
    """(sum of CE over unmasked labels, their number) of each row, [b]. local: piece [b, S/context]."""
    _, per_token = architecture(config).token_loss(params, piece, 0.0, config.model, execution)
    ce = jnp.sum(jnp.where(piece["loss_mask"], per_token.ce_N, 0.0), axis=1)
    return ce, jnp.sum(piece["loss_mask"], axis=1, dtype=jnp.int32)


def evaluation_step(params, batch, per_row: Callable, microbatch: int):
    """per_row(params, micro-batch) of each row, a tuple of [B], whole on every device.

    local: batch [B/(data*fsdp), S/context]. By row, so that the result does not depend on how rows are batched.
    """
    params, batch = model.vary((params, {k: v for k, v in batch.items() if k != "filtered"}))
    pieces = jax.tree.map(lambda x: x.reshape(-1, microbatch, *x.shape[1:]), batch)
    columns = tuple(x.reshape(-1) for x in lax.map(partial(per_row, params), pieces))
    local = columns[0].shape[0]
    first = (lax.axis_index("data") * lax.axis_size("fsdp") + lax.axis_index("fsdp")) * local
    whole = local * lax.axis_size("data") * lax.axis_size("fsdp")

    def spread(x):  # [B/(data*fsdp)] -> [B]: every device adds its rows to zeros
        padded = lax.dynamic_update_slice(model.vary(jnp.zeros(whole, x.dtype)), x, (first,))
        on_first = jnp.where(lax.axis_index("tensor") == 0, padded, 0)  # rows are the same along tensor
        return lax.psum(on_first, model.AXES)

    return tuple(map(spread, columns))


def mean_loss(ce: float, tokens: float) -> dict:
    """Of a summed cross-entropy. The perplexity of a run that has diverged is infinite, and null in JSON; without a token
    there is no mean."""
    with np.errstate(over="ignore"):
        ce = float(ce) / tokens if tokens else np.nan
        return {"ce": ce, "perplexity": float(np.exp(ce)), "tokens": int(tokens)}


def check_index(index: data.Index, config: Config, path: str) -> None:
    if index.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"{path}: got vocab_size {index.vocab_size}, expected at most model.vocab_size {config.model.vocab_size}"
        )
    if index.sequence_length != (S := config.data.sequence_length):
        raise ValueError(
            f"{path}: got sequence_length {index.sequence_length}, expected data.sequence_length {S}; fix: build an index "
            f"with --sequence-length {S}"
        )

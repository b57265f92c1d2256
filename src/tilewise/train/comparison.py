"""Verifies the strategy of a training configuration: runs its model, batch and optimizer on one
device and over a mesh.

The tokens are random (`RandomBatches`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.core import DeviceMesh, LayoutError, Validator
from tilewise.files.writing import writing
from tilewise.strategy import SCHEDULES, PipelineStages, check_offload, microbatches_for
from tilewise.train.random_batches import RandomBatches
from tilewise.train.train_config import TrainConfig, make_optimizer, make_strategy
from tilewise.train.trainer import make_graph

if TYPE_CHECKING:
    from tilewise.session.verify import VerifyReport

__all__ = ["compare_strategy"]

_MOST_STEPS = 10**9
_validate = Validator("train", LayoutError)


def compare_strategy(
    config: TrainConfig,
    mesh: DeviceMesh,
    num_steps: int,
    report: Callable[[str], None],
    *,
    schedule: str | None = None,
    chunks: int | None = None,
    microbatches: int | None = None,
) -> VerifyReport:
    """Compare some steps on one device with the same steps over `mesh`, to the bit.

    Args:
        report: called with a description of the current work.
        schedule: name or file of the pipeline's schedule, instead of the configuration's.
        chunks: runs of layers per stage, instead of the configuration's.
        microbatches: microbatches per step; by default the configuration's accumulation, or as many
            as a pipeline needs to be busy.

    Raises:
        LayoutError, PlanError, ResourceError: the mesh is not possible for this model. Raised
            before any work.
    """
    from tilewise.session.verify import verify_strategy

    where = config.output.offload_directory
    if where is not None and check_offload(config.train.offload):
        with writing(Path(where)):
            Path(where).mkdir(parents=True, exist_ok=True)
    num_steps = Validator("train").integer("compare", "steps", num_steps, 1, _MOST_STEPS)
    config = _with_stages(config, mesh, schedule, chunks)
    strategy = make_strategy(config, mesh)
    graph = make_graph(config, is_padded=config.data.is_padded)
    graph.optimize(make_optimizer(config))
    return verify_strategy(
        graph,
        mesh,
        RandomBatches(config, num_steps),
        strategy=strategy,
        accumulation=_microbatches(config, mesh, strategy.stages) if microbatches is None else microbatches,
        batch_splits=config.train.batch_splits,
        recompute=config.train.recompute,
        offload=config.train.offload,
        offload_directory=where,
        seed=config.train.seed,
        lr=config.optimizer.lr,
        report=report,
    )


def _with_stages(
    config: TrainConfig, mesh: DeviceMesh, schedule: str | None, chunks: int | None
) -> TrainConfig:
    """The configuration with another schedule of its pipeline.

    Raises:
        LayoutError: the mesh has no stages, or the schedule is neither a name nor a file.
    """
    if schedule is None and chunks is None:
        return config
    if mesh.size("pp") == 1:
        _validate.invalid(
            "verify",
            "a schedule and chunks need axis pp in the mesh",
            str(mesh),
            "write pp=2, for example",
        )
    changes: dict[str, object] = {"chunks": chunks}
    if schedule is not None:
        is_name = schedule in SCHEDULES
        if not is_name and not Path(schedule).exists():
            names = ", ".join(SCHEDULES)
            _validate.invalid(
                "verify", f"a schedule must be {names}, or a CSV file", repr(schedule), "correct it"
            )
        changes |= {
            "schedule": schedule if is_name else "1f1b",
            "schedule_file": None if is_name else schedule,
        }
    distribution = config.distribution.model_copy(update=changes)
    return config.model_copy(update={"distribution": distribution})


def _microbatches(config: TrainConfig, mesh: DeviceMesh, stages: PipelineStages | None) -> int:
    """The configuration's accumulation; with a pipeline at least as many as there are stages, or as its
    passes say.
    """
    size, accumulation = mesh.size("pp"), config.train.accumulation
    if stages is None or size == 1:
        return accumulation
    if stages.microbatches is not None:
        return stages.microbatches
    multiple = size if stages.schedule == "interleaved" else 1
    if accumulation >= size and accumulation % multiple == 0:
        return accumulation
    sharing = mesh.size("dp", "fsdp")
    return microbatches_for(stages.schedule, size, config.train.batch_splits, sharing, accumulation)

"""Training: configuration, data preparation, the training loop with checkpoints, evaluation.

This package decides what a run reads and writes on disk. The computation is a graph with a
strategy; this package calls its `step`.
"""

from tilewise.train.alternatives import as_toml
from tilewise.train.comparison import compare_strategy
from tilewise.train.evaluation import CompressionReport, Score, compress_files, score_files
from tilewise.train.lora_section import LoraSection
from tilewise.train.metrics import draw_loss_curve, read_metrics
from tilewise.train.pacing import TimeBudget
from tilewise.train.progress import StepProgress, format_duration, track_work
from tilewise.train.run import PlannedRun, RunResult, plan_run, run_training, train_steps
from tilewise.train.savings import Saving, find_savings, need_of_all, need_per_device
from tilewise.train.schedule import learning_rate
from tilewise.train.train_config import (
    DataSection,
    DistributionSection,
    ModelSection,
    OptimizerSection,
    OutputSection,
    TrainConfig,
    TrainSection,
    check_config,
    load_config,
    make_model_config,
    make_optimizer,
    setting_names,
)
from tilewise.train.trained_parts import finished_names, frozen_digest
from tilewise.train.trainer import (
    Trainer,
    evaluate_model,
    make_graph,
    make_plan,
)
from tilewise.train.training_data import TrainingData, prepare_data
from tilewise.train.tuning import Trial, Tuning, tune_run

__all__ = [
    "CompressionReport",
    "DataSection",
    "DistributionSection",
    "LoraSection",
    "ModelSection",
    "OptimizerSection",
    "OutputSection",
    "PlannedRun",
    "RunResult",
    "Saving",
    "Score",
    "StepProgress",
    "TimeBudget",
    "TrainConfig",
    "TrainSection",
    "Trainer",
    "TrainingData",
    "Trial",
    "Tuning",
    "as_toml",
    "check_config",
    "compare_strategy",
    "compress_files",
    "draw_loss_curve",
    "evaluate_model",
    "find_savings",
    "finished_names",
    "format_duration",
    "frozen_digest",
    "learning_rate",
    "load_config",
    "make_graph",
    "make_model_config",
    "make_optimizer",
    "make_plan",
    "need_of_all",
    "need_per_device",
    "plan_run",
    "prepare_data",
    "read_metrics",
    "run_training",
    "score_files",
    "setting_names",
    "track_work",
    "train_steps",
    "tune_run",
]

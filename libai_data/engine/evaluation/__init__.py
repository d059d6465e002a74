"""Evaluation: each sample counts once, inputs and outputs stay paired, on every mesh."""

from libai_data.engine.evaluation.evaluator import (
    DatasetEvaluator,
    DatasetEvaluators,
    flatten_results_dict,
    print_csv_format,
)
from libai_data.engine.evaluation.inference import inference_context, inference_on_dataset
from libai_data.engine.evaluation.metrics import ClsEvaluator, MeanLossEvaluator, PerplexityEvaluator

__all__ = [
    "ClsEvaluator",
    "DatasetEvaluator",
    "DatasetEvaluators",
    "MeanLossEvaluator",
    "PerplexityEvaluator",
    "flatten_results_dict",
    "inference_context",
    "inference_on_dataset",
    "print_csv_format",
]

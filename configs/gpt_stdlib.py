"""A small GPT that learns Python from the standard library's source files, in minutes on a CPU.

`make train-gpt` writes what it reads, and then runs:

bash tools/train.sh tools/train_net.py configs/gpt_stdlib.py 4 train.dist.tensor_parallel_size=2
"""

from omegaconf import DictConfig

from configs.models.gpt import GPT
from libai_data import build_nlp_test_loader, build_nlp_train_loader
from libai_data.config import LazyCall, get_config
from libai_data.data.datasets import GPTDataset
from libai_data.engine.evaluation import PerplexityEvaluator

graph = get_config("common/models/graph.py").graph
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

_LENGTH = 128
# A token sees, and is predicted from, its own file alone.
_WITHIN_DOCUMENTS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}

dataloader = DictConfig(
    {
        "train": LazyCall(build_nlp_train_loader)(
            dataset=[
                LazyCall(GPTDataset)(
                    data_prefix="data/stdlib/train_text_document",
                    max_seq_length=_LENGTH,
                    shuffle_documents=True,
                    **_WITHIN_DOCUMENTS,
                )
            ],
            # A batch is a few calls of numpy, which no worker would make any sooner.
            num_workers=0,
        ),
        "test": [
            LazyCall(build_nlp_test_loader)(
                dataset=LazyCall(GPTDataset)(
                    data_prefix="data/stdlib/test_text_document", max_seq_length=_LENGTH, **_WITHIN_DOCUMENTS
                ),
                num_workers=0,
            )
        ],
    },
    flags={"allow_objects": True},
)

# As many tokens as `make train-gpt` asks the tokenizer for.
model = LazyCall(GPT)(vocab_size=2048, max_seq_length=_LENGTH, dim=128, depth=2, num_heads=4)

optim.lr = 3e-3
optim.weight_decay = 0.05

train.output_dir = "output/gpt_stdlib"
train.train_micro_batch_size = None
train.global_batch_size = 16
train.test_micro_batch_size = 16
train.train_iter = 300
train.warmup_ratio = 0.1
train.log_period = 20
train.evaluation.evaluator = LazyCall(PerplexityEvaluator)()
train.evaluation.eval_metric = "perplexity"
train.evaluation.eval_mode = "min"
train.evaluation.eval_period = 150
train.checkpointer.period = 150
train.checkpointer.max_to_keep = 3
train.dist.pipeline_num_layers = model.depth

graph.enabled = False

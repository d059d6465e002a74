"""A small GPT that learns to answer, from conversations that are packed, each of which sees itself alone.

It reads data/chat/train.jsonl and data/chat/test.jsonl, JSON lines with `messages`, and data/chat/tokenizer, the folder
of a tokenizer with its chat template. See "Fine-tune on conversations" in docs/text.md.

bash tools/train.sh tools/train_net.py configs/gpt_chat.py 4 train.dist.tensor_parallel_size=2
"""

from omegaconf import DictConfig

from configs.models.gpt import GPT
from libai_data import build_nlp_test_loader, build_nlp_train_loader
from libai_data.config import LazyCall, get_config
from libai_data.data.datasets import ChatDataset, PackedDataset
from libai_data.data.text import load_tokenizer
from libai_data.engine.evaluation import PerplexityEvaluator

graph = get_config("common/models/graph.py").graph
optim = get_config("common/optim.py").optim
train = get_config("common/train.py").train

_LENGTH = 128
tokenization = DictConfig({"tokenizer": LazyCall(load_tokenizer)(path="data/chat/tokenizer")})

dataloader = DictConfig(
    {
        "train": LazyCall(build_nlp_train_loader)(
            dataset=LazyCall(PackedDataset)(
                dataset=LazyCall(ChatDataset)(conversations="data/chat/train.jsonl", max_seq_length=_LENGTH, pad=False),
                length=_LENGTH,
                cut=False,
            ),
            num_workers=0,
        ),
        "test": [
            LazyCall(build_nlp_test_loader)(
                dataset=LazyCall(ChatDataset)(conversations="data/chat/test.jsonl", max_seq_length=_LENGTH),
                num_workers=0,
            )
        ],
    },
    flags={"allow_objects": True},
)

# As many tokens as the tokenizer has, or more.
model = LazyCall(GPT)(vocab_size=512, max_seq_length=_LENGTH, dim=128, depth=2, num_heads=4)

optim.lr = 3e-3
optim.weight_decay = 0.05

train.output_dir = "output/gpt_chat"
train.train_micro_batch_size = None
train.global_batch_size = 8
train.test_micro_batch_size = 8
train.train_iter = 100
train.warmup_ratio = 0.1
train.log_period = 10
train.evaluation.evaluator = LazyCall(PerplexityEvaluator)()
train.evaluation.eval_metric = "perplexity"
train.evaluation.eval_mode = "min"
train.evaluation.eval_period = 50
train.checkpointer.period = 50
train.checkpointer.max_to_keep = 3
train.dist.pipeline_num_layers = model.depth

graph.enabled = False

"""Static graph mode (`graph.enabled=true`), or eager mode."""

from libai_data.config import LazyCall, default_graph
from libai_data.engine.graph import GraphBase

graph = default_graph()
graph.train_graph = LazyCall(GraphBase)(is_train=True)
graph.eval_graph = LazyCall(GraphBase)(is_train=False)

"""How ranks watch over each other, under the name by which training scripts import it."""

from libai_data.mesh.peers.liveness import Liveness, say_farewell, watch_over_ranks

__all__ = ["Liveness", "say_farewell", "watch_over_ranks"]

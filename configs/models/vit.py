"""A vision transformer (Dosovitskiy et al., https://arxiv.org/abs/2010.11929) that trains on any mesh."""

from __future__ import annotations

from typing import Any

from oneflow import nn

from configs.models import layers
from libai_data.errors import ConfigError


class VisionTransformer(nn.Module):
    """Classifies images by the mean of their patches' last hidden states.

    Args:
        image_size: height and width of an image, pixels.
        patch_size: height and width of a patch, pixels; it divides `image_size`.
        in_channels: channels of an image.
        num_classes: classes.
        dim: size of hidden states.
        depth: transformer blocks; block i is on the pipeline stage of layer i.
        num_heads: attention heads.
        mlp_ratio: hidden units of the perceptrons, in multiples of `dim`.
        seed: of the initial values.
    """

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        num_classes: int = 1000,
        dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: int = 4,
        seed: int = 0,
    ) -> None:
        layers.check_sizes(
            image_size=image_size,
            patch_size=patch_size,
            in_channels=in_channels,
            num_classes=num_classes,
            dim=dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
        )
        super().__init__()
        if image_size % patch_size:
            raise ConfigError(f"patch_size is {patch_size}, which does not divide image_size={image_size}.")
        self.patch_size = patch_size
        self.patch_projection = layers.Linear(in_channels * patch_size**2, dim, layer_idx=0)
        self.position_embedding = layers.PositionEmbedding((image_size // patch_size) ** 2, dim, layer_idx=0)
        self.blocks = nn.ModuleList(
            [layers.TransformerBlock(dim, num_heads, mlp_ratio, layer_idx=index) for index in range(depth)]
        )
        self.norm = layers.LayerNorm(dim, layer_idx=-1)
        self.head = layers.Linear(dim, num_classes, layer_idx=-1)
        self.loss = layers.MeanCrossEntropy()
        layers.initialise(self, seed)

    def forward(self, images: Any, labels: Any | None = None) -> dict[str, Any]:
        """Classifies a batch.

        Args:
            images: `[batch, in_channels, image_size, image_size]`, float32, on the first stage.
            labels: `[batch]`, int64, on the last stage; not needed in evaluation.

        Returns:
            In training `{"losses": mean over the global batch}`, else `{"prediction_scores": [batch, num_classes]}`.
        """
        x = self.position_embedding(self.patch_projection(self.patches(images)))
        for block in self.blocks:
            x = block(x)
        scores = self.head(self.norm(x).mean(1))
        if labels is not None and self.training:
            return {"losses": self.loss(scores, labels)}
        return {"prediction_scores": scores}

    def patches(self, images: Any) -> Any:
        """Cuts images into flat patches, `[batch, patches, in_channels * patch_size ** 2]`, row by row."""
        batch, channels, height, width = images.shape
        size = self.patch_size
        x = images.view(batch, channels, height // size, size, width // size, size).permute(0, 2, 4, 1, 3, 5)
        return x.flatten(3).flatten(1, 2)

    set_pipeline_stage_id = staticmethod(layers.set_pipeline_stage_id)
    set_activation_checkpoint = staticmethod(layers.set_activation_checkpoint)

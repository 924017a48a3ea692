"""The token embedding whose vocabulary is split over ranks."""

from __future__ import annotations

import torch
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding


class KunlunVocabParallelEmbedding(VocabParallelEmbedding):
    """Finds this rank's rows with an op; vLLM's own function for it goes through torch.compile."""

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """input_: int32 or int64 [num_tokens]; returns [num_tokens, embedding_dim]."""
        ids = input_.long()
        if self.tp_size == 1:
            return self.quant_method.embedding(self, ids)
        shard = self.shard_indices
        local, outside = torch.empty_like(ids), torch.empty(ids.shape, dtype=torch.bool, device=ids.device)
        torch.ops.kunlun.vocab_parallel_mask(
            local.view(-1),
            outside.view(-1),
            ids.flatten(),
            shard.org_vocab_start_index,
            shard.org_vocab_end_index,
            shard.num_org_vocab_padding,
            shard.added_vocab_start_index,
            shard.added_vocab_end_index,
        )
        rows = self.quant_method.embedding(self, local)
        rows.masked_fill_(outside.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(rows)


def register() -> None:
    """Registers it with vLLM."""
    PluggableLayer.register_oot(KunlunVocabParallelEmbedding, name="VocabParallelEmbedding")

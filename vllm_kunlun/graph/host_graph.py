"""Kunlun Graph on the host target: the ops of a step are recorded while they run and replayed from C++."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor, ForwardContext, get_forward_context, is_forward_context_available
from vllm.sequence import IntermediateTensors

from vllm_kunlun.ops.native import library

logger = logging.getLogger("vllm.kunlun")

_REFUSED = "Kunlun Graph cannot capture"


class CannotCapture(RuntimeError):
    """A step has an op that no graph can replay; the message names it."""


@dataclass(frozen=True)
class _Captured:
    number: int
    inputs: tuple[int, ...]
    output: Any


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, IntermediateTensors):
        yield from value.tensors.values()


def _map_tensors(output: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, IntermediateTensors):
        return IntermediateTensors({name: change(tensor) for name, tensor in output.tensors.items()})
    if isinstance(output, (list, tuple)):
        return type(output)(_map_tensors(item, change) for item in output)
    return output


def _addresses(inputs: dict[str, Any], context: ForwardContext) -> tuple[int, ...]:
    """Where a step's inputs lie: the model's arguments, then the metadata of each KV cache group, once."""
    metadata = context.attn_metadata if isinstance(context.attn_metadata, dict) else {}
    groups = {id(group): group for group in metadata.values()}
    values = [*inputs.values(), *(value for group in groups.values() for value in vars(group).values())]
    return tuple(tensor.data_ptr() for value in values for tensor in _tensors_of(value))


class HostGraphWrapper(CUDAGraphWrapper):
    """The model, whose steps are captured by batch descriptor when they first come and replayed afterwards.

    A capture is an ordinary step with a recorder beside it, so nothing is captured ahead of time.
    """

    def __init__(self, runnable: Callable[..., Any], vllm_config: VllmConfig) -> None:
        super().__init__(runnable, vllm_config, CUDAGraphMode.FULL)
        library.load()
        self._graphs = torch.classes.kunlun_host.Graphs()
        self._captured: dict[BatchDescriptor, _Captured] = {}

    def clear_graphs(self) -> None:
        """Forgets every graph and gives their memory back."""
        self._captured.clear()
        self._graphs = torch.classes.kunlun_host.Graphs()

    def memory(self) -> int:
        """Bytes of the pool that all graphs share."""
        return int(self._graphs.pool_bytes())

    def captured_ops(self) -> dict[BatchDescriptor, list[str]]:
        """Names of the recorded ops, by batch."""
        return {key: self._graphs.op_names(entry.number) for key, entry in self._captured.items()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a step: replayed, captured, or eagerly where the dispatcher chose no graph for this batch.

        Raises CannotCapture where a step cannot be captured.
        """
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return self.runnable(*args, **kwargs)
        assert not args and context.batch_descriptor is not None, "vLLM's runner calls the model with keywords"
        entry = self._captured.get(context.batch_descriptor)
        if entry is None:
            return self._capture(context, kwargs)
        if entry.inputs != _addresses(kwargs, context):
            raise RuntimeError(f"Kunlun Graph: the inputs of {context.batch_descriptor} moved since the capture")
        self._graphs.replay(entry.number)
        return entry.output

    def _capture(self, context: ForwardContext, inputs: dict[str, Any]) -> Any:
        self._graphs.begin()
        try:
            output = self.runnable(**inputs)
            number = self._graphs.end()
        except RuntimeError as error:
            raise CannotCapture(str(error).splitlines()[0]) if _REFUSED in str(error) else error from error
        finally:
            self._graphs.cancel()
        assert context.batch_descriptor is not None
        self._captured[context.batch_descriptor] = _Captured(
            number, _addresses(inputs, context), _map_tensors(output, self._graphs.alias)
        )
        logger.debug("Captured %s", context.batch_descriptor)
        return output
